"""Engine arguments of vLLM that mean nothing here: accepted with the value that changes nothing, refused otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ms_spec.errors import ConfigError, is_neutral

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_local_media_path": ("",),
    "calculate_kv_scales": (False,),
    "code_revision": (),
    "config_format": ("auto",),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0, 0.0),
    "disable_cascade_attn": (False, True),
    "disable_custom_all_reduce": (False, True),
    "disable_sliding_window": (False, True),
    "download_dir": (),
    "enable_lora": (False,),
    "enable_sleep_mode": (False,),
    "guided_decoding_backend": ("auto",),
    "hf_config_path": (),
    "hf_overrides": ({},),
    "hf_token": (),
    "ignore_patterns": (),
    "kv_cache_dtype": ("auto",),
    "limit_mm_per_prompt": ({},),
    "load_format": ("auto",),
    "logits_processors": ([],),
    "max_parallel_loading_workers": (),
    "max_seq_len_to_capture": (8192,),
    "mm_processor_kwargs": ({},),
    "override_generation_config": ({},),
    "pipeline_parallel_size": (1,),
    "preemption_mode": (),
    "revision": (),
    "rope_scaling": ({},),
    "rope_theta": (),
    "runner": ("auto", "generate"),
    "scheduling_policy": ("fcfs",),
    "skip_tokenizer_init": (False,),
    "swap_space": (4, 4.0, 0, 0.0),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (),
}
"""Beside None, which all of them accept."""


def without_neutral(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The other arguments. Raises ConfigError for a value that would change something."""
    for name, neutral in NEUTRAL.items():
        value = arguments.get(name)
        if value is not None and not is_neutral(value, neutral):
            allowed = " or ".join(json.dumps(one) for one in neutral) or "null"
            raise ConfigError(f"{name} = {value!r:.60}: not available in this version; allowed: {allowed}")
    return {name: value for name, value in arguments.items() if name not in NEUTRAL}
