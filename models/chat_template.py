"""Chat templates: from a list of messages to the text a chat model was trained on.

Templates are Jinja programs that come with a model, so they run in a sandbox that cannot change what it is given. The
environment has the names and settings that transformers promises to template authors.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

Messages = Sequence[Mapping[str, Any]]


class NoTemplate(ValueError):
    """There is no usable template, whatever the conversation."""


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as templates expect them: each a dict whose role and content are texts.

    Content in parts, ``[{"type": "text", "text": ...}, ...]``, is joined with line ends. Only a message with
    ``tool_calls`` may go without content. Other fields are left to the template.
    ValueError (one line) names the message.
    """
    if not isinstance(messages, (list, tuple)):
        raise ValueError(f"messages: must be a list of objects with role and content, not {type(messages).__name__}")
    if not messages:
        raise ValueError("messages: is empty; expected at least one object with role and content")
    return [_check_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} = {message!r:.60}: expected an object with role and content")
    for name in ("role", "content"):
        if name not in message and not (name == "content" and message.get("tool_calls")):
            raise ValueError(f"{where} has no {name}; expected an object with role and content")
    if not isinstance(message["role"], str) or not message["role"]:
        raise ValueError(f"{where}.role = {message['role']!r:.60}: must be a text such as 'user'")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        parts = [_check_part(part, f"{where}.content[{place}]") for place, part in enumerate(content)]
        return {**message, "content": "\n".join(parts)}
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"{where}.content = {content!r:.60}: must be a text, or a list of text parts")
    return dict(message)


def _check_part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise ValueError(f"{where} = {part!r:.60}: expected {{'type': 'text', 'text': ...}}")
    if part["type"] != "text":
        raise ValueError(f"{where}.type = {part['type']!r:.60}: not supported; allowed: 'text'")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where}.text = {part.get('text')!r:.60}: must be a text")
    return str(part["text"])


def render(messages: Messages, template: str, variables: Mapping[str, Any], add_generation_prompt: bool) -> str:
    """The conversation as text.

    variables: what else the template may name, such as bos_token; it ignores those that it does not.

    ValueError (one line) for messages of the wrong shape, and for whatever the template objects to.
    """
    if variables.get("continue_final_message"):
        raise ValueError("continue_final_message = True: not supported yet; leave it out")
    names = {"tools": None, "documents": None, **variables}
    names.update(messages=check_messages(messages), add_generation_prompt=add_generation_prompt)
    program = _compiled(template)
    try:
        return str(program.render(names))
    except Exception as error:  # a template is a program
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"messages: the chat template refuses them: {reason}") from None


def choose(templates: Mapping[str, str], where: str, name: str | None = None) -> str:
    """The template of that name, else "default", else the only one. NoTemplate says what to do where there is none."""
    if name is not None and name not in templates:
        raise NoTemplate(f"chat_template: {name!r} is not there; there are: {', '.join(templates) or 'none'}")
    if name is None:
        name = "default" if "default" in templates else next(iter(templates)) if len(templates) == 1 else None
    if name is None:
        if templates:
            raise NoTemplate(
                f"chat_template: {where} has several, none called default: {', '.join(templates)}; name one"
            )
        raise NoTemplate(
            f"chat_template: {where} has none (a base model?); write the prompt out and use generate, or put a "
            "chat_template.jinja beside the model"
        )
    return templates[name]


def read_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template: chat_template.jinja and additional_chat_templates/*.jinja, else from tokenizer_config.json."""
    found: dict[str, str] = {}
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if found:
        return found
    given = tokenizer_config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, Mapping):
        return {str(k): str(v) for k, v in given.items()}
    return {t["name"]: t["template"] for t in given or []}


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what an assistant said, for training; here it only has to be there."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # Jinja's own escapes < and >, which prompts must keep.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(template)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise NoTemplate(f"chat_template: line {error.lineno}: {error.message}") from None
