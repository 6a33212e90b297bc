"""What the sections of the configuration have in common."""

# No `from __future__ import annotations`: pydantic evaluates the annotations, on Python 3.9 too.
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """Known fields only, of the very type, fixed when made. None for a field means its default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_none(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: value for name, value in given.items() if value is not None or name not in cls.model_fields}
