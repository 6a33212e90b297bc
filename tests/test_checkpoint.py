"""Reading safetensors and GGUF: values against safetensors, gguf and transformers; damage is named."""

from __future__ import annotations

import json
import struct

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import copy_of, new_folder, tiny_model
from tiny_gguf import tiny_gguf

from ms_spec.models.checkpoint import open_checkpoint
from ms_spec.models.config import ModelConfig


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MS_SPEC_CACHE", str(tmp_path / "cache"))


def same(checkpoint, truth):
    assert sorted(checkpoint.names()) == sorted(truth)
    for name, tensor in truth.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        expected = tensor.float().numpy()
        np.testing.assert_array_equal(checkpoint.read(name), expected)
        np.testing.assert_array_equal(checkpoint.read(name, 3, 21), expected[3:21])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_float_dtype(dtype, tmp_path):
    truth = {"a": torch.randn(30, 7, 2).to(dtype), "b": torch.randn(64).to(dtype), "c": torch.randn(25, 1).to(dtype)}
    save_file(truth, str(tmp_path / "model.safetensors"))
    checkpoint = open_checkpoint(tmp_path)
    same(checkpoint, truth)
    assert checkpoint.dtype("a") == str(dtype).replace("torch.", "")
    assert checkpoint.read("a", 5, 5).shape == (0, 7, 2)


def test_shards_equal_one_file():
    one = tiny_model("qwen3")
    many = tiny_model("qwen3", max_shard_size="60KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    same(open_checkpoint(many), load_file(str(one / "model.safetensors")))


def test_other_dtypes_are_refused_by_name(tmp_path):
    save_file({"w": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, str(tmp_path / "model.safetensors"))
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"tensor w has dtype F8_E4M3, which is not supported; supported: F64"):
        checkpoint.read("w")


def test_integers_are_read_exactly(tmp_path):
    integers = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint32, torch.uint16, torch.uint8]
    truth = {
        str(t): torch.tensor([[0, 1, 100], [torch.iinfo(t).max, torch.iinfo(t).min, 7]], dtype=t) for t in integers
    }
    truth.update(t2d=torch.tensor([True, False, True]), none=torch.empty(0, 3, dtype=torch.int64))
    save_file({**truth, "f": torch.zeros(2)}, str(tmp_path / "model.safetensors"))
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in truth.items():
        values = checkpoint.read_int(name)
        assert values.dtype == np.int64 and values.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(values, tensor.to(torch.int64).numpy())
    with pytest.raises(ValueError, match=r"tensor f has dtype F32, not an integer that can be read; supported: I64, "):
        checkpoint.read_int("f")
    with pytest.raises(ValueError, match="dtype float32, not an integer"):
        open_checkpoint(tiny_gguf(tiny_model("llama"), "llama", "F32")).read_int("model.norm.weight")


def test_identity_is_the_content(tmp_path):
    a, b = tiny_model("llama"), copy_of(tiny_model("llama"))
    same_content = open_checkpoint(a).identity()
    assert open_checkpoint(b).identity() == same_content
    content = bytearray((b / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (b / "model.safetensors").write_bytes(content)
    assert open_checkpoint(b).identity() != same_content


def refused(path, *words):
    with pytest.raises(ValueError) as error:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names():
            checkpoint.read(name)
    text = str(error.value)
    assert "\n" not in text and all(w in text for w in words), text


def test_damaged_safetensors():
    model = copy_of(tiny_model("llama"))
    file = model / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    file.write_bytes(content[: len(content) // 2])
    refused(model, "truncated: tensor ", "model.safetensors")
    for cut in (0, 4, 100):
        file.write_bytes(content[:cut])
        refused(model, "model.safetensors", "header incomplete")
    file.write_bytes(content[:8] + b"{" * length + content[8 + length :])
    refused(model, "damaged safetensors header")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [65]
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + length :])
    refused(model, "model.norm.weight", "[65]", "260", "256")
    file.unlink()
    refused(model, "neither model.safetensors nor")
    (model / "pytorch_model.bin").write_bytes(b"x")
    refused(model, "pytorch_model.bin", "not a PyTorch file")


def test_damaged_shards():
    model = copy_of(tiny_model("qwen3", max_shard_size="60KB"))
    victim = sorted(model.glob("model-*.safetensors"))[1]
    content = victim.read_bytes()
    victim.unlink()
    refused(model, victim.name, "shard is missing", "tensors")
    other = sorted(model.glob("model-*.safetensors"))[0]
    victim.write_bytes(other.read_bytes())
    refused(model, victim.name, "is missing, though the index says")
    victim.write_bytes(content[:-10])
    refused(model, victim.name, "truncated")
    (model / "model.safetensors.index.json").write_text("{}")
    refused(model, "not a safetensors index")


def test_paths(tmp_path):
    refused(tmp_path / "no", "no such file")
    (tmp_path / "a.txt").write_text("")
    refused(tmp_path / "a.txt", "not a checkpoint")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_gguf_gives_back_the_original(arch, kind):
    model = tiny_model(arch, bias=arch == "llama", head_dim=32 if arch == "llama" else None)
    checkpoint = open_checkpoint(tiny_gguf(model, arch, kind))
    truth = load_file(str(model / "model.safetensors"))
    assert sorted(checkpoint.names()) == sorted(truth)
    tolerance = {"F32": 0.0, "F16": 3e-4, "BF16": 2e-3, "Q4_0": 0.06, "Q4_1": 0.04, "Q8_0": 3e-3}[kind]
    for name, tensor in truth.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        full = checkpoint.read(name)
        np.testing.assert_allclose(full, tensor.numpy(), rtol=0, atol=tolerance if tensor.dim() > 1 else 0)
        for start, stop in ((0, 16), (5, 6), (7, 50), (48, 64)):
            np.testing.assert_array_equal(checkpoint.read(name, start, stop), full[start:stop])
    assert checkpoint.weights_dtype == {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


@pytest.mark.parametrize("arch, kind", [("llama", "Q4_1"), ("qwen2", "Q8_0"), ("qwen3", "F16")])
def test_gguf_equals_transformers_loader(arch, kind):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.models.auto import AutoConfig, AutoModelForCausalLM

    path = tiny_gguf(tiny_model(arch), arch, kind)
    parsed = load_gguf_checkpoint(str(path), return_tensors=False)["config"]
    config = AutoConfig.for_model(**parsed)
    with torch.device("meta"):
        dummy = AutoModelForCausalLM.from_config(config)
    truth = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=dummy)["tensors"]
    checkpoint = open_checkpoint(path)
    for name, tensor in truth.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor.float().numpy())
    ours = ModelConfig.from_gguf(checkpoint.metadata, {n: checkpoint.shape(n) for n in checkpoint.names()})
    assert (ours.hidden_size, ours.num_layers, ours.num_kv_heads) == (64, 2, 2)
    assert ours.rms_norm_eps == pytest.approx(config.rms_norm_eps)
    assert not ours.tie_word_embeddings and ours.vocab_size == 512 and ours.eos_token_ids == (2,)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_k_quants_equal_the_gguf_package(kind):
    qtype = gguf.GGMLQuantizationType[kind]
    block, width = gguf.GGML_QUANT_SIZES[qtype]
    raw = np.random.default_rng(0).integers(0, 256, (48, 2 * width), dtype=np.uint8)
    scales = np.random.default_rng(1).standard_normal((48, 2, 2)).astype("<f2").view(np.uint8).reshape(48, 2, 4)
    raw = raw.reshape(48, 2, width)
    if kind == "Q4_K":
        raw[:, :, :4] = scales
    else:
        raw[:, :, -2:] = scales[:, :, :2]
    raw = raw.reshape(48, 2 * width)
    path = new_folder() / "k.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(path)
    truth = gguf.quants.dequantize(raw, qtype)
    assert checkpoint.shape("model.layers.0.mlp.up_proj.weight") == (48, 2 * block)
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.mlp.up_proj.weight"), truth)
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.mlp.up_proj.weight", 5, 33), truth[5:33])


def test_damaged_gguf(tmp_path):
    path = tiny_gguf(tiny_model("llama"), "llama", "Q8_0")
    content = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content[:-5000])
    refused(broken, "truncated: tensor ")
    for cut in (3, 20, 200, 3000):
        broken.write_bytes(content[:cut])
        refused(broken, "broken.gguf", "GGUF")
    broken.write_bytes(b"")
    refused(broken, "broken.gguf")
    broken.write_bytes(b"abcd" + content[4:])
    refused(broken, "does not start with")
    broken.write_bytes(content[:4] + struct.pack("<I", 1) + content[8:])
    refused(broken, "version 1")


def test_unsupported_gguf_types_are_refused_by_name(tmp_path):
    refused(tiny_gguf(tiny_model("llama"), "llama", "Q5_0"), "has type Q5_0", "Q4_K", ".weight")


def test_gguf_rope_factors_and_scaling():
    model = tiny_model("llama")
    factors = np.linspace(1, 8, 8).astype(np.float32)
    path = tiny_gguf(model, "llama", extra=lambda w: w.add_tensor("rope_freqs.weight", factors))
    checkpoint = open_checkpoint(path)
    shapes = {n: checkpoint.shape(n) for n in checkpoint.names()}
    config = ModelConfig.from_gguf(checkpoint.metadata, shapes, rope_factors=checkpoint.read("rope_freqs.weight"))
    np.testing.assert_array_equal(config.rope.frequency_factors, factors)

    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    config = ModelConfig.from_gguf(open_checkpoint(tiny_gguf(model, "llama", extra=yarn)).metadata, shapes)
    assert (config.rope.kind, config.rope.factor, config.rope.original_max_position) == ("yarn", 4.0, 128)
