"""The Ascend limits refuse what the operators cannot run, in one line that names the way out."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tiny_drafts as td

from ms_spec.config import ConfigError, EngineConfig
from ms_spec.draft_choice import choose_draft
from ms_spec.limits import model_limits
from ms_spec.models.config import ModelConfig, RopeConfig
from ms_spec.models.loading import load
from ms_spec.models.ops.limits import check_ascend, storage_dtype

GOOD = {"head_dim": 64, "block_size": 128, "dtype": "bfloat16", "width": 5, "num_heads": 16, "num_kv_heads": 4}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"width": 1},
        {"width": 16},
        {"dtype": "float16"},
        {"block_size": 16},
        {"block_size": 512},
        {"head_dim": 512},
        {"head_dim": 16},
        {"num_heads": 64, "num_kv_heads": 1},
        {"num_heads": 256, "num_kv_heads": 128},
    ],
)
def test_what_the_operators_take_is_allowed(change):
    check_ascend(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 17}, ["num_speculative_tokens=16", "16 tokens per decode round", "use 15"]),
        ({"width": 0}, ["num_speculative_tokens=-1", "use 1"]),
        ({"dtype": "float32"}, ["dtype='float32'", "bfloat16 or float16", "use 'bfloat16'"]),
        ({"dtype": "int8"}, ["dtype='int8'", "use 'bfloat16'"]),
        ({"block_size": 8}, ["block_size=8", "multiple of 16", "nearest: 16"]),
        ({"block_size": 100}, ["block_size=100", "nearest: 96"]),
        ({"block_size": 1024}, ["block_size=1024", "at most 512", "nearest: 512"]),
        ({"block_size": 0}, ["block_size=0", "nearest: 16"]),
        ({"head_dim": 60}, ["head_dim=60", "multiple of 16", "nearest: 64"]),
        ({"head_dim": 576}, ["head_dim=576", "at most 512", "nearest: 512"]),
        ({"num_heads": 512, "num_kv_heads": 512}, ["num_attention_heads=512", "1 to 256", "tensor_parallel_size"]),
        ({"num_kv_heads": 5}, ["num_key_value_heads=5", "num_attention_heads=16", "nearest: 4"]),
        ({"num_kv_heads": 0}, ["num_key_value_heads=0", "nearest: 1"]),
        ({"num_heads": 128, "num_kv_heads": 1}, ["num_key_value_heads=1", "at most 64", "nearest: 2"]),
        (
            {"num_heads": 256, "num_kv_heads": 256, "head_dim": 272},
            ["num_key_value_heads=256", "head_dim=272", "65536", "at most 240"],
        ),
    ],
)
def test_what_they_cannot_take_is_refused_in_one_line(change, words):
    with pytest.raises(ValueError) as caught:
        check_ascend(**{**GOOD, **change})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_float32_becomes_bfloat16_and_says_so():
    dtype, note = storage_dtype("float32")
    assert dtype == "bfloat16"
    assert note is not None and "float32" in note and "bfloat16" in note and "\n" not in note
    assert storage_dtype("float16") == ("float16", None)
    assert storage_dtype("bfloat16") == ("bfloat16", None)


def test_limits_need_no_mindspore():
    code = "import sys, ms_spec.models.ops.limits; sys.exit('mindspore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def model(head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        dtype="float32",
    )


def test_an_engine_for_ascend_checks_them_before_it_loads_anything():
    config = EngineConfig(model="m", device="ascend")
    assert model_limits(config, model(64)).block_size == 128
    with pytest.raises(ValueError, match="head_dim=40"):
        model_limits(config, model(40))
    assert model_limits(EngineConfig(model="m", device="cpu"), model(40)).block_size == 16


@pytest.mark.parametrize(("method", "most"), [("eagle", 15), ("dflash", 15), ("draft_model", 14)])
def test_the_longest_drafts_of_a_method(method, most):
    def config(tokens: int) -> EngineConfig:
        spec = {"method": method, "model": "d", "num_speculative_tokens": tokens}
        return EngineConfig.parse("m", device="ascend", speculative_config=spec)

    config(most)
    added = ", of which method 'draft_model' adds 1" if most < 15 else ""
    with pytest.raises(ConfigError) as caught:
        config(most + 1)
    assert str(caught.value) == (
        f"speculative_config.num_speculative_tokens = {most + 1}: must be at most {most} on Ascend, whose fused "
        f"attention takes 16 tokens per decode step{added}; use {most}"
    )


def test_a_draft_has_to_keep_to_them_too():
    target = load(str(td.target(layers=2)))

    def choose(device: str, draft, method: str):
        spec = {"method": method, "model": str(draft), "num_speculative_tokens": 3}
        return choose_draft(EngineConfig.parse("m", device=device, speculative_config=spec), target)[1]

    odd = td.dflash(target_layers=2, target_layer_ids=(0, 1), head_dim=40)
    assert choose("cpu", odd, "dflash").shape.head_dim == 40
    with pytest.raises(ConfigError, match=r"^speculative_config\.model: head_dim=40: .*multiple of 16.*nearest: 48$"):
        choose("ascend", odd, "dflash")
    with pytest.raises(ConfigError, match=r"^speculative_config\.model: head_dim=8: "):
        choose("ascend", td.draft_model(hidden=32), "draft_model")
    assert choose("ascend", td.eagle(), "eagle").shape.head_dim == 16
    assert choose("ascend", td.medusa(), "medusa").kv_numbers == 0
