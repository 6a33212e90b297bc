"""GGUF files under Hugging Face names, dequantised a few rows at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ms_spec.models.checkpoint.gguf_header import TensorInfo, read_header
from ms_spec.models.checkpoint.identity import file_identity

# ggml type -> name, values of a block, bytes of a block
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
}
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFCheckpoint:
    """One GGUF file.

    llama.cpp's converter reorders the rows of q and k of the architecture "llama" (pairs (2i, 2i+1) are rotated
    instead of (i, i + D/2)); ``read`` gives them back in Hugging Face's order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.location = str(path)
        self.metadata: Mapping[str, Any]
        self.metadata, tensors = read_header(path)
        if self.metadata.get("split.count", 0) > 1:
            raise ValueError(
                f"{path}: split.count: {self.metadata['split.count']}; merge the parts with gguf-split --merge"
            )
        self._tensors: dict[str, TensorInfo] = {}
        size = path.stat().st_size
        for tensor in tensors:
            _check(path, tensor, size)
            self._tensors[hugging_face_name(tensor.name)] = tensor

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> str:
        kind = _TYPES[self._tensor(name).kind][0]
        return _FLOATS.get(kind, kind)

    @property
    def weights_dtype(self) -> str:
        """The float type that most matrices have; bfloat16 where they are quantised."""
        counts: dict[str, int] = {}
        for tensor in self._tensors.values():
            if len(tensor.shape) > 1:
                kind = _FLOATS.get(_TYPES[tensor.kind][0], "bfloat16")
                counts[kind] = counts.get(kind, 0) + math.prod(tensor.shape)
        return max(counts, key=lambda k: counts[k]) if counts else "float32"

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start:stop along the first axis, dequantised to float32."""
        tensor = self._tensor(name)
        start, stop, _ = slice(start, stop).indices(tensor.shape[0])
        if stop <= start:
            return np.empty((0, *tensor.shape[1:]), np.float32)
        if len(tensor.shape) == 1 and _TYPES[tensor.kind][1] > 1:
            return self._stored(tensor, 0, tensor.shape[0])[start:stop]  # the only row is the block's
        heads = self._permuted_heads(name)
        if heads is None:
            return self._stored(tensor, start, stop)
        head = tensor.shape[0] // heads
        first, last = start // head * head, -(-stop // head) * head
        rows = self._stored(tensor, first, last)
        rows = rows.reshape(-1, head // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
        return np.ascontiguousarray(rows[start - first : stop - first])

    def read_int(self, name: str) -> np.ndarray:
        """GGUF models have no integer tensors."""
        raise ValueError(f"{self.path}: tensor {name} has dtype {self.dtype(name)}, not an integer that can be read")

    def identity(self) -> str:
        return file_identity([self.path])

    def _permuted_heads(self, name: str) -> int | None:
        if self.metadata.get("general.architecture") != "llama":
            return None
        heads = self.metadata.get("llama.attention.head_count")
        if ".self_attn.q_proj." in name:
            return heads
        if ".self_attn.k_proj." in name:
            return self.metadata.get("llama.attention.head_count_kv", heads)
        return None

    def _stored(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Rows in the file's order."""
        kind, block, width = _TYPES[tensor.kind]
        inner = tensor.shape[1:] if len(tensor.shape) > 1 or block == 1 else tensor.shape
        row = math.prod(inner) // block * width
        lines = stop - start if len(tensor.shape) > 1 or block == 1 else 1
        # Mapped for this call alone, so that pages of the source do not pile up in memory.
        raw = np.memmap(self.path, np.uint8, "r", tensor.offset + start * row, (lines, row))
        shape = (stop - start, *tensor.shape[1:])
        if kind == "F32":
            return np.array(raw.view("<f4")).reshape(shape)
        if kind == "F16":
            return raw.view("<f2").astype(np.float32).reshape(shape)
        if kind == "BF16":
            return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(shape)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        return dequantize(np.asarray(raw), GGMLQuantizationType(tensor.kind)).reshape(shape)

    def _tensor(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise ValueError(f"{self.path}: there is no tensor {name}")
        return self._tensors[name]


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; unknown names stay as they are."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{suffix}"
    return name


def _check(path: Path, tensor: TensorInfo, size: int) -> None:
    if tensor.kind not in _TYPES:
        supported = ", ".join(t[0] for t in _TYPES.values())
        raise ValueError(f"{path}: tensor {tensor.name} has type {_type_name(tensor.kind)}; supported: {supported}")
    kind, block, width = _TYPES[tensor.kind]
    if not tensor.shape or tensor.shape[-1] % block:
        raise ValueError(
            f"{path}: tensor {tensor.name} of type {kind} has shape {list(tensor.shape)}; rows need {block}s"
        )
    end = tensor.offset + math.prod(tensor.shape) // block * width
    if end > size:
        raise ValueError(
            f"{path}: truncated: tensor {tensor.name} {list(tensor.shape)} ends at byte {end}, but the file has {size}"
            "; fetch it again"
        )


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"number {kind}"
