"""From pydantic's report to one line: field, value, what is allowed, nearest fix."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from ms_spec.errors import closest, printable, unknown_name
from ms_spec.vllm_arguments import NEUTRAL


def knob(default: Any, allowed: str, **rules: Any) -> Any:
    """A pydantic field that knows, in words, what it allows."""
    return Field(default, json_schema_extra={"allowed": allowed}, **rules)


def shown(value: Any) -> str:
    """A value in an error message: short, on one line, as a user would write it in JSON."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    text = printable(" ".join(text.split()))
    return text if len(text) <= 80 else text[:77] + "..."


def one_line(error: ValidationError, root: type[BaseModel]) -> str:
    """The first fault of ``error`` as one line. ``root`` is the class whose validation failed."""
    fault = error.errors(include_url=False)[0]
    path = list(fault["loc"])
    owner, field = _find(root, path)
    where = ".".join(str(part) for part in path if not _is_branch(part))
    kind = fault["type"]
    if kind == "extra_forbidden":
        prefix = ".".join(str(part) for part in path[:-1])
        what, others = (f"{prefix} field", {}) if prefix else ("argument", NEUTRAL)
        return unknown_name(what, path[-1], owner.model_fields, others)
    if kind == "value_error":
        message = str(fault["ctx"]["error"])
        return f"{where}.{message}" if where else message
    allowed = _allowed(field)
    if kind == "missing":
        return f"{where} is missing; it must be {allowed}"
    if kind == "invalid_key":
        owner_name = where.rpartition(".")[0]
        return f"{owner_name} has the field name {shown(fault['input'])}: must be {allowed}"
    fix = _nearest(fault, field)
    return f"{where} = {shown(fault['input'])}: must be {allowed}" + (f"; use {fix}" if fix else "")


def _is_branch(part: Any) -> bool:
    """Unions put the branch they tried ("str", "list[str]", "constrained-int") into the path."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part or "-" in part)


def _find(root: type[BaseModel], path: list[Any]) -> tuple[type[BaseModel], Any]:
    """The class that owns the field at ``path``, and the field (None when it has none)."""
    owner, field = root, None
    for part in path:
        if not isinstance(part, str) or _is_branch(part):
            continue
        inner = _model_of(field)
        if inner is not None:
            owner = inner
        field = owner.model_fields.get(part)
    return owner, field


def _model_of(field: Any) -> type[BaseModel] | None:
    if field is None:
        return None
    for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _allowed(field: Any) -> str:
    extra = getattr(field, "json_schema_extra", None)
    return extra["allowed"] if isinstance(extra, dict) and "allowed" in extra else "another value"


def _within(number: float, field: Any) -> float:
    """The nearest number that the bounds of ``field`` allow."""
    for bound in getattr(field, "metadata", ()):
        number = min(max(number, getattr(bound, "ge", number)), getattr(bound, "le", number))
    return number


def _nearest(fault: Mapping[str, Any], field: Any) -> str:
    """The value that the user most likely wants, "" where there is no telling."""
    kind, value, context = fault["type"], fault["input"], fault.get("ctx", {})
    if kind == "literal_error":
        default = getattr(field, "default", None)
        near = closest(value, [part.strip(" '") for part in context["expected"].replace(" or ", ",").split(",")])
        return near or (default if isinstance(default, str) else "")
    if kind == "bool_type":
        guesses = {"true": "true", "1": "true", "false": "false", "0": "false"}
        return guesses.get(str(value).lower(), "")
    if kind in ("int_type", "float_type", "int_from_float") and not isinstance(value, bool):
        try:
            number = _within(float(value), field)
            return str(int(number)) if number == int(number) else ("" if kind != "float_type" else str(number))
        except (TypeError, ValueError, OverflowError):
            return ""
    for bound in ("ge", "le"):
        if bound in context:
            return str(context[bound])
    return ""
