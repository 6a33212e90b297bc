"""Packing, caching and mapping of weights."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
import torch
from mindspore import Parameter, Tensor

from ms_spec.models import weights as module
from ms_spec.models.checkpoint import open_checkpoint
from ms_spec.models.floats import HELD, to_bfloat16_bits
from ms_spec.models.weights import WeightSpec, load_weights


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MS_SPEC_CACHE", str(tmp_path / "cache"))


class Memory:
    """A checkpoint of arrays."""

    location = "memory"

    def __init__(self, **tensors):
        self.tensors = {k.replace("__", "."): v for k, v in tensors.items()}
        self.reads = []

    def names(self):
        return list(self.tensors)

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        return str(self.tensors[name].dtype)

    def read(self, name, start=0, stop=None):
        self.reads.append(name)
        return self.tensors[name][start:stop].astype(np.float32)

    def identity(self):
        return "fixed"


KINDS = {"float32": ms.float32, "bfloat16": ms.uint16, "float16": ms.float16}


def spec(shape, layout, dtype, *sources, **rest):
    parameter = Parameter(Tensor(np.zeros((1,), HELD[dtype])), requires_grad=False)
    return WeightSpec(parameter, shape, layout, dtype, sources, **rest)


def expected(values, layout, dtype):
    values = torch.from_numpy(values)
    if dtype == "bfloat16":
        values = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    else:
        values = values.to(getattr(torch, dtype)).numpy()
    if layout != "panels":
        return values
    return panels(values, paired=dtype == "bfloat16")


def panels(values, paired):
    rows, inner = values.shape
    if paired:
        packed = np.zeros((-(-rows // 32), inner, 16, 2), values.dtype)
        for n in range(rows):
            packed[n // 32, :, n % 16, n // 16 % 2] = values[n]
        return packed
    packed = np.zeros((-(-rows // 16), inner, 16), values.dtype)
    for n in range(rows):
        packed[n // 16, :, n % 16] = values[n]
    return packed


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("key", ["a", None])
@pytest.mark.parametrize("chunk", [1 << 20, 1000])
def test_layouts_dtypes_and_concatenation(key, chunk, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_VALUES", chunk)
    a, b, c = random(40, 24), random(7, 24, seed=1), random(21, 24, seed=2)
    vectors = random(40, seed=3), random(28, seed=4)
    checkpoint = Memory(a=a, b=b, c=c, v=vectors[0], w=vectors[1])
    for dtype in HELD:
        specs = [
            spec((68, 24), "panels", dtype, "a", "b", "c"),
            spec((40, 24), "rows", dtype, "a"),
            spec((68,), "vector", "float32", "v", "w"),
            spec((5,), "vector", "float32", "no", "nothing", optional=True),
            spec((40, 24), "rows", "float32", "a", round_to="bfloat16"),
        ]
        for _ in range(2):  # the second time from the cache
            load_weights(specs, checkpoint, cache_key=key)
            whole = np.concatenate([a, b, c])
            np.testing.assert_array_equal(specs[0].parameter.asnumpy(), expected(whole, "panels", dtype))
            np.testing.assert_array_equal(specs[1].parameter.asnumpy(), expected(a, "rows", dtype))
            np.testing.assert_array_equal(specs[2].parameter.asnumpy(), np.concatenate(vectors))
            np.testing.assert_array_equal(specs[3].parameter.asnumpy(), np.zeros(5, np.float32))
            through = torch.from_numpy(a).to(torch.bfloat16).float().numpy()
            np.testing.assert_array_equal(specs[4].parameter.asnumpy(), through)
            assert specs[0].parameter.dtype == KINDS[dtype]


@pytest.mark.parametrize("dtype", list(HELD))
@pytest.mark.parametrize("rows", [64, 40])
@pytest.mark.parametrize("chunk", [1 << 20, 1000])
def test_interleaved_sources_take_turns_by_16_rows(dtype, rows, chunk, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_VALUES", chunk)
    gate, up = random(rows, 24), random(rows, 24, seed=1)
    one = spec((2 * rows, 24), "panels", dtype, "gate", "up", interleaved=True)
    load_weights([one], Memory(gate=gate, up=up), cache_key=None)
    turns = []
    for start in range(0, rows, 16):
        for source in (gate, up):
            piece = np.zeros((16, 24), np.float32)
            piece[: len(source[start : start + 16])] = source[start : start + 16]
            turns.append(piece)
    np.testing.assert_array_equal(one.parameter.asnumpy(), expected(np.concatenate(turns), "panels", dtype))


def test_bfloat16_rounding_equals_torch():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    special = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x00008000, 0x00018000, 1]
    values = np.concatenate([bits, np.array(special, np.uint32)]).view(np.float32)
    ours = to_bfloat16_bits(values)
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(ours[finite], theirs[finite])
    hard = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan((to_bfloat16_bits(hard).astype(np.uint32) << 16).view(np.float32)).all()


def test_what_is_cached_is_not_packed_again():
    checkpoint = Memory(a=random(64, 32))
    one = spec((64, 32), "panels", "bfloat16", "a")
    load_weights([one], checkpoint, cache_key="k")
    assert checkpoint.reads
    checkpoint.reads.clear()
    two = spec((64, 32), "panels", "bfloat16", "a")
    load_weights([two], checkpoint, cache_key="k")
    assert not checkpoint.reads
    gc.collect()  # the parameters alone keep the memory
    np.testing.assert_array_equal(one.parameter.asnumpy(), expected(checkpoint.tensors["a"], "panels", "bfloat16"))
    np.testing.assert_array_equal(one.parameter.asnumpy(), two.parameter.asnumpy())
    load_weights([two], checkpoint, cache_key="another")
    assert checkpoint.reads


def test_what_is_larger_than_memory_is_mapped(monkeypatch):
    def full(*_):
        raise MemoryError

    values = random(64, 32)
    load_weights([spec((64, 32), "rows", "float32", "a")], Memory(a=values), cache_key="k")
    again, checkpoint = spec((64, 32), "rows", "float32", "a"), Memory(a=values)
    with monkeypatch.context() as patch:
        patch.setattr("ms_spec.models.packed_file.np.empty", full)
        load_weights([again], checkpoint, cache_key="k")
    assert not checkpoint.reads
    np.testing.assert_array_equal(again.parameter.asnumpy(), values)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "garbage", "other file"])
def test_a_damaged_cache_is_packed_again(damage, caplog, tmp_path):
    values = random(64, 32)
    load_weights([spec((64, 32), "rows", "float32", "a")], Memory(a=values), cache_key="k")
    (file,) = (tmp_path / "cache" / "weights").iterdir()
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[5000] ^= 1
    file.write_bytes({"cut": content[:5000], "empty": b"", "garbage": b"x" * 100}.get(damage, bytes(content)))
    if damage == "other file":
        load_weights([spec((32, 32), "rows", "float32", "a")], Memory(a=values[:32]), cache_key="j")
        (other,) = [f for f in file.parent.iterdir() if f != file]
        file.write_bytes(other.read_bytes())
    again = spec((64, 32), "rows", "float32", "a")
    with caplog.at_level(logging.WARNING):
        load_weights([again], Memory(a=values), cache_key="k")
    np.testing.assert_array_equal(again.parameter.asnumpy(), values)
    assert "packing them again" in caplog.text
    assert not [f for f in file.parent.iterdir() if f.name.startswith(".")]


def test_an_unwritable_cache_falls_back_to_memory(caplog, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MS_SPEC_CACHE", str(tmp_path / "file" / "below"))
    values = random(64, 32)
    one, two = spec((64, 32), "rows", "float32", "a"), spec((64, 32), "rows", "float16", "a")
    with caplog.at_level(logging.WARNING):
        load_weights([one, two], Memory(a=values), cache_key="k")
    np.testing.assert_array_equal(one.parameter.asnumpy(), values)
    assert caplog.text.count("kept in memory") == 1


def test_a_full_disk_falls_back_to_memory(caplog, monkeypatch, tmp_path):
    def full(path, arrays):
        for pieces in arrays:
            next(iter(pieces))
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_packed", full)
    values = random(64, 32)
    one = spec((64, 32), "rows", "float32", "a")
    load_weights([one], Memory(a=values), cache_key="k")
    np.testing.assert_array_equal(one.parameter.asnumpy(), values)
    assert "No space left" in caplog.text


def test_missing_and_misnamed_tensors_are_named():
    checkpoint = Memory(model__layers__0__self_attn__q_projj__weight=random(4, 4))
    with pytest.raises(ValueError) as error:
        load_weights(
            [spec((4, 4), "rows", "float32", "model.layers.0.self_attn.q_proj.weight")], checkpoint, cache_key=None
        )
    text = str(error.value)
    assert "missing tensor model.layers.0.self_attn.q_proj.weight" in text and "q_projj" in text and "\n" not in text


def test_all_that_does_not_fit_is_in_one_message():
    checkpoint = Memory(
        layers__0__up__weigth=random(4, 4), layers__0__odd=random(3), layers__0__norm__bias=random(2), a=random(4, 5)
    )
    specs = [
        spec((4, 4), "rows", "float32", "layers.0.up.weight"),
        spec((2,), "vector", "float32", "layers.0.norm.weight"),
        spec((4, 4), "rows", "float32", "a"),
        spec((4, 4), "panels", "float32", "a"),
    ]
    with pytest.raises(ValueError) as error:
        load_weights(specs, checkpoint, cache_key=None)
    assert str(error.value) == (
        "memory: missing tensors layers.0.up.weight (nearest: layers.0.up.weigth), layers.0.norm.weight; unexpected "
        "tensors layers.0.norm.bias, layers.0.odd; tensor a [4, 5] has the wrong shape; the config asks for [4, 4]"
    )


def test_many_misfits_are_counted():
    names = [f"layers.{i}.weight" for i in range(9)]
    checkpoint = Memory(**{name.replace(".", "__"): random(2, 3) for name in names})
    with pytest.raises(ValueError, match=r"layers.4.weight \[2, 3\] .*; 4 more wrong shapes$"):
        load_weights([spec((3, 2), "rows", "float32", name) for name in names], checkpoint, cache_key=None)
    with pytest.raises(ValueError, match=r"missing tensors x0, x1, x2, x3, x4 and 4 more; unexpected tensors .* more$"):
        load_weights([spec((3, 2), "rows", "float32", f"x{i}") for i in range(9)], checkpoint, cache_key=None)


def test_a_partly_present_optional_weight_is_missing():
    with pytest.raises(ValueError, match="missing tensor b"):
        load_weights([spec((8,), "vector", "float32", "a", "b", optional=True)], Memory(a=random(4)), cache_key=None)


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"tensor a \[4, 5\] has the wrong shape; the config asks for \[4, 4\]"):
        load_weights([spec((4, 4), "rows", "float32", "a")], Memory(a=random(4, 5)), cache_key=None)
    with pytest.raises(ValueError, match=r"a \[4, 4\], b \[3, 4\] .* \[8, 4\]"):
        load_weights(
            [spec((8, 4), "rows", "float32", "a", "b")], Memory(a=random(4, 4), b=random(3, 4)), cache_key=None
        )


def test_unexpected_tensors_warn_except_known_ones(caplog):
    extra = {"model__layers__0__self_attn__rotary_emb__inv_freq": random(2), "lm_head__weight": random(4, 4)}
    extra.update({"model__mtp_layers__0__input_proj__weight": random(1), "medusa_head__0__1__weight": random(1)})
    load_weights([spec((4, 4), "rows", "float32", "a")], Memory(a=random(4, 4), **extra), cache_key=None)
    assert not caplog.text
    load_weights([spec((4, 4), "rows", "float32", "a")], Memory(a=random(4, 4), strange=random(1)), cache_key=None)
    assert caplog.text.count("strange") == 1


PEAK = """
import resource, sys
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor
from ms_spec.models.weights import WeightSpec, load_weights
from ms_spec.models.checkpoint import open_checkpoint
def peak():
    return int([l for l in open('/proc/self/status') if l.startswith('VmHWM')][0].split()[1]) * 1024
before = peak()
checkpoint = open_checkpoint(sys.argv[1])
specs = []
for name in checkpoint.names():
    shape = checkpoint.shape(name)
    parameter = Parameter(Tensor(np.zeros(1, np.uint16)), requires_grad=False)
    specs.append(WeightSpec(parameter, shape, 'panels', 'bfloat16', (name,)))
load_weights(specs, checkpoint, cache_key='peak')
for s in specs:
    assert s.parameter.asnumpy().max() > 0
total = sum(2 * int(np.prod(s.shape)) for s in specs)
print((peak() - before) / total)
"""


def test_peak_memory(tmp_path):
    from safetensors.numpy import save_file

    folder = tmp_path / "big"
    folder.mkdir()
    numbers = np.random.default_rng(0)
    tensors = {f"t{i}": numbers.random((4096, 4096), np.float32) for i in range(3)}
    save_file(tensors, str(folder / "model.safetensors"))
    env = {**os.environ, "MS_SPEC_CACHE": str(tmp_path / "cache")}
    for _ in ("cold", "warm"):
        done = subprocess.run([sys.executable, "-c", PEAK, str(folder)], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.split()[-1]) < 1.6


def test_a_checkpoint_on_disk():
    from tiny import tiny_model

    path = tiny_model("llama", dtype="bfloat16")
    one = spec((512, 64), "panels", "bfloat16", "model.embed_tokens.weight")
    load_weights([one], open_checkpoint(path), cache_key="x")
    from safetensors.torch import load_file

    truth = load_file(str(path / "model.safetensors"))["model.embed_tokens.weight"].float().numpy()
    np.testing.assert_array_equal(one.parameter.asnumpy(), expected(truth, "panels", "bfloat16"))
