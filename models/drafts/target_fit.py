"""Whether a draft was made for a target: vocabulary, widths, and the states of the target that it is fed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ms_spec.models.checkpoint import Checkpoint
from ms_spec.models.config import FieldError
from ms_spec.models.drafts.errors import of_tensors
from ms_spec.models.drafts.renamed import RenamedCheckpoint
from ms_spec.models.loading import Loaded

_MOST_PADDING, _MULTIPLE = 1024, 64
_CHUNK_VALUES = 1 << 20
_AUX = "eagle_aux_hidden_state_layer_ids"


def is_padded(size: int, tokens: int) -> bool:
    """Whether a matrix of ``size`` rows can be one for so many tokens: as many, or padded to a multiple of 64."""
    return size == tokens or (tokens < size < tokens + _MOST_PADDING and size % _MULTIPLE == 0)


def check_vocabulary(size: int, what: str, target: Loaded) -> None:
    """Raises unless ``size`` is the target's vocabulary, both padded or not."""
    vocab = target.config.vocab_size
    if size == vocab:
        return
    known = len(target.tokenizer)
    if not (is_padded(size, known) and is_padded(vocab, known)):
        raise ValueError(
            f"{what}: {size}, but the target's vocabulary has {vocab} ({known} tokens); use a draft that was trained "
            "for this target"
        )


def check_width(width: int, what: str, target: Loaded) -> None:
    """Raises unless ``width`` is that of the target's states."""
    if width != target.config.hidden_size:
        raise ValueError(
            f"{what}: {width}, but the target's states are {target.config.hidden_size} wide; use a draft that was "
            "trained for this target"
        )


def differs(checkpoint: Checkpoint, name: str, target: Loaded, name_there: str) -> bool:
    """Whether a tensor is another one than the target's, number for number; copies need not be held twice."""
    there = target.checkpoint
    if name_there == "lm_head.weight" and target.config.tie_word_embeddings:
        name_there = "model.embed_tokens.weight"
    shape = tuple(checkpoint.shape(name))
    if name_there not in there.names() or tuple(there.shape(name_there)) != shape:
        return True
    step = max(_CHUNK_VALUES // max(math.prod(shape[1:]), 1), 1)
    starts = range(0, shape[0], step)
    return not all(
        np.array_equal(checkpoint.read(name, i, i + step), there.read(name_there, i, i + step)) for i in starts
    )


def own_embedding(checkpoint: RenamedCheckpoint, target: Loaded, width: int) -> bool:
    """Whether ``embed_tokens.weight`` has to be loaded; if not, the target's embeddings serve.

    ``width``: of the drafter's embeddings.
    """
    name, vocab = "embed_tokens.weight", target.config.vocab_size
    if name not in checkpoint.names():
        check_width(width, "hidden_size (without embed_tokens.weight)", target)
        return False
    rows = checkpoint.shape(name)[0]
    with of_tensors(checkpoint.location):
        check_vocabulary(rows, f"{name} rows", target)
    if rows != vocab:  # padded another way: a copy, or as good as one
        check_width(width, f"hidden_size (embed_tokens.weight has {rows} rows for {vocab} tokens)", target)
        return False
    return differs(checkpoint, name, target, "model.embed_tokens.weight")


def states(given: Any, field: str, shift: int, target: Loaded) -> tuple[int, ...]:
    """Ids in a config -> states of the target: k is the residual stream behind k layers, 0 the embeddings.

    ``shift``: 1 where the ids number the layers whose output is meant, from 0; 0 where they are states already.
    """
    layers = target.config.num_layers
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise FieldError(field, f"{given!r:.60}; expected a list of layer ids")
    for i in given:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i + shift <= layers:
            raise FieldError(
                field, f"{i!r:.60} is no layer of the target, which has {layers}; allowed: 0 to {layers - shift}"
            )
    if any(a >= b for a, b in zip(given, given[1:])):
        raise FieldError(field, f"{list(given)} does not rise; give every layer once, the lowest first")
    return tuple(i + shift for i in given)


def default_states(wanted: Sequence[int], rule: str, target: Loaded) -> tuple[int, ...]:
    """``wanted`` if they are states of the target and all different."""
    layers = target.config.num_layers
    if any(a >= b for a, b in zip(wanted, wanted[1:])) or wanted[0] < 0 or wanted[-1] > layers:
        raise ValueError(
            f"num_hidden_layers: {layers} of the target are too few for the default states {rule} "
            f"({', '.join(map(str, wanted))}); name the draft's states with {_AUX}"
        )
    return tuple(wanted)


def explicit_states(config: Mapping[str, Any], target: Loaded) -> tuple[int, ...] | None:
    """Those that the field of vLLM and speculators names, which counts states."""
    given = config.get(_AUX)
    return None if given is None else states(given, _AUX, 0, target)


def check_taken(width: int, layers: Sequence[int], target: Loaded) -> None:
    """Raises unless ``fc.weight`` is as wide as the states that it is to be fed."""
    one = target.config.hidden_size
    if width != len(layers) * one:
        raise FieldError(
            _AUX,
            f"fc.weight takes {width} numbers, but {len(layers)} states of the target ({', '.join(map(str, layers))}) "
            f"have {len(layers)} * {one} = {len(layers) * one}; name the right ones",
        )


def target_ids(offsets: np.ndarray, rows: int, name: str, target: Loaded) -> np.ndarray | None:
    """``d2t`` (target id minus draft id) -> int32 [rows], the target's id of each draft id; None: they are the same."""
    if offsets.shape != (rows,):
        raise ValueError(
            f"{name}: has shape {list(offsets.shape)}; expected [{rows}], as lm_head.weight has {rows} rows"
        )
    return absolute_ids(np.arange(rows) + offsets, f"{name}[i] + i", target)


def absolute_ids(ids: np.ndarray, name: str, target: Loaded) -> np.ndarray | None:
    """Checked ids of the target, int32; None if they are 0 to V - 1 in order."""
    vocab = target.config.vocab_size
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if wrong.size:
        raise ValueError(f"{name}: {int(wrong[0])} is no token id of the target; allowed: 0 to {vocab - 1}")
    return None if np.array_equal(ids, np.arange(vocab)) else ids.astype(np.int32)


def head_ids(rows: int, what: str, target: Loaded) -> np.ndarray | None:
    """Of an output matrix without a table of ids: its rows are the target's tokens, perhaps padded another way.

    int32 [min(rows, V)], or None where rows and V are the same.
    """
    check_vocabulary(rows, what, target)
    vocab = target.config.vocab_size
    return np.arange(rows, dtype=np.int32) if rows < vocab else None
