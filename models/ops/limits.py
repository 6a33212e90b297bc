"""What the Ascend operators can take, checked before any graph is built.

The numbers are those of the public documentation of FusedInferAttentionScore (MindSpore 2.9 and CANN) and of vLLM
Ascend's limit on the tokens of one decode round. Nothing here imports MindSpore: the command line calls it first.
"""

from __future__ import annotations

MAX_WIDTH = 16
"""Tokens per request in one decode round: the last committed one and its drafts."""
MAX_HEAD_DIM = 512
MAX_HEADS = 256
MAX_GROUP = 64
"""Query heads per key/value head."""
MAX_BLOCK_SIZE = 512
MAX_CACHE_ROW = 65536
"""Elements of one cached key row (num_kv_heads * head_dim) with paged caches [blocks, block_size, row]."""
ALIGNMENT = 16
DTYPES = ("bfloat16", "float16")


def storage_dtype(dtype: str) -> tuple[str, str | None]:
    """Returns the dtype that weights, caches and activations get on Ascend, and a line to show if it is another one."""
    if dtype == "float32":
        return "bfloat16", "dtype float32 is stored as bfloat16 on Ascend: its fused attention takes no float32"
    return dtype, None


def check_ascend(head_dim: int, block_size: int, dtype: str, width: int, num_heads: int, num_kv_heads: int) -> None:
    """Raises ValueError, in one line, for a configuration that the Ascend operators cannot run.

    Args:
        head_dim: elements of one attention head.
        block_size: tokens of one KV cache block.
        dtype: of the cache, after ``storage_dtype``.
        width: tokens per request in one decode round (num_speculative_tokens + 1; 1 without drafting).
        num_heads: query heads (of one device, under tensor parallelism).
        num_kv_heads: key/value heads (of one device).
    """
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(
            f"num_speculative_tokens={width - 1}: on Ascend the fused attention operator takes {MAX_WIDTH} tokens per "
            f"decode round, so 1 to {MAX_WIDTH - 1} drafts are allowed; use {MAX_WIDTH - 1 if width > MAX_WIDTH else 1}"
        )
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype={dtype!r}: on Ascend fused attention and its KV cache take {' or '.join(DTYPES)}; use 'bfloat16'"
        )
    _check_aligned("block_size", block_size, MAX_BLOCK_SIZE, "KV cache blocks")
    _check_aligned("head_dim", head_dim, MAX_HEAD_DIM, "attention heads")
    if not 1 <= num_heads <= MAX_HEADS:
        raise ValueError(
            f"num_attention_heads={num_heads}: on Ascend fused attention takes 1 to {MAX_HEADS} heads; "
            "use a model with fewer heads or a larger tensor_parallel_size"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        divisors = [d for d in range(1, num_heads + 1) if num_heads % d == 0]
        nearest = min(divisors, key=lambda d: (abs(d - num_kv_heads), d))
        raise ValueError(
            f"num_key_value_heads={num_kv_heads}: it has to divide num_attention_heads={num_heads}; nearest: {nearest}"
        )
    if num_heads // num_kv_heads > MAX_GROUP:
        least = next(d for d in range(1, num_heads + 1) if num_heads % d == 0 and num_heads // d <= MAX_GROUP)
        raise ValueError(
            f"num_key_value_heads={num_kv_heads}: on Ascend at most {MAX_GROUP} of the {num_heads} query heads "
            f"may share one key/value head; nearest: {least}"
        )
    if num_kv_heads * head_dim > MAX_CACHE_ROW:
        raise ValueError(
            f"num_key_value_heads={num_kv_heads}: times head_dim={head_dim} it may be at most {MAX_CACHE_ROW} "
            f"on Ascend; use at most {MAX_CACHE_ROW // head_dim} heads per device (a larger tensor_parallel_size)"
        )


def _check_aligned(field: str, value: int, largest: int, what: str) -> None:
    if 0 < value <= largest and value % ALIGNMENT == 0:
        return
    nearest = min(max(ALIGNMENT, (value + ALIGNMENT // 2) // ALIGNMENT * ALIGNMENT), largest)
    raise ValueError(
        f"{field}={value}: on Ascend {what} have a multiple of {ALIGNMENT}, at most {largest}; nearest: {nearest}"
    )
