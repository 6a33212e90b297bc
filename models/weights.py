"""From a checkpoint to parameters: checked, packed for the device's operations, cached, and held once.

Rows stream from the checkpoint a few megabytes at a time, are rounded and laid out, and go to one file in the user's
cache, which is then read: parameters share that memory, nothing is held twice. The next start reads the file at once.
Where the cache cannot be written, the weights are packed in memory instead.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from ms_spec.models.checkpoint import Checkpoint
from ms_spec.models.floats import HELD, from_bfloat16_bits, held, rounded
from ms_spec.models.packed_file import PackedFile, write_packed
from ms_spec.models.user_cache import cache_root

PANEL = 16
_CHUNK_VALUES = 1 << 20
_LISTED = 5
_FORMAT = 3
_log = logging.getLogger("ms_spec")


@dataclass(frozen=True)
class WeightSpec:
    """Where one parameter comes from and how it is held.

    ``layout``: "panels" is [ceil(N / 16), K, 16] with element [p, k, j] = W[16 p + j, k], zeros beyond N; bfloat16
    panels come in pairs, [ceil(N / 32), K, 16, 2] with [p, k, j, h] = W[32 p + 16 h + j, k], so that one 32-bit lane
    widens to two values without a shuffle; "rows" is [N, K]; "vector" is [N]. ``dtype``: "float32", "bfloat16" (held as
    its 16 bits, uint16) or "float16". ``sources`` are Hugging Face tensor names, put one below the other, or, if
    ``interleaved``, 16 rows of each in turn (each padded to a multiple of 16). ``optional``: zeros if the checkpoint
    has none of them. ``round_to``: a dtype that the values are rounded through first. ``part`` (i, n): this is slice i
    of a parameter [n, ...] that n specs of one shape fill.
    """

    parameter: Parameter
    shape: tuple[int, ...]
    layout: str
    dtype: str
    sources: tuple[str, ...]
    optional: bool = False
    round_to: str | None = None
    interleaved: bool = False
    part: tuple[int, int] | None = None

    def held_shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        if self.layout != "panels":
            return self.shape
        parts = len(self.sources) if self.interleaved else 1
        panels = -(-self.shape[0] // parts // PANEL) * parts
        if self.dtype == "bfloat16":
            return (-(-panels // 2), self.shape[1], PANEL, 2)
        return (panels, self.shape[1], PANEL)


def load_weights(specs: Sequence[WeightSpec], checkpoint: Checkpoint, *, cache_key: str | None) -> None:
    """Fills all parameters. ``cache_key`` None: packed in memory, nothing is cached.

    ValueError (one line) names all that is missing, left over or of another shape, each with the nearest name. If
    nothing is wrong but that tensors are left over, they get a warning.
    """
    absent = _check(specs, checkpoint)
    packed = None
    if cache_key is not None:
        packed = _from_cache(specs, checkpoint, absent, cache_key)
    for i, group in enumerate(_groups(specs)):
        if packed is not None:
            _bind(group[0], packed.tensor(i, HELD[group[0].dtype], _whole_shape(group)))
        else:
            _bind(group[0], _in_memory(group, checkpoint, absent))


def _groups(specs: Sequence[WeightSpec]) -> list[list[WeightSpec]]:
    """The specs of each parameter, in the order of its parts."""
    groups: dict[int, list[WeightSpec]] = {}
    for spec in specs:
        groups.setdefault(id(spec.parameter), []).append(spec)
    return [sorted(group, key=lambda spec: spec.part or (0, 1)) for group in groups.values()]


def _whole_shape(group: list[WeightSpec]) -> tuple[int, ...]:
    shape = group[0].held_shape()
    return shape if group[0].part is None else (len(group), *shape)


def _from_cache(
    specs: Sequence[WeightSpec], checkpoint: Checkpoint, absent: set[str], cache_key: str
) -> PackedFile | None:
    described = [[s.shape, s.layout, s.dtype, s.sources, s.optional, s.round_to, s.interleaved, s.part] for s in specs]
    key = json.dumps([_FORMAT, cache_key, checkpoint.identity(), described])
    path = cache_root() / "weights" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.packed"
    groups = _groups(specs)
    sizes = [math.prod(_whole_shape(group)) * HELD[group[0].dtype].itemsize for group in groups]
    packed = PackedFile.open(path, sizes)
    if packed is not None:
        return packed
    try:
        write_packed(path, (_packed_group(group, checkpoint, absent) for group in groups))
    except OSError as error:
        _log.warning(
            "packed weights are kept in memory and packed at every start: %s cannot be written (%s); "
            "set MS_SPEC_CACHE to a folder you can write to",
            path.parent,
            error.strerror or error,
        )
        return None
    return PackedFile.open(path, sizes, verify=False)


def _in_memory(group: list[WeightSpec], checkpoint: Checkpoint, absent: set[str]) -> np.ndarray:
    array = np.empty(_whole_shape(group), HELD[group[0].dtype])
    flat, at = array.reshape(-1), 0
    for chunk in _packed_group(group, checkpoint, absent):
        flat[at : at + chunk.size] = chunk.reshape(-1)
        at += chunk.size
    return array


def _bind(spec: WeightSpec, array: np.ndarray) -> None:
    if spec.dtype == "bfloat16" and spec.parameter.dtype == ms.bfloat16:
        # Devices with bfloat16 tensors of their own: copied there anyway, so the wider detour costs little.
        tensor = Tensor(from_bfloat16_bits(array), ms.bfloat16)
    else:
        tensor = Tensor.from_numpy(array)
    spec.parameter.set_data(tensor, slice_shape=True)


def _packed_group(group: list[WeightSpec], checkpoint: Checkpoint, absent: set[str]) -> Iterator[np.ndarray]:
    for spec in group:
        yield from _packed_rows(spec, checkpoint, absent)


def _packed_rows(spec: WeightSpec, checkpoint: Checkpoint, absent: set[str]) -> Iterator[np.ndarray]:
    """The parameter's content in file order, in pieces of whole panels."""
    row = math.prod(spec.shape[1:])
    for values in _ordered_rows(spec, checkpoint, absent, row):
        if spec.round_to:
            values = rounded(values, spec.round_to)
        values = held(values, spec.dtype)
        if spec.layout == "panels":
            halves = 2 if spec.dtype == "bfloat16" else 1
            values = _padded(values, PANEL * halves).reshape(-1, halves, PANEL, row)
            values = np.ascontiguousarray(values.transpose(0, 3, 2, 1))
        yield values


def _ordered_rows(spec: WeightSpec, checkpoint: Checkpoint, absent: set[str], row: int) -> Iterator[np.ndarray]:
    """The rows as they will stand in memory, float32, a few megabytes at a time."""
    step = max(_CHUNK_VALUES // max(row, 1) // (2 * PANEL), 1) * 2 * PANEL
    parts = len(spec.sources) if spec.interleaved else 1
    rows = spec.shape[0] // parts
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        if parts == 1:
            yield _rows(spec, checkpoint, absent, start, stop)
            continue
        pieces = [_rows(spec, checkpoint, absent, start + i * rows, stop + i * rows) for i in range(parts)]
        yield np.stack([_padded(piece, PANEL).reshape(-1, PANEL, row) for piece in pieces], 1).reshape(-1, row)


def _padded(rows: np.ndarray, multiple: int) -> np.ndarray:
    """With zero rows below, up to a multiple."""
    short = -len(rows) % multiple
    return np.concatenate([rows, np.zeros((short, *rows.shape[1:]), rows.dtype)]) if short else rows


def _rows(spec: WeightSpec, checkpoint: Checkpoint, absent: set[str], start: int, stop: int) -> np.ndarray:
    """Rows start:stop of the sources put one below the other, float32."""
    if spec.sources[0] in absent:
        return np.zeros((stop - start, *spec.shape[1:]), np.float32)
    pieces, first = [], 0
    for source in spec.sources:
        last = first + checkpoint.shape(source)[0]
        if first < stop and last > start:
            pieces.append(checkpoint.read(source, max(start - first, 0), min(stop, last) - first))
        first = last
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _check(specs: Sequence[WeightSpec], checkpoint: Checkpoint) -> set[str]:
    """Compares names and shapes before anything is read. Returns the optional sources that are not there."""
    names = set(checkpoint.names())
    expected = {source for spec in specs for source in spec.sources}
    where = getattr(checkpoint, "location", "checkpoint")
    absent: set[str] = set()
    missing: dict[str, None] = {}
    for spec in specs:
        gone = [s for s in spec.sources if s not in names]
        if spec.optional and len(gone) == len(spec.sources):
            absent.update(gone)
        else:
            missing.update(dict.fromkeys(gone))
    unexpected = sorted(n for n in names - expected if not _ignorable(n, expected))
    present = [s for s in specs if s.sources[0] not in absent and missing.keys().isdisjoint(s.sources)]
    misshapen = list(dict.fromkeys(filter(None, (_wrong_shape(s, checkpoint) for s in present))))
    nearest = _nearest(list(missing), unexpected)
    # A left-over name that stands beside the missing one that it resembles is not listed again.
    left_over = [n for n in unexpected if n not in nearest.values()]
    unknown = f"unexpected {_listed(left_over, _nearest(left_over, sorted(expected)))}" if left_over else ""
    if missing or misshapen:
        problems = [f"missing {_listed(list(missing), nearest)}"] if missing else []
        problems += [unknown] if unknown else []
        problems += misshapen[:_LISTED]
        problems += [f"{len(misshapen) - _LISTED} more wrong shapes"] if len(misshapen) > _LISTED else []
        raise ValueError(f"{where}: {'; '.join(problems)}")
    if unknown:
        _log.warning("%s: ignoring %s", where, unknown)
    return absent


def _wrong_shape(spec: WeightSpec, checkpoint: Checkpoint) -> str | None:
    """What is wrong with the shapes of a spec's sources, None if they are right."""
    shapes = [tuple(checkpoint.shape(s)) for s in spec.sources]
    rest = {s[1:] for s in shapes}
    if all(shapes) and rest == {tuple(spec.shape[1:])} and sum(s[0] for s in shapes) == spec.shape[0]:
        return None
    found = ", ".join(f"{name} {list(shape)}" for name, shape in zip(spec.sources, shapes))
    if len(shapes) == 1:
        return f"tensor {found} has the wrong shape; the config asks for {list(spec.shape)}"
    return f"tensors {found} have wrong shapes; the config asks for {list(spec.shape)} together"


def _ignorable(name: str, expected: set[str]) -> bool:
    """Tensors without which a model is complete: rotary tables, an output matrix where embeddings are shared, and
    drafters in the target's own files (MiMo's multi-token prediction, Medusa heads). Also Medusa heads behind those
    that draft."""
    if name.endswith((".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")):
        return True
    if name.startswith(("model.mtp_layers.", "medusa_head.", "medusa_heads.")):
        return True
    if "lm_heads.0.weight" in expected and re.match(r"(blocks|lm_heads)\.\d+\.", name):
        return True
    return name in ("lm_head.weight", "rope_freqs.weight") or name.startswith("rope_factors_")


def _nearest(names: list[str], candidates: list[str]) -> dict[str, str]:
    """The most similar candidate of each name that will be listed and has one."""
    near = {name: difflib.get_close_matches(name, candidates, 1, 0.8) for name in names[:_LISTED]}
    return {name: matches[0] for name, matches in near.items() if matches}


def _listed(names: list[str], nearest: dict[str, str]) -> str:
    shown = [name + (f" (nearest: {nearest[name]})" if name in nearest else "") for name in names[:_LISTED]]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"tensor{'s' * (len(names) > 1)} {', '.join(shown)}{more}"
