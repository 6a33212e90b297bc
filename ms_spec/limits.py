"""The sizes that an engine runs with, once the model and the device are known."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ms_spec.config import EngineConfig
from ms_spec.errors import ConfigError
from ms_spec.models.mindformers_limits import check_mindformers
from ms_spec.models.ops.limits import check_ascend, storage_dtype
from ms_spec.models.parallel import Shard, part
from ms_spec.proposers.registry import lookahead

if TYPE_CHECKING:
    from ms_spec.models.config import ModelConfig

DEFAULT_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Sizes in tokens, requests and KV blocks. ``num_blocks`` counts the null block."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    prefill_chunk: int = 512
    num_speculative_tokens: int = 0
    tokens_by_batch: tuple[tuple[int, int, int], ...] = ()
    lookahead: tuple[int, ...] = ()
    """Positions behind a step's tokens that proposing 0, 1, ... K drafts writes to. Empty: none."""
    max_logprobs: int = 20
    """Most log-probabilities that a request can ask for at each place."""
    slot_drafts: bool = False
    """Whether part of a draft stays on the device, in the request's slot, and is lost with it."""

    def span(self, tokens: int, drafts: int = 0) -> int:
        """Positions that need a block while a step with ``tokens`` tokens in all proposes ``drafts``."""
        ahead = self.lookahead[drafts] if self.lookahead else 0
        return min(tokens + ahead, self.max_model_len)


def default_block_size(device: str) -> int:
    """Tokens in a KV block: 128 suits the fused attention of Ascend; small blocks waste less elsewhere."""
    return 128 if device == "ascend" else 16


def limits_for(
    config: EngineConfig, model_max_len: int, bytes_per_token: int, device: str = "cpu", free_bytes: int | None = None
) -> Limits:
    """Sizes for this model.

    model_max_len: the longest context that the model allows.
    bytes_per_token: KV cache bytes of one position, all layers, keys and values, target and draft.
    free_bytes: what the cache may take at most where the configuration is silent; default 1 GiB.
    Raises ConfigError if max_model_len is beyond the model, if the cache is too small for one request or larger than
    the machine's memory, or if the drafts of a step are longer than any request.
    """
    config.check_device(device)
    machine = total_memory() if device == "cpu" else None
    length = model_max_len if config.max_model_len is None else config.max_model_len
    if length > model_max_len:
        raise ConfigError(
            f"max_model_len = {length}: must be at most {model_max_len}, the longest context of the model; "
            f"use {model_max_len}"
        )
    size = config.block_size or default_block_size(device)
    per_request = -(-length // size)
    block_bytes = size * bytes_per_token
    if config.num_gpu_blocks_override is not None:
        field, given, blocks = "num_gpu_blocks_override", config.num_gpu_blocks_override, config.num_gpu_blocks_override
        enough = per_request
    elif config.kv_cache_memory_bytes is not None:
        field, given, blocks = "kv_cache_memory_bytes", config.kv_cache_memory_bytes, 0
        blocks, enough = given // block_bytes, per_request * block_bytes
    else:
        most = DEFAULT_CACHE_BYTES if free_bytes is None else free_bytes
        field, given, enough = "kv_cache_memory_bytes", most, per_request * block_bytes
        blocks = min(config.max_num_seqs * per_request, most // block_bytes)
        if blocks < per_request and config.max_model_len is None:
            # Nobody asked for this length: serve what fits.
            blocks = max(1, blocks)
            length, per_request = blocks * size, blocks
    if machine is not None and blocks * block_bytes > machine:
        fit = machine // block_bytes
        raise ConfigError(
            f"{field} = {given}: a KV cache of {_gib(blocks * block_bytes)} is more than the memory of this machine, "
            f"{_gib(machine)}; use {field} <= {fit if field == 'num_gpu_blocks_override' else fit * block_bytes}"
        )
    if blocks < per_request:
        shorter = f", or max_model_len <= {blocks * size}" if blocks else ""
        raise ConfigError(
            f"{field} = {given}: the KV cache would hold {blocks} blocks of {size} tokens ({blocks * size} tokens), "
            f"less than one request of max_model_len = {length}; use {field} >= {enough}{shorter}"
        )
    config.check_drafts_fit(length)
    spec = config.speculative_config
    table = spec.num_speculative_tokens_per_batch_size if spec is not None else None
    return Limits(
        max_model_len=length,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget,
        block_size=size,
        num_blocks=blocks + 1,
        prefill_chunk=config.prefill_chunk,
        num_speculative_tokens=config.num_speculative_tokens,
        tokens_by_batch=tuple((row[0], row[1], row[2]) for row in table or ()),
        lookahead=lookahead(spec),
        max_logprobs=config.max_logprobs,
        slot_drafts=spec is not None and spec.draft_sample_method == "probabilistic",
    )


CACHE_ITEM_BYTES = {"cpu": 4, "ascend": 2}
"""Bytes of one number in the KV cache."""


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def total_memory() -> int | None:
    """Bytes of memory that this process can have at most, None where the system does not say."""
    try:
        sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, OSError, ValueError):
        return None
    with suppress(OSError, ValueError):  # a container's share, "max" where it has none
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes)


def device_of(config: EngineConfig) -> str:
    """The device that ``auto`` means here, "cpu" or "ascend", found out without importing MindSpore."""
    if config.device != "auto":
        return config.device
    return "ascend" if Path("/dev/davinci_manager").exists() else "cpu"


def weights_dtype(config: EngineConfig, model: ModelConfig) -> str:
    """The dtype that weights are to have: float32, bfloat16 or float16."""
    return {"auto": model.dtype, "float": "float32", "half": "float16"}.get(config.dtype, config.dtype)


def model_limits(config: EngineConfig, model: ModelConfig, draft_numbers: int = 0) -> Limits:
    """``limits_for`` of a model. Raises ConfigError.

    The KV cache is that of one worker.
    draft_numbers: what one position takes in the draft's caches, keys and values of all its layers.
    """
    device, model = device_of(config), part(model, Shard(0, config.tensor_parallel_size))
    numbers = model.kv_numbers + draft_numbers
    limits = limits_for(config, model.max_position_embeddings, numbers * CACHE_ITEM_BYTES[device], device)
    if device == "ascend":
        dtype, _ = storage_dtype(weights_dtype(config, model))
        width = limits.num_speculative_tokens + 1
        try:
            check_ascend(model.head_dim, limits.block_size, dtype, width, model.num_heads, model.num_kv_heads)
            if config.model_impl == "mindformers":
                check_mindformers(model)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return limits
