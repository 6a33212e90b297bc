"""Draft checkpoints: what is in them, and whether they fit the target. Imports no MindSpore.

One file for each method reads the layouts in which such checkpoints are published and gives the tensors one set of
names. To add a method: write its reader and name it in :func:`open_draft` and in ``detection``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ms_spec.models.config import LayerShape
from ms_spec.models.drafts import detection, dflash, draft_model, eagle, eagle3, medusa, mtp
from ms_spec.models.drafts.dflash import DflashShape
from ms_spec.models.drafts.draft import Draft
from ms_spec.models.drafts.draft_files import OVERRIDES, DraftFiles
from ms_spec.models.drafts.eagle import EagleShape
from ms_spec.models.drafts.eagle3 import Eagle3Shape
from ms_spec.models.drafts.errors import OverrideError
from ms_spec.models.drafts.medusa import MedusaShape
from ms_spec.models.drafts.mtp import MtpShape
from ms_spec.models.loading import Loaded
from ms_spec.models.sources import Source, resolve

__all__ = [
    "METHODS",
    "OVERRIDES",
    "DflashShape",
    "Draft",
    "Eagle3Shape",
    "EagleShape",
    "LayerShape",
    "MedusaShape",
    "MtpShape",
    "OverrideError",
    "detect_method",
    "open_draft",
]

METHODS = ("eagle", "eagle3", "medusa", "mtp", "dflash", "draft_model")
"""Those with a checkpoint."""
_WITH_CONFIG = {"eagle": eagle.read, "eagle3": eagle3.read, "dflash": dflash.read}


def open_draft(
    method: str,
    model: str | Path | None,
    target: Loaded,
    overrides: Mapping[str, Any] | None = None,
) -> Draft:
    """Reads a draft checkpoint and checks that it fits.

    Args:
        method: one of METHODS.
        model: path or Hugging Face name; None: in or beside the target (medusa, mtp).
        target: the model that verifies.
        overrides: fields that replace those of the draft's config.json (eagle, eagle3, dflash), see ``OVERRIDES``;
            ``rope_theta``, and ``eagle_aux_hidden_state_layer_ids`` (states of the target: k is what k layers leave)
            are what public configs have wrong most often.

    Raises:
        OverrideError: an override cannot be, or has a wrong value; the line begins with its name.
        ValueError: one line with the file, the field, its value and what would fit.
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r} has no draft checkpoint; those with one: {', '.join(METHODS)}")
    if overrides and method not in _WITH_CONFIG:
        raise OverrideError(f"{next(iter(overrides))}: cannot be overridden with method {method!r}; leave it out")
    source = None if model is None else _resolved(model)
    return _read(method, source, target, overrides)


def detect_method(model: str | Path) -> str:
    """The method that a draft checkpoint is made for. ValueError (one line) if that cannot be told."""
    source = _resolved(model)
    return "draft_model" if source.kind == "gguf" else detection.detect(source.path)


def _resolved(model: str | Path) -> Source:
    try:
        return resolve(str(model), draft=True)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("model: ")) from None  # who calls this knows the field


def _read(method: str, source: Source | None, target: Loaded, overrides: Mapping[str, Any] | None) -> Draft:
    if source is not None and source.kind == "hf" and method != "mtp":
        _check_method(method, source.path)
    if source is not None and method == "draft_model":
        return draft_model.read(source, target)
    if source is not None and source.kind == "gguf":
        raise ValueError(f"{str(source.path)!r} is a GGUF file; method {method!r} needs a Hugging Face folder")
    folder = None if source is None else source.path
    if method == "medusa":
        return medusa.read(folder, target)
    if method == "mtp":
        return mtp.read(folder, target)
    if folder is None:
        raise ValueError(f"missing; method {method!r} needs the path or name of a draft checkpoint")
    return _WITH_CONFIG[method](DraftFiles(folder, overrides), target)


def _check_method(method: str, folder: Path) -> None:
    """Raises where the tensors are clearly those of another method."""
    detection.said_method(folder)
    found = sorted(detection.of_tensors(detection.tensor_names(folder)))
    if found and method not in found:
        raise ValueError(f"{str(folder)!r} has tensors of {', '.join(found)}; set method to {found[0]!r}")
