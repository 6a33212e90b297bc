"""Which method a draft checkpoint is made for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ms_spec.models.checkpoint import open_checkpoint
from ms_spec.models.drafts import medusa, mtp
from ms_spec.models.tokenizer import read_json

_SPECULATORS = ("eagle", "eagle3", "dflash")
_ARCHITECTURES = {"eagle3": "eagle3", "dflash": "dflash", "medusa": "medusa", "eagle": "eagle"}


def of_tensors(names: Iterable[str]) -> set[str]:
    """The methods whose tensors are among ``names``."""
    names = set(names)

    def some(prefix: str) -> bool:
        return any(name.startswith(prefix) for name in names)

    found = set()
    if "model.embed_tokens.weight" in names and some("model.layers.0."):
        found.add("draft_model")
    if some(mtp.PREFIX):
        found.add("mtp")
    if medusa.canonical(names):
        found.add("medusa")
    if some("midlayer.") or "layers.0.hidden_norm.weight" in names:
        found.add("eagle3")
    elif {"hidden_norm.weight", "encoder.output_norm_enc.weight"} & names:
        found.add("dflash")
    elif (some("fc.") and some("layers.0.")) or (some("fusion_fc.") and some("transformer.")):
        found.add("eagle")
    return found


def said_method(folder: Path) -> set[str]:
    """The method that config.json names, {} if it names none. ValueError for one that is not supported."""
    file = folder / "config.json"
    config = read_json(file)
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind not in _SPECULATORS:
            allowed = ", ".join(_SPECULATORS)
            raise ValueError(f"{file}: speculators_model_type: {kind!r} is not supported; supported: {allowed}")
        return {kind}
    if "dflash_config" in config:
        return {"dflash"}
    if "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return {"medusa"}
    architectures = config.get("architectures") or ()
    for said in [architectures] if isinstance(architectures, str) else architectures:
        for part, method in _ARCHITECTURES.items():
            if part in str(said).lower():
                return {method}
    return set()


def tensor_names(folder: Path) -> list[str]:
    """Of everything in the folder: a file of Medusa heads, and weights under the usual names."""
    heads = medusa.heads_file(folder)
    names = [] if heads is None else open_checkpoint(heads).names()
    usual = any(folder.glob("model*.safetensors*")) or any(folder.glob("pytorch_model*.bin*"))
    return [*names, *open_checkpoint(folder).names()] if usual or heads is None else names


def detect(folder: Path) -> str:
    """The one method. ValueError (one line) says what was found if it could be several, or none."""
    said = said_method(folder)
    there = of_tensors(tensor_names(folder))
    both = there & said if said else there
    if len(both) == 1:
        return both.pop()
    named = f"; config.json says {', '.join(sorted(said))}" if said else ""
    found = f"tensors of {', '.join(sorted(there))}" if there else "no tensors of a known draft"
    raise ValueError(f"{str(folder)!r} has {found}{named}; say which with method")
