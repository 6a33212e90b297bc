"""Engine arguments: vLLM's names, checked before any work is done.

``EngineConfig.parse(model, **arguments)`` is the way in. Whatever is wrong becomes one ``ConfigError`` of one line with
the field, the value, what is allowed and the nearest fix. Nothing here imports MindSpore.
"""

# No `from __future__ import annotations`: pydantic evaluates the annotations, on Python 3.9 too.
import json
import os
from collections.abc import Mapping
from typing import Any, Literal, Optional, Union

from pydantic import ConfigDict, ValidationError, model_validator

from ms_spec.config_errors import knob, one_line, shown
from ms_spec.config_section import Section
from ms_spec.errors import ConfigError
from ms_spec.extraction import METHOD as EXTRACTION
from ms_spec.extraction import storage
from ms_spec.models.mindformers_limits import METHODS
from ms_spec.models.ops.limits import MAX_WIDTH
from ms_spec.proposers import registry
from ms_spec.speculative_config import SpeculativeConfig
from ms_spec.vllm_arguments import without_neutral

DEFAULT_MODEL = "smollm2-135m"
MAX_ROWS_SHORTENED = 512
"""Decode graphs up to this many rows are built even if the token budget can only fill them partly."""
MAX_ROWS = 16384
"""Most rows of a decode step, max_num_seqs x (num_speculative_tokens + 1): their logits alone take gigabytes."""
MAX_SEQS = 4096
MAX_LOGPROBS = 1000


class RejectionSamplerConfig(Section):
    """``additional_config["rejection_sampler_config"]``: how drafts are accepted."""

    enable_block_verify: bool = knob(False, "true or false")
    enable_entropy_verify: bool = knob(False, "true or false")
    posterior_threshold: float = knob(0.95, "a number above 0 and at most 1", gt=0, le=1)
    posterior_alpha: float = knob(0.4, "a number >= 0", ge=0)


class AdditionalConfig(Section):
    """``additional_config``: options that vLLM-Ascend keeps outside vLLM's own."""

    rejection_sampler_config: RejectionSamplerConfig = knob(
        RejectionSamplerConfig(), 'a dict such as {"enable_block_verify": true}'
    )


class CompilationConfig(Section):
    """``compilation_config``: which decode graphs are compiled, and whether any are."""

    cudagraph_capture_sizes: Optional[list[int]] = knob(
        None, "a list of row counts, each a positive multiple of num_speculative_tokens + 1"
    )
    cudagraph_mode: Literal["FULL_DECODE_ONLY", "FULL", "NONE"] = knob(
        "FULL_DECODE_ONLY", "one of FULL_DECODE_ONLY, FULL, NONE (NONE runs without compiled graphs)"
    )


class KVTransferConfig(Section):
    """``kv_transfer_config``: prefill and decode on different machines, or where hidden states go."""

    model_config = ConfigDict(extra="allow")

    kv_connector: Optional[str] = knob(None, "the name of a connector")
    kv_connector_extra_config: Optional[dict[str, Any]] = knob(None, "a dict")

    kv_role: Optional[Literal["kv_producer", "kv_consumer", "kv_both"]] = knob(
        None, "one of kv_producer, kv_consumer, kv_both"
    )


def _plain(value: Any) -> Any:
    """Without NumPy's scalars and arrays, with texts for paths and lists for tuples."""
    if hasattr(value, "__fspath__"):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _unavailable(field: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"{field} = {shown(value)}: not available in this version; allowed: {allowed}")


class EngineConfig(Section):
    """Every argument of ``LLM``. ``None`` means: chosen from the model and the device."""

    model: str = knob(DEFAULT_MODEL, "a directory, a .gguf file, a Hugging Face name or an alias", min_length=1)
    tokenizer: Optional[str] = knob(None, "a directory or a Hugging Face name", min_length=1)
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = knob(
        "auto", "one of auto, float32, bfloat16, float16"
    )
    device: Literal["auto", "cpu", "ascend"] = knob("auto", "one of auto, cpu, ascend")
    model_impl: Literal["auto", "ms_spec", "mindformers"] = knob("auto", "one of auto, ms_spec, mindformers")
    max_model_len: Optional[int] = knob(None, "an integer >= 2", ge=2)
    max_num_seqs: int = knob(8, f"an integer from 1 to {MAX_SEQS}", ge=1, le=MAX_SEQS)
    max_num_batched_tokens: Optional[int] = knob(None, "an integer >= 1 and >= max_num_seqs", ge=1)
    long_prefill_token_threshold: int = knob(0, "an integer >= 0 (tokens of one prompt chunk; 0: no limit)", ge=0)
    block_size: Optional[int] = knob(None, "a multiple of 16 from 16 to 512")
    gpu_memory_utilization: float = knob(0.9, "a number above 0 and at most 1", gt=0, le=1)
    kv_cache_memory_bytes: Optional[int] = knob(None, "an integer >= 1 (bytes)", ge=1)
    num_gpu_blocks_override: Optional[int] = knob(None, "an integer >= 1 (KV blocks)", ge=1)
    tensor_parallel_size: int = knob(1, "an integer >= 1", ge=1)
    data_parallel_size: int = knob(1, "1", ge=1, le=1)
    enable_expert_parallel: bool = knob(False, "true or false")
    enable_chunked_prefill: Optional[bool] = knob(None, "true (prompts are always chunked)")
    enable_prefix_caching: Optional[bool] = knob(None, "true or false")
    enforce_eager: bool = knob(False, "true or false")
    async_scheduling: Optional[bool] = knob(None, "true or false")
    seed: Optional[int] = knob(None, "an integer from 0 to 2**64 - 1", ge=0, le=2**64 - 1)
    max_logprobs: int = knob(20, f"an integer from 0 to {MAX_LOGPROBS}", ge=0, le=MAX_LOGPROBS)
    quantization: Optional[str] = knob(None, "null (GGUF files are recognised by themselves)")
    trust_remote_code: bool = knob(False, "true or false (no code of a checkpoint is ever run)")
    served_model_name: Union[str, list[str], None] = knob(None, "a name or a list of names")
    generation_config: Literal["auto", "vllm"] = knob(
        "auto", "'auto' (sampling defaults come from the checkpoint) or 'vllm' (they do not)"
    )
    distributed_executor_backend: Optional[Literal["mp", "msrun"]] = knob(None, "'mp' or 'msrun' (no effect)")
    disable_log_stats: bool = knob(True, "true or false")
    kv_transfer_config: Optional[KVTransferConfig] = knob(None, 'a dict such as {"kv_role": "kv_producer"}')
    compilation_config: CompilationConfig = knob(
        CompilationConfig(), 'a dict such as {"cudagraph_capture_sizes": [5, 40]}'
    )
    additional_config: AdditionalConfig = knob(AdditionalConfig(), 'a dict such as {"rejection_sampler_config": {}}')
    speculative_config: Optional[SpeculativeConfig] = knob(
        None, 'a dict such as {"method": "ngram", "num_speculative_tokens": 4}'
    )

    @classmethod
    def parse(cls, model: Optional[str] = None, **arguments: Any) -> "EngineConfig":
        """Checks every argument. Raises ConfigError (one line). None for a field with a default means the default."""
        return cls(**arguments, **({} if model is None else {"model": model}))

    def __init__(self, **arguments: Any) -> None:
        try:
            super().__init__(**{name: _plain(value) for name, value in without_neutral(arguments).items()})
        except ValidationError as error:
            raise ConfigError(one_line(error, type(self))) from None

    @property
    def num_speculative_tokens(self) -> int:
        """K, 0 without speculation."""
        spec = self.speculative_config
        return 0 if spec is None else (spec.num_speculative_tokens or 0)

    @property
    def draft_ranks(self) -> int:
        """How many workers share a draft; 1: each of them has the whole draft."""
        spec = self.speculative_config
        return 1 if spec is None else (spec.draft_tensor_parallel_size or 1)

    @property
    def extracts(self) -> bool:
        """Whether hidden states are saved."""
        return self.speculative_config is not None and self.speculative_config.method == EXTRACTION

    @property
    def token_budget(self) -> int:
        """Tokens that one step may compute, drafts included."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(512, self.max_num_seqs * (self.num_speculative_tokens + 1))

    @property
    def prefill_chunk(self) -> int:
        """Most tokens of one prompt in one call: 512, less where the budget or long_prefill_token_threshold is less."""
        limit = min(512, self.token_budget)
        return min(limit, self.long_prefill_token_threshold) if self.long_prefill_token_threshold else limit

    @property
    def block_verify(self) -> bool:
        """Whether drafts are verified as a block."""
        spec = self.speculative_config
        asked = spec is not None and spec.rejection_sample_method == "block"
        return asked or self.additional_config.rejection_sampler_config.enable_block_verify

    @property
    def eager(self) -> bool:
        """Whether to run without compiled graphs."""
        return self.enforce_eager or self.compilation_config.cudagraph_mode == "NONE"

    @model_validator(mode="after")
    def _check(self) -> "EngineConfig":
        if self.model_impl == "mindformers":
            self._check_mindformers()
        self._check_available()
        self._check_sizes()
        self._check_speculation()
        if self.device != "auto":
            self._check_on(self.device)
        return self

    def check_device(self, device: str) -> None:
        """The rules of the device that ``auto`` turned out to be ("cpu" or "ascend"). Raises ConfigError."""
        try:
            self._check_on(device)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def check_drafts_fit(self, max_model_len: int) -> None:
        """Raises ConfigError for more drafts per step than a context of that length can ever take."""
        tokens = self.num_speculative_tokens
        if tokens >= max_model_len:
            raise ConfigError(
                f"speculative_config.num_speculative_tokens = {tokens}: must be below max_model_len = {max_model_len}; "
                f"use {max_model_len - 1}"
            )

    def _check_available(self) -> None:
        kv = self.kv_transfer_config
        if self.extracts:
            storage(None if kv is None else kv.model_dump(exclude_unset=True))
        elif kv is not None:
            # Models with state layers, of which there are none here, would need the same K on both sides instead.
            if kv.kv_role == "kv_producer" and self.num_speculative_tokens > 1:
                raise ValueError(
                    f"speculative_config.num_speculative_tokens = {self.num_speculative_tokens}: must be 1 on the "
                    "prefill side (kv_transfer_config.kv_role = 'kv_producer'); use 1"
                )
            raise _unavailable("kv_transfer_config.kv_role", kv.kv_role, "no kv_transfer_config")
        ranks = self.speculative_config.draft_tensor_parallel_size if self.speculative_config is not None else None
        if self.draft_ranks > 1 and self.speculative_config is not None and self.speculative_config.method == "medusa":
            raise ValueError(
                f"speculative_config.draft_tensor_parallel_size = {ranks}: must be 1 with method 'medusa', whose heads "
                "every worker has as a whole; use 1"
            )
        if ranks not in (None, 1, self.tensor_parallel_size):
            allowed = sorted({1, self.tensor_parallel_size})
            raise ValueError(
                f"speculative_config.draft_tensor_parallel_size = {ranks}: must be {' or '.join(map(str, allowed))} "
                "(1, or tensor_parallel_size); use 1"
            )
        for field in ("enable_expert_parallel", "enable_prefix_caching"):
            if getattr(self, field):
                raise _unavailable(field, True, "false")
        if self.enable_chunked_prefill is False:
            raise _unavailable(
                "enable_chunked_prefill", False, "true; a large max_num_batched_tokens makes chunks rare"
            )
        if self.quantization is not None:
            raise _unavailable("quantization", self.quantization, "null (GGUF files are recognised by themselves)")
        names = self.served_model_name
        if names is not None and not all([names] if isinstance(names, str) else names or [""]):
            raise ValueError(f"served_model_name = {json.dumps(names)}: must be a name or a list of names, none empty")

    def _check_sizes(self) -> None:
        size = self.block_size
        if size is not None and (size % 16 or not 16 <= size <= 512):
            near = min(512, max(16, (size + 8) // 16 * 16))
            raise ValueError(f"block_size = {size}: must be a multiple of 16 from 16 to 512; nearest: {near}")
        budget, seqs = self.token_budget, self.max_num_seqs
        if budget < seqs:
            raise ValueError(
                f"max_num_batched_tokens = {budget}: must be >= max_num_seqs = {seqs}, one token per request and step; "
                f"use max_num_batched_tokens >= {seqs} or max_num_seqs <= {budget}"
            )
        width, longest = self.num_speculative_tokens + 1, self.max_model_len
        if longest is not None:
            self.check_drafts_fit(longest)
        if seqs * width > MAX_ROWS:
            raise ValueError(
                f"speculative_config.num_speculative_tokens = {width - 1}: a decode step of max_num_seqs = {seqs} "
                f"requests would have {seqs * width} rows, at most {MAX_ROWS} are possible; use num_speculative_tokens "
                f"<= {MAX_ROWS // seqs - 1}, or max_num_seqs <= {MAX_ROWS // width}"
            )
        if seqs * width > max(budget, MAX_ROWS_SHORTENED):
            fit = max(1, max(budget, MAX_ROWS_SHORTENED) // seqs - 1)
            raise ValueError(
                f"speculative_config.num_speculative_tokens = {width - 1}: a decode step of max_num_seqs = {seqs} "
                f"requests would have {seqs * width} rows, more than max_num_batched_tokens = {budget}; use "
                f"max_num_batched_tokens >= {seqs * width}, or num_speculative_tokens <= {fit}"
            )
        given, length, blocks = self.block_size or 16, self.max_model_len, self.num_gpu_blocks_override
        if blocks is not None and length is not None and self.device != "ascend" and blocks * given < length:
            raise ValueError(
                f"num_gpu_blocks_override = {blocks}: {blocks} blocks of {given} tokens hold {blocks * given} tokens, "
                f"less than one request of max_model_len = {length}; use at least {-(-length // given)} blocks, or "
                f"max_model_len <= {blocks * given}"
            )

    def _check_speculation(self) -> None:
        width = self.num_speculative_tokens + 1
        sizes = self.compilation_config.cudagraph_capture_sizes
        if sizes == []:
            raise ValueError(
                "compilation_config.cudagraph_capture_sizes = []: must name at least one size, a positive multiple of "
                f"num_speculative_tokens + 1 = {width}; use [{width}], or leave it out"
            )
        for size in sizes or ():
            if size < 1 or size % width:
                lower = max(width, size // width * width)
                near = str(lower) if size <= lower else f"{lower} or {lower + width}"
                raise ValueError(
                    f"compilation_config.cudagraph_capture_sizes contains {size}: each size must be a positive "
                    f"multiple of num_speculative_tokens + 1 = {width}; nearest: {near}"
                )
        spec, sampler = self.speculative_config, self.additional_config.rejection_sampler_config
        if spec is None:
            return
        asked = spec.rejection_sample_method
        if asked is not None and "enable_block_verify" in sampler.model_fields_set:
            switch = sampler.enable_block_verify
            if switch != (asked == "block"):
                raise ValueError(
                    f"speculative_config.rejection_sample_method = '{asked}' contradicts additional_config."
                    f"rejection_sampler_config.enable_block_verify = {str(switch).lower()}; set one of them"
                )

    def _check_mindformers(self) -> None:
        spec = self.speculative_config
        if spec is not None and spec.method and spec.method not in METHODS:
            raise ValueError(
                f"speculative_config.method = '{spec.method}': must be {' or '.join(METHODS)} with model_impl = "
                "'mindformers', beside which no other network can run in a graph; use ngram, or model_impl = 'ms_spec'"
            )
        if self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size = {self.tensor_parallel_size}: must be 1 with model_impl = 'mindformers'; "
                "use 1, or model_impl = 'ms_spec'"
            )
        if self.eager:
            raise ValueError(
                "enforce_eager = true: not with model_impl = 'mindformers', whose lengths are inputs of compiled "
                "graphs; use false, or model_impl = 'ms_spec'"
            )

    def _check_on(self, device: str) -> None:
        if device == "ascend":
            self._check_ascend()
        elif self.model_impl == "mindformers":
            raise ValueError(
                "model_impl = 'mindformers': needs device = 'ascend', because its operators exist on Ascend NPUs alone "
                "(exporting its graphs needs none); use model_impl = 'ms_spec' on CPU"
            )

    def _check_ascend(self) -> None:
        tokens, spec = self.num_speculative_tokens, self.speculative_config
        more = registry.METHODS[spec.method].more_columns if spec is not None and spec.method else 0
        most = MAX_WIDTH - 1 - more
        if tokens > most:
            added = f", of which method '{spec.method}' adds {more}" if spec is not None and more else ""
            raise ValueError(
                f"speculative_config.num_speculative_tokens = {tokens}: must be at most {most} on Ascend, whose fused "
                f"attention takes {MAX_WIDTH} tokens per decode step{added}; use {most}"
            )
        if self.dtype in ("float32", "float"):
            raise ValueError(f"dtype = '{self.dtype}': must be auto, bfloat16 or float16 on Ascend; use bfloat16")


__all__ = [
    "AdditionalConfig",
    "CompilationConfig",
    "ConfigError",
    "EngineConfig",
    "RejectionSamplerConfig",
    "SpeculativeConfig",
]
