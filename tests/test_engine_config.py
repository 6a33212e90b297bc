"""Engine arguments: what is wrong is said in one line, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ms_spec.config import CompilationConfig, EngineConfig, RejectionSamplerConfig, SpeculativeConfig
from ms_spec.errors import ConfigError
from ms_spec.limits import limits_for, total_memory
from ms_spec.vllm_arguments import NEUTRAL

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def spec(**changes):
    return {"speculative_config": {**NGRAM, **changes}}


def sampler(**fields):
    return {"additional_config": {"rejection_sampler_config": fields}}


WRONG = [
    ({"max_num_seq": 3}, "'max_num_seq' is unknown; did you mean 'max_num_seqs'"),
    ({"zzz": 3}, "'zzz' is unknown; known: .*block_size"),
    ({"max_num_seqs": 0}, "max_num_seqs = 0: must be an integer from 1 to 4096; use 1"),
    ({"max_num_seqs": True}, "max_num_seqs = true: must be an integer"),
    ({"max_num_seqs": "3"}, 'max_num_seqs = "3": must be an integer from 1 to 4096; use 3'),
    ({"max_num_seqs": 2.5}, "max_num_seqs = 2.5: must be an integer"),
    ({"enforce_eager": 1}, "enforce_eager = 1: must be true or false; use true"),
    ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization = NaN: must be a number above 0"),
    ({"gpu_memory_utilization": 1.5}, "at most 1; use 1"),
    ({"dtype": "bf16"}, "dtype = .bf16.: must be one of auto.*; use bfloat16"),
    ({"block_size": 40}, "block_size = 40: must be a multiple of 16.*nearest: 48"),
    ({"block_size": 1024}, "nearest: 512"),
    ({"seed": -1}, "seed = -1: .*use 0"),
    ({"seed": 2**64}, "seed = .*2\\*\\*64 - 1"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size = 0: must be an integer >= 1; use 1"),
    ({"data_parallel_size": 2}, "data_parallel_size = 2: must be 1"),
    ({"async_scheduling": 1}, "async_scheduling = 1: must be true or false; use true"),
    ({"enable_prefix_caching": True}, "enable_prefix_caching = true: not available"),
    ({"quantization": "ascend"}, 'quantization = "ascend": not available'),
    ({"max_num_batched_tokens": 4}, "max_num_batched_tokens = 4: must be >= max_num_seqs = 8"),
    ({"max_model_len": 100, "num_gpu_blocks_override": 2}, "2 blocks of 16 tokens hold 32 tokens.*at least 7 blocks"),
    ({"model": 5}, "model = 5: must be a directory"),
    ({"speculative_config": "ngram"}, "speculative_config = .ngram.: must be a dict such as"),
    ({"speculative_config": {}}, "speculative_config.method is missing; it must be one of ngram, suffix"),
    ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens is missing"),
    (spec(method="eagel"), "method = .eagel.: must be one of ngram, .*; use eagle"),
    (
        spec(method="eagle"),
        "speculative_config.model is missing; with method 'eagle' it must be the path or name of a draft model",
    ),
    (
        spec(prompt_lokup_max=4),
        "speculative_config field 'prompt_lokup_max' is unknown; did you mean 'prompt_lookup_max'",
    ),
    (
        spec(num_speculative_tokens=0),
        "speculative_config.num_speculative_tokens = 0: must be an integer from 1 to 4096; use 1",
    ),
    ({"data_parallel_size": True}, "data_parallel_size = true: must be 1"),
    (spec(num_speculative_tokens=True), "num_speculative_tokens = true"),
    (spec(num_speculative_tokens="4"), "num_speculative_tokens = .4.: must be an integer from 1 to 4096; use 4"),
    (spec(prompt_lookup_min=5, prompt_lookup_max=2), "prompt_lookup_min = 5: must be <= prompt_lookup_max = 2"),
    (spec(prompt_lookup_max=0), "prompt_lookup_max = 0: .*use 1"),
    (spec(model="draft"), "model = 'draft': only for method medusa.*not for 'ngram'"),
    (spec(method="suffix", prompt_lookup_max=4), "prompt_lookup_max = 4: only for method ngram, not for 'suffix'"),
    (spec(suffix_decoding_max_tree_depth=3), "only for method suffix"),
    (spec(disable_padded_drafter_batch=True), "disable_padded_drafter_batch = True: only for method"),
    (spec(draft_sample_method="probabilistic"), "draft_sample_method"),
    (spec(rejection_sample_method="synthetic"), "synthetic.*not available"),
    (
        spec(method="eagle", model="x", draft_model_config={"hf_confg": {}}),
        "unknown speculative_config.* draft_model_config field|draft_model_config.*hf_confg.*hf_config",
    ),
    (
        spec(method="eagle", model="x", draft_model_config={"hf_config": [1]}),
        r"draft_model_config.hf_config = \[1\]: must be a dict of fields",
    ),
    (
        spec(method="eagle", model="x", draft_tensor_parallel_size=7),
        "speculative_config.draft_tensor_parallel_size = 7: must be 1 ",
    ),
    (
        {**spec(method="medusa", model="x", draft_tensor_parallel_size=2), "tensor_parallel_size": 2},
        "draft_tensor_parallel_size = 2: must be 1 with method 'medusa'",
    ),
    (spec(rejection_sample_method="blok"), "use block"),
    (spec(synthetic_acceptance_length=2.0), "only allowed with rejection_sample_method = 'synthetic'"),
    (spec(num_speculative_tokens_per_batch_size=[[1, 4, 9]]), r"\[1, 4, 9\]: K must be from 0 to .* = 4; use 4"),
    (spec(num_speculative_tokens_per_batch_size=[[1, 4, 4], [3, 8, 2]]), "first_n must be above"),
    (spec(num_speculative_tokens_per_batch_size=[[4, 1, 4]]), "last_n must be >= first_n"),
    (spec(num_speculative_tokens_per_batch_size=[[1, 4]]), "must be \\[first_n, last_n, K\\]"),
    (spec(num_speculative_tokens_per_batch_size=3), "must be a list of"),
    ({**spec(), "compilation_config": {"cudagraph_capture_sizes": [5, 7]}}, "contains 7: .*= 5; nearest: 5 or 10"),
    ({**spec(), "compilation_config": {"cudagraph_capture_sizes": [0]}}, "contains 0: .*nearest: 5"),
    ({"compilation_config": {"cudagraph_capture_sizes": ["5"]}}, "cudagraph_capture_sizes.0 = .5.: must be a list"),
    ({"compilation_config": {"cudagraph_mode": "ALL"}}, "cudagraph_mode = .ALL."),
    ({"compilation_config": {"level": 3}}, "compilation_config field 'level' is unknown"),
    (sampler(posterior_threshold=0.0), "rejection_sampler_config.posterior_threshold = 0.0: must be a number above 0"),
    (sampler(posterior_alpha=-1), "posterior_alpha = -1: must be a number >= 0; use 0"),
    (sampler(enable_block_verfy=True), "did you mean 'enable_block_verify'"),
    ({"additional_config": {"x": 1}}, "additional_config field 'x' is unknown"),
    ({**spec(rejection_sample_method="block"), **sampler(enable_block_verify=False)}, "contradicts"),
    ({**spec(rejection_sample_method="standard"), **sampler(enable_block_verify=True)}, "contradicts"),
    ({"device": "ascend", **spec(num_speculative_tokens=16)}, "= 16: must be at most 15 on Ascend.*use 15"),
    ({"device": "ascend", "dtype": "float32"}, "dtype = 'float32': must be auto, bfloat16 or float16 on Ascend"),
    ({**spec(), "kv_transfer_config": {"kv_role": "kv_producer"}}, "must be 1 on the prefill side"),
    (
        {"speculative_config": {"method": "suffix"}, "kv_transfer_config": {"kv_role": "kv_producer"}},
        "num_speculative_tokens = 24: must be 1 on the prefill side .*kv_role = 'kv_producer'",
    ),
    ({**spec(), "kv_transfer_config": {"kv_role": "kv_consumer"}}, "kv_transfer_config.kv_role.*not available"),
    ({"kv_transfer_config": {"kv_role": "kv_consumer"}}, "kv_transfer_config.kv_role.*not available"),
    ({"kv_transfer_config": {"kv_role": "producer"}}, "use kv_producer"),
    ({"max_num_seqs": 10**9}, "max_num_seqs = 1000000000: must be an integer from 1 to 4096; use 4096"),
    (spec(num_speculative_tokens=10**7), "num_speculative_tokens = 10000000: must be an integer from 1 to 4096"),
    (spec(num_speculative_tokens=10**9), "use 4096"),
    (spec(prompt_lookup_max=10**9), "prompt_lookup_max = 1000000000: must be an integer from 1 to 4096.*use 4096"),
    ({"max_num_seqs": 64, **spec(num_speculative_tokens=4000)}, "at most 16384 .*tokens <= 255, or max_num_seqs <= 4"),
    ({"max_model_len": 64, **spec(num_speculative_tokens=64)}, "= 64: must be below max_model_len = 64; use 63"),
    (spec(method="NGRAM"), "method = .NGRAM.: must be one of ngram, .*; use ngram"),
    ({"device": "cuda"}, "device = .cuda.: must be one of auto, cpu, ascend; use auto"),
    ({"dtype": "BFLOAT16"}, "use bfloat16"),
    ({"speculative_config": {1: 2}}, "speculative_config has the field name 1: must be a dict such as"),
    ({**spec(), "compilation_config": {"cudagraph_capture_sizes": []}}, r"= \[\]: must name .* = 5; use \[5\]"),
    ({"served_model_name": ""}, "served_model_name = .*none empty"),
    ({"served_model_name": ["a", ""]}, "served_model_name = .*none empty"),
    ({"served_model_name": []}, "served_model_name = .*none empty"),
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2: not available in this version; allowed: 1"),
    ({"pipeline_parallel_siz": 1}, "did you mean 'pipeline_parallel_size'"),
    ({"revision": "main"}, "revision = 'main': not available in this version; allowed: null"),
    ({"load_format": "dummy"}, "allowed: .auto."),
    ({"cpu_offload_gb": 4}, "allowed: 0"),
    ({"enable_lora": 0}, "enable_lora = 0: .*allowed: false"),
    ({"zzz": None}, "'zzz' is unknown"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_wrong_arguments(arguments, words):
    for make in (EngineConfig.parse, EngineConfig):
        with pytest.raises(ConfigError, match=words) as caught:
            make(**arguments)
        assert "\n" not in str(caught.value)
        assert "pydantic" not in str(caught.value)


def test_what_vllm_scripts_say_anyway():
    neutral = {
        "swap_space": 4,
        "revision": None,
        "download_dir": None,
        "load_format": "auto",
        "tokenizer_mode": "auto",
        "cpu_offload_gb": 0,
        "max_logprobs": 20,
        "pipeline_parallel_size": 1,
        "enable_prefix_caching": False,
        "enable_lora": False,
    }
    assert EngineConfig.parse("some/model", **neutral) == EngineConfig.parse("some/model", enable_prefix_caching=False)
    assert not set(NEUTRAL) & set(EngineConfig.model_fields)
    for name, values in NEUTRAL.items():
        for value in (None, *values):
            assert EngineConfig.parse(**{name: value}) == EngineConfig.parse()


def test_numpy_numbers_and_paths():
    config = EngineConfig.parse(
        Path("some/model"),
        tokenizer=Path("other"),
        max_num_seqs=np.int64(3),
        max_model_len=np.int32(64),
        gpu_memory_utilization=np.float32(0.5),
        seed=np.uint64(2**64 - 1),
        compilation_config={"cudagraph_capture_sizes": np.array([5, 10])},
        **spec(num_speculative_tokens=np.int64(4)),
    )
    assert (config.model, config.tokenizer, config.max_num_seqs, config.seed) == ("some/model", "other", 3, 2**64 - 1)
    assert config.compilation_config.cudagraph_capture_sizes == [5, 10]
    with pytest.raises(ConfigError, match="max_num_seqs = true"):
        EngineConfig.parse(max_num_seqs=np.True_)


def test_too_many_rows_names_all_settings_and_values_that_work():
    wrong = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    with pytest.raises(ConfigError) as caught:
        EngineConfig.parse(**wrong, **spec(num_speculative_tokens=64))
    text = str(caught.value)
    assert all(name in text for name in ("num_speculative_tokens", "max_num_seqs", "max_num_batched_tokens"))
    assert "num_speculative_tokens <= 31" in text
    EngineConfig.parse(**wrong, **spec(num_speculative_tokens=31))
    EngineConfig.parse(max_num_seqs=64, max_num_batched_tokens=4160, **spec(num_speculative_tokens=64))


@pytest.mark.parametrize("tokens", range(1, 17))
def test_every_k_starts_without_more_settings(tokens):
    config = EngineConfig.parse(**spec(num_speculative_tokens=tokens))
    assert config.num_speculative_tokens == tokens
    assert config.token_budget >= config.max_num_seqs * (tokens + 1)
    sizes = [n * (tokens + 1) for n in (1, 2, 8)]
    EngineConfig.parse(**spec(num_speculative_tokens=tokens), compilation_config={"cudagraph_capture_sizes": sizes})


@pytest.mark.parametrize(
    ("given", "lookup"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 3}, (3, 3)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_lookup_range(given, lookup):
    config = EngineConfig.parse(**spec(**given)).speculative_config
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == lookup


def test_verification_switches_are_one():
    assert not EngineConfig.parse(**spec()).block_verify
    assert EngineConfig.parse(**spec(rejection_sample_method="block")).block_verify
    assert EngineConfig.parse(**spec(), **sampler(enable_block_verify=True)).block_verify
    assert EngineConfig.parse(**spec(rejection_sample_method="block"), **sampler(enable_block_verify=True)).block_verify


def test_neutral_values_and_defaults():
    config = EngineConfig.parse(
        "some/model",
        tensor_parallel_size=1,
        distributed_executor_backend="mp",
        async_scheduling=False,
        enable_expert_parallel=False,
        quantization=None,
        max_model_len=None,
        compilation_config={"cudagraph_mode": "NONE"},
        **spec(num_speculative_tokens_per_batch_size=((1, 4, 4), (5, 8, 0))),
    )
    assert (config.model, config.max_num_seqs, config.eager) == ("some/model", 8, True)
    assert config.prefill_chunk == 512
    assert EngineConfig.parse(max_num_batched_tokens=64).prefill_chunk == 64
    assert EngineConfig.parse(long_prefill_token_threshold=32).prefill_chunk == 32
    assert EngineConfig.parse().num_speculative_tokens == 0
    with pytest.raises(ConfigError, match="at most 15 on Ascend"):
        EngineConfig.parse(**spec(num_speculative_tokens=20)).check_device("ascend")


def test_cache_size():
    small = EngineConfig.parse(max_model_len=100, max_num_seqs=2)
    limits = limits_for(small, 2048, 1000)
    assert (limits.num_blocks, limits.block_size, limits.max_model_len) == (2 * 7 + 1, 16, 100)
    assert limits_for(small, 2048, 1000, device="ascend").block_size == 128
    override = EngineConfig.parse(max_model_len=100, num_gpu_blocks_override=7)
    assert limits_for(override, 2048, 1000).num_blocks == 8
    sized = EngineConfig.parse(max_model_len=100, kv_cache_memory_bytes=16_000 * 9 + 5)
    assert limits_for(sized, 2048, 1000).num_blocks == 10
    with pytest.raises(
        ConfigError, match=r"kv_cache_memory_bytes = 90000: .*5 blocks.*>= 112000, or max_model_len <= 80"
    ):
        limits_for(EngineConfig.parse(max_model_len=100, kv_cache_memory_bytes=90_000), 2048, 1000)
    with pytest.raises(ConfigError, match="max_model_len = 4096: must be at most 2048"):
        limits_for(EngineConfig.parse(max_model_len=4096), 2048, 1000)
    # Nobody asked for the model's full length: what fits is served.
    assert limits_for(EngineConfig.parse(), 131072, 1 << 20).max_model_len == 1024
    with pytest.raises(ConfigError, match="less than one request of max_model_len = 131072"):
        limits_for(EngineConfig.parse(max_model_len=131072), 131072, 1 << 20)


@pytest.mark.parametrize("field", ["num_gpu_blocks_override", "kv_cache_memory_bytes"])
def test_a_cache_larger_than_the_machine_is_refused(field, monkeypatch):
    monkeypatch.setattr("ms_spec.limits.total_memory", lambda: 1 << 30)
    with pytest.raises(
        ConfigError, match=rf"{field} = {10**16}: a KV cache of .* GiB .* 1.0 GiB; use {field} <= "
    ) as no:
        limits_for(EngineConfig.parse(**{field: 10**16}), 2048, 1000)
    most = int(str(no.value).rpartition(" ")[2])
    assert limits_for(EngineConfig.parse(**{field: most}), 2048, 1000).num_blocks == (1 << 30) // 16000 + 1
    with pytest.raises(ConfigError, match="more than the memory"):
        limits_for(EngineConfig.parse(**{field: most + 16000}), 2048, 1000)


def test_the_machine_has_memory():
    assert total_memory() > 1 << 28


def test_bounds_of_the_model():
    with pytest.raises(ConfigError, match="num_speculative_tokens = 300: must be below max_model_len = 256; use 255"):
        limits_for(EngineConfig.parse(**spec(num_speculative_tokens=300)), 256, 1000)
    limits_for(EngineConfig.parse(**spec(num_speculative_tokens=255)), 256, 1000)
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes = 1: .*>= 112000$"):
        limits_for(EngineConfig.parse(max_model_len=100, kv_cache_memory_bytes=1), 2048, 1000)


def test_imports_nothing_heavy():
    heavy = "{'mindspore', 'mindformers', 'torch', 'transformers'}"
    code = f"import sys, ms_spec.config, ms_spec.engine, ms_spec.llm; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "\ud800"}, "dtype = "),
        ({"quantization": "x" * 5000}, "quantization = "),
        ({"speculative_config": {"method": "draft_model", "model": "x" * 5000}}, "num_speculative_tokens is missing"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "model": "x" * 5000}}, "model = "),
        ({"x" * 5000: 1}, "argument"),
    ],
)
def test_an_error_can_be_printed_whatever_was_given(arguments, words):
    with pytest.raises(ConfigError, match=words) as error:
        EngineConfig.parse("m", **arguments)
    assert len(str(error.value).encode()) < 1200


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (lambda fields: fields, EngineConfig.model_fields),
        (lambda fields: spec(method="suffix", **fields), set(SpeculativeConfig.model_fields) - {"method"}),
        (lambda fields: {"compilation_config": fields}, CompilationConfig.model_fields),
        (lambda fields: sampler(**fields), RejectionSamplerConfig.model_fields),
    ],
)
def test_none_means_the_default(wrap, names):
    for name in names:
        without = {"speculative_config": {"method": "suffix"}} if name == "num_speculative_tokens" else wrap({})
        assert EngineConfig.parse(**wrap({name: None})) == EngineConfig.parse(**without), name


def test_a_section_that_was_checked_is_taken_again():
    section = EngineConfig.parse(**spec(method="suffix")).speculative_config
    assert EngineConfig.parse(speculative_config=section).speculative_config == section
