"""Reading PyTorch files without PyTorch: values against torch, nothing executed, damage named."""

from __future__ import annotations

import collections
import copyreg
import datetime
import fractions
import io
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from ms_spec.models.checkpoint import open_checkpoint, restricted_pickle
from ms_spec.models.checkpoint.torch_pickle import TensorUnpickler

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool]
OTHERS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint64]
FORMATS = ["zip", "legacy"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MS_SPEC_CACHE", str(tmp_path / "cache"))


def save(content, path, form="zip", protocol=2):
    torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=form == "zip")
    return path


def rezipped(path, compression=zipfile.ZIP_DEFLATED, change=lambda name, data: data):
    """The same archive written by another zip, with entries changed or (None) left out."""
    with zipfile.ZipFile(path) as source:
        entries = [(name, change(name, source.read(name))) for name in source.namelist()]
    with zipfile.ZipFile(path, "w", compression) as target:
        for name, data in entries:
            if data is not None:
                target.writestr(name, data)
    return path


def same(checkpoint, truth):
    assert checkpoint.names() == list(truth)
    for name, tensor in truth.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert "torch." + checkpoint.dtype(name) == str(tensor.dtype)
        if tensor.dtype in FLOATS:
            expected = tensor.detach().float().numpy()
            for start, stop in ((0, None), (1, 3), (2, 100), (3, 3)) if tensor.dim() else ((0, None),):
                values = checkpoint.read(name, start, stop)
                assert values.dtype == np.float32 and values.flags.c_contiguous
                np.testing.assert_array_equal(values, expected[start:stop] if tensor.dim() else expected)
        else:
            values = checkpoint.read_int(name)
            assert values.dtype == np.int64 and values.shape == tuple(tensor.shape)
            np.testing.assert_array_equal(values, tensor.to(torch.int64).numpy())


def refused(path, *words):
    with pytest.raises(ValueError) as error:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names():
            checkpoint.read(name)
    text = str(error.value)
    assert text.isprintable() and len(text) < 1000 and all(w in text for w in words), text


def numbers(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def every_dtype():
    truth = {str(t): numbers(5, 3, 2, dtype=t) for t in FLOATS}
    for t in INTEGERS:
        if t == torch.bool:
            truth[str(t)] = numbers(6, 5) > 0
        else:
            info = torch.iinfo(t)
            truth[str(t)] = torch.tensor([[info.min, info.max], [1, 0], [7, 100]], dtype=t)
    special = [float("nan"), float("inf"), float("-inf"), -0.0, 1e-45, 3e38]
    truth.update({f"special {t}": torch.tensor(special, dtype=torch.float64).to(t) for t in FLOATS})
    return truth


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("form", FORMATS)
def test_every_dtype_in_every_form(form, protocol, tmp_path):
    truth = every_dtype()
    same(open_checkpoint(save(truth, tmp_path / "model.pt", form, protocol)), truth)
    same(open_checkpoint(save(collections.OrderedDict(truth), tmp_path / "a.bin", form, protocol)), truth)


def views():
    base = numbers(6, 8, 4)
    wide = torch.arange(40, dtype=torch.int64)
    return {
        "base": base,
        "transposed": base.permute(2, 0, 1),
        "offset": base[2:5, 3:, 1],
        "steps": base[::2, ::3],
        "expanded": base[:1].expand(5, 8, 4),
        "diagonal": base[:, :6, 0].diagonal(),
        "overlapping": base.flatten().as_strided((5, 6), (2, 3), 7),
        "flat": base.view(-1),
        "scalar": base[1, 2, 3],
        "scalar bfloat16": torch.tensor(2.5, dtype=torch.bfloat16),
        "integers": wide.view(5, 8).t()[1:],
        "integer": wide[7],
        "bits": (wide > 20).view(8, 5)[::3, 1::2],
        "halves": base.to(torch.bfloat16).transpose(0, 1),
        "doubles": base.double()[..., ::3],
        "none": torch.empty(0, 3),
        "empty slice": base[:0],
        "empty inside": torch.empty(4, 0, 2),
    }


@pytest.mark.parametrize("form", FORMATS)
def test_views_and_shared_storages(form, tmp_path):
    truth = views()
    path = save(truth, tmp_path / "model.pt", form)
    same(open_checkpoint(path), truth)
    # Views of one storage are held once.
    assert path.stat().st_size < 2 * sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                                          for t in truth.values()}.values()) + 10000  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_modules_parameters_and_training_states(form, tmp_path):
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Embedding(7, 2)).to(torch.bfloat16)
    module[2].weight = nn.Parameter(module[2].weight, requires_grad=False)
    truth = module.state_dict()
    assert truth["1.num_batches_tracked"].dtype == torch.int64 and truth._metadata
    same(open_checkpoint(save(truth, tmp_path / "a.bin", form)), truth)
    parameters = dict(module.named_parameters())
    same(open_checkpoint(save(parameters, tmp_path / "b.bin", form)), parameters)
    tagged = nn.Parameter(numbers(3, 2))
    tagged.note = "attributes are pickled along"
    same(open_checkpoint(save({"w": tagged}, tmp_path / "c.bin", form)), {"w": tagged})
    rest = {"epoch": 3, "loss": 0.5, "done": True, "note": "x", "none": None, "sizes": [1, (2, 3)], 5: {"a": 1}}
    rest.update(shape=torch.Size([2, 3]), dtype=torch.float16, big=1 << 80, small=-5, far=1 << 20)
    optimizer = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": numbers(2)}}, "param_groups": [{"lr": 0.1}]}
    for key in ("state_dict", "model"):
        nested = {**rest, key: truth, "optimizer": optimizer}
        same(open_checkpoint(save(nested, tmp_path / "d.pth", form)), truth)
    same(open_checkpoint(save({**rest, **truth}, tmp_path / "e.pt", form)), truth)
    # A tensor of that name is a tensor.
    same(open_checkpoint(save({"model": tagged}, tmp_path / "f.pt", form)), {"model": tagged})


@pytest.mark.parametrize("form", FORMATS)
def test_other_dtypes_are_named(form, tmp_path):
    truth = {str(t): torch.zeros(4).to(t) for t in OTHERS}
    checkpoint = open_checkpoint(save({**truth, "i": torch.ones(2, dtype=torch.int64)}, tmp_path / "a.pt", form))
    for name, tensor in truth.items():
        assert checkpoint.shape(name) == (4,) and "torch." + checkpoint.dtype(name) == str(tensor.dtype)
        for read in (checkpoint.read, checkpoint.read_int):
            with pytest.raises(ValueError, match=rf"a.pt: tensor {name} has dtype {checkpoint.dtype(name)}, not an? "):
                read(name)
    with pytest.raises(ValueError, match="tensor i has dtype int64, not a float that can be read; supported: float64"):
        checkpoint.read("i")
    with pytest.raises(ValueError, match="there is no tensor x"):
        checkpoint.shape("x")


def test_compressed_archives(tmp_path):
    truth = views()
    path = rezipped(save(truth, tmp_path / "a.pt"))
    same(open_checkpoint(path), truth)
    checkpoint = open_checkpoint(path)
    for start in (4, 0, 2, 1):  # backwards, too
        np.testing.assert_array_equal(checkpoint.read("base", start, start + 2), truth["base"][start : start + 2])
    same(open_checkpoint(rezipped(path, zipfile.ZIP_STORED)), truth)  # at offsets that are no multiple of anything


def test_reading_maps_and_does_not_load(tmp_path):
    path = save({"w": torch.zeros(64, 1 << 18)}, tmp_path / "a.pt")  # 64 MiB
    program = (
        "import sys, resource\n"
        "from ms_spec.models.checkpoint import open_checkpoint\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "open_checkpoint(sys.argv[1]); before = peak()\n"
        "c = open_checkpoint(sys.argv[1])\n"
        "for i in range(64): c.read('w', i, i + 1)\n"
        "print(peak() - before, sorted({'torch', 'mindspore', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    kilobytes, modules = done.stdout.split(maxsplit=1)
    assert int(kilobytes) < 16 << 10 and modules.strip() == "[]"


def test_directories(tmp_path):
    truth, other = {"a": numbers(5, 2), "b": numbers(3)}, {"c": numbers(4, 4)}
    refused(tmp_path, "neither model.safetensors nor", "no pytorch_model.bin")
    save({"args": 1}, tmp_path / "training_args.bin")
    save({"args": 1}, tmp_path / "optimizer.pt")
    refused(tmp_path, "neither model.safetensors nor")
    save(other, tmp_path / "medusa_lm_head.pt")
    same(open_checkpoint(tmp_path), other)
    save(truth, tmp_path / "extra.pth")
    refused(tmp_path, "holds 2 PyTorch files (extra.pth, medusa_lm_head.pt)", "give the path of one")
    same(open_checkpoint(tmp_path / "extra.pth"), truth)
    index = tmp_path / "pytorch_model.bin.index.json"
    shards = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    refused(tmp_path, "pytorch_model-00001-of-00002.bin: shard is missing; it holds 1 tensors, a among them")
    for name, file in shards.items():
        save({name: truth[name]}, tmp_path / file)
    same(open_checkpoint(tmp_path), truth)
    identity = open_checkpoint(tmp_path).identity()
    save({"a": truth["a"]}, tmp_path / shards["b"])
    refused(tmp_path, shards["b"], "tensor b is missing, though the index says")
    save({"b": truth["b"] + 1}, tmp_path / shards["b"])
    assert open_checkpoint(tmp_path).identity() != identity
    for wrong in ("{}", "[]", "{", '{"weight_map": 3}', "[" * 100_000):
        index.write_text(wrong)
        refused(tmp_path, "not a PyTorch index")
    save(other, tmp_path / "pytorch_model.bin")
    same(open_checkpoint(tmp_path), other)
    from safetensors.torch import save_file

    save_file(truth, str(tmp_path / "model.safetensors"))
    assert sorted(open_checkpoint(tmp_path).names()) == ["a", "b"]


def test_identity_is_the_content(tmp_path):
    path = save({"a": numbers(5, 2)}, tmp_path / "a.pt")
    copy = tmp_path / "below.bin"
    copy.write_bytes(path.read_bytes())
    assert open_checkpoint(path).identity() == open_checkpoint(copy).identity()
    content = bytearray(path.read_bytes())
    content[content.index(numbers(5, 2).numpy().tobytes())] ^= 1
    copy.write_bytes(content)
    assert open_checkpoint(path).identity() != open_checkpoint(copy).identity()


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def with_pickle(path, raw):
    """A zip of torch.save whose data.pkl is ``raw``."""
    save({"w": numbers(4)}, path)
    return rezipped(path, zipfile.ZIP_STORED, lambda name, data: raw if name.endswith("data.pkl") else data)


class Sneaky(nn.Linear):
    """A module of one's own."""


def whole_modules():
    yield "torch.nn.modules.linear.Linear", nn.Linear(2, 2)
    yield "test_torch_reader.Sneaky", Sneaky(2, 2)
    yield "torch.nn.modules.container.Sequential", nn.Sequential(nn.ReLU())


def near_misses():
    """What is harmless or nearly allowed, and still not a tensor or plain container."""
    yield "collections.Counter", collections.Counter("ab")
    yield "collections.defaultdict", collections.defaultdict(list)
    yield "fractions.Fraction", fractions.Fraction(1, 2)
    yield "collections.deque", collections.deque()
    yield "datetime.timedelta", datetime.timedelta(1)
    yield "torch.device", torch.device("cpu")
    yield "torch._utils._rebuild_qtensor", torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    yield "torch._utils._rebuild_sparse_tensor", torch.eye(3).to_sparse()
    yield "torch._utils._rebuild_meta_tensor_no_storage", torch.empty(3, device="meta")
    yield "builtins.set", {1}
    yield "builtins.complex", 1j
    yield "_codecs.encode", b"x"
    yield "argparse.Namespace", __import__("argparse").Namespace(lr=1)


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_no_tensor_is_refused_by_name(form, tmp_path):
    for name, value in itertools.chain(whole_modules(), near_misses()):
        path = save({"w": numbers(2), "x": value}, tmp_path / "a.pt", form)
        with pytest.raises(ValueError) as error:
            open_checkpoint(path)
        text = str(error.value)
        assert text.startswith(f"{path}: refers to "), text
        assert text.split("refers to ")[1].split(",")[0] == name, text
        assert "which is not a tensor or plain container; nothing of the file was executed" in text


def attacks(marker):
    """name -> a pickle that makes ``marker`` when an ordinary unpickler loads it."""
    touch, code = f"touch {marker}", f"open({str(marker)!r}, 'w').close()"
    for protocol in range(6):
        yield "posix.system", pickle.dumps({"w": Calls(os.system, touch)}, protocol)
        for function in (eval, exec):
            yield f"builtins.{function.__name__}", pickle.dumps({"w": Calls(function, code)}, protocol)
        module = "commands" if protocol < 3 else "subprocess"  # as pickle spells it for Python 2
        yield f"{module}.call", pickle.dumps(Calls(subprocess.call, ["touch", str(marker)]), protocol)
    quoted = pickle.dumps(touch, 0)[:-1]  # without STOP
    yield "os.system", b"cos\nsystem\n(" + quoted + b"tR."
    yield "os.system", b"(" + quoted + b"ios\nsystem\n."  # INST
    yield "os.system", b"(cos\nsystem\n" + quoted + b"o."  # OBJ
    yield "os.system", b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + bytes([len(touch)]) + touch.encode() + b"\x85R."
    # STACK_GLOBAL with names that were put together from the memo, and a dotted name below something allowed.
    yield (
        "os.system",
        b"\x80\x04\x8c\x06system\x940\x8c\x02os\x94h\x00\x93\x8c" + bytes([len(touch)]) + (touch.encode() + b"\x85R."),
    )
    yield "collections.OrderedDict.fromkeys", b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93."
    yield "collections._sys.modules", b"\x80\x04\x8c\x0bcollections\x8c\x0c_sys.modules\x93."
    yield "torch._utils._import_dotted_name", b"ctorch._utils\n_import_dotted_name\n(S'os.system'\ntR."
    yield "torch.hub.load", b"ctorch.hub\nload\n(S'x'\nS'y'\ntR."
    yield "torch.load", b"ctorch\nload\n(S'x'\ntR."
    yield "builtins.getattr", b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'system'\ntR(" + quoted + b"tR."


@pytest.mark.parametrize("place", ["zip", "legacy", "bare"])
def test_attacks_are_refused_and_run_nothing(place, tmp_path):
    marker = tmp_path / "marker"
    path = tmp_path / "model.bin"
    seen = 0
    for name, raw in attacks(marker):
        if place == "zip":
            with_pickle(path, raw)
        elif place == "legacy":
            save({"w": numbers(4)}, path, "legacy")
            head = path.read_bytes()
            stream = io.BytesIO(head)
            for _ in range(3):
                pickle.load(stream)
            path.write_bytes(head[: stream.tell()] + raw + pickle.dumps([], 2))
        else:
            path.write_bytes(raw)
        refused(path, f"refers to {name}, which is not a tensor or plain container", "nothing of the file was executed")
        assert not marker.exists()
        seen += 1
    assert seen > 30
    # The marker does appear where these are loaded without care.
    for raw in (pickle.dumps({"w": Calls(os.system, f"touch {marker}")}), list(attacks(marker))[1][1]):
        pickle.loads(raw)
        assert marker.exists()
        marker.unlink()


def test_names_cannot_forge_messages(tmp_path):
    evil = "x\n\x1b[31m" + "y" * 500
    raw = b"\x80\x04\x8c\x02os" + b"X" + len(evil).to_bytes(4, "little") + evil.encode() + b"\x93."
    refused(with_pickle(tmp_path / "a.pt", raw), "refers to 'os.x\\n\\x1b[31m")


def test_the_extension_registry_is_not_used(tmp_path):
    called = []
    copyreg.add_extension("builtins", "print", 77)
    copyreg._extension_cache[77] = called.append  # what a plain unpickler would take without asking find_class
    try:
        refused(with_pickle(tmp_path / "a.pt", b"\x80\x02\x82\x4d(K\x01tR."), "pickle operation EXT1")
    finally:
        copyreg.remove_extension("builtins", "print", 77)
        copyreg.clear_extension_cache()
    assert not called


TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
FLOAT = b"((S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nK\x04tQ"


@pytest.mark.parametrize(
    "raw, word",
    [
        (b"ctorch\nFloatStorage\n)R.", "calls torch.FloatStorage"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n}S'a'\nI1\nsb.", "sets attributes of a Symbol"),
        (b"]}b.", "sets attributes of a list"),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "operation NEWOBJ"),
        (b"\x80\x04\x8f.", "operation EMPTY_SET"),
        (b"}(S'a'\nI1\n)K\x02u.", "dict key of type tuple"),
        (b"]S'a'\nI1\ns.", "sets items of a list"),
        (b"}K\x01a.", "appends to a dict"),
        (b"ccollections\nOrderedDict\n((lp0\n((K\x01tK\x02lp1\natR.", "dict key of type tuple"),
        (b"ctorch\nSize\n(K\x01tR.", "damaged"),
        (b"}S'a'\nctorch._utils\n_rebuild_parameter\n(K\x01I01\n}tRs.", "damaged"),
        (b"}S'w'\n" + TENSOR + FLOAT + b"K\x00(K\x05t(K\x01tI00\n}tRs.", "tensor w with shape [5] ends at byte 20"),
        (b"}S'w'\n" + TENSOR + FLOAT + b"K\x02(K\x02K\x02t(K\x01K\x02tI00\n}tRs.", "ends at byte 24"),
        (b"}S'w'\n" + TENSOR + FLOAT + b"J\xff\xff\xff\xff(K\x01t(K\x01tI00\n}tRs.", "damaged"),
        (b"}S'w'\n" + TENSOR + FLOAT + b"K\x00(K\x02t(J\xff\xff\xff\xfftI00\n}tRs.", "damaged"),
        (b"}S'w'\n" + TENSOR + FLOAT + b"K\x00(K\x02t(K\x01K\x01tI00\n}tRs.", "damaged"),
        (b"}S'w'\n" + TENSOR + FLOAT + b"K\x00(L99999999999999L\nt(K\x00tI00\n}tRs.", "tensor w with shape [9999"),
        (
            b"}S'w'\n" + TENSOR + b"((S'storage'\nctorch\nFloatStorage\nS'9'\nS'cpu'\nK\x04tQ"
            b"K\x00(K\x01t(K\x01tI00\n}tRs.",
            "storage 9, which is not there",
        ),
        (b"}S'w'\n" + TENSOR + FLOAT.replace(b"K\x04", b"K\x05") + b"K\x00(K\x01t(K\x01tI00\n}tRs.", "truncated"),
        (b"(S'module'\nctorch\nFloatStorage\nS'9'\nS'cpu'\nK\x04tQ.", "damaged"),
        (b"K\x01Q.", "damaged"),
        (b"Pabc\n.", "operation PERSID"),
        (b"h\x05.", "damaged"),
        (b"tttt.", "damaged"),
        (b".", "damaged"),
        (b"", "cut off"),
        (b"\xff\xfe", "damaged"),
        (b"X\xff\xff\xff\x7fabc.", "damaged"),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.", "damaged"),
        (b"C\x02ab.", "operation SHORT_BINBYTES"),
        (b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.", "damaged"),
        (b"}.", "no named tensors"),
        (b"]K\x01a.", "something of type list"),
        (b"K\x05.", "something of type int"),
        (TENSOR + FLOAT + b"K\x00(K\x04t(K\x01tI00\n}tR.", "one tensor without a name"),
    ],
)
def test_strange_pickles(raw, word, tmp_path):
    refused(with_pickle(tmp_path / "a.pt", raw), word)


def test_hand_written_pickles_do_work(tmp_path):
    # The frame of the cases above, with nothing wrong; Python 2's OrderedDict is given its content as a list of pairs.
    tensor = TENSOR + FLOAT + b"K\x01(K\x03t(K\x01tI00\n}tR"
    for raw in (b"}S'w'\n" + tensor + b"s.", b"ccollections\nOrderedDict\n(((S'w'\n" + tensor + b"lltR."):
        checkpoint = open_checkpoint(with_pickle(tmp_path / "a.pt", raw))
        np.testing.assert_array_equal(checkpoint.read("w"), numbers(4)[1:])


def test_bombs_do_no_harm(tmp_path):
    path = tmp_path / "a.pt"
    refused(
        with_pickle(path, b"K\x01r\xff\xff\xff\xff."), "something of type int"
    )  # a memo of 4 thousand million places
    doubled = b")" + b"2\x86" * 200  # a tuple of two of itself, 200 times: hashing it would take 2 ** 200 steps
    refused(with_pickle(path, b"}" + doubled + b"K\x01s."), "dict key of type tuple")
    refused(with_pickle(path, doubled + b"."), "something of type tuple")
    refused(with_pickle(path, b"}S'x'\n" + doubled + b"s."), "no named tensors")
    deep = b"]" * 100_000 + b"a" * 99_999
    refused(with_pickle(path, deep + b"."), "something of type list")
    refused(with_pickle(path, b")" + b"\x85" * 100_000 + b"."), "something of type tuple")
    refused(with_pickle(path, b"}q\x00S'state_dict'\nh\x00sS'model'\nh\x00s."), "no named tensors")  # inside itself
    refused(with_pickle(path, b"]q\x00h\x00a."), "something of type list")
    refused(with_pickle(path, b"0" + b"9" * 10), "damaged")


def test_endless_pickles_end(tmp_path, monkeypatch):
    monkeypatch.setattr(restricted_pickle, "_LIMIT", 1000)
    refused(with_pickle(tmp_path / "a.pt", b"(" * 2000), "its pickle is longer than")


@pytest.mark.parametrize("protocol", range(6))
def test_plain_containers_equal_pickle(protocol):
    shared = [1, 2]
    value = {
        "ints": [0, 1, -1, 255, 256, 65535, 65536, 1 << 31, -(1 << 31), 1 << 63, -(1 << 63), 1 << 200, -(1 << 200)],
        "big": 1 << 3000,
        "floats": [0.0, -1.5, 1e300, float("inf")],
        "strings": ["", "a'\"\\\n", "ü", "漢字", "\U0001f600", "x" * 300, "\ud800"],
        "others": [True, False, None, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}, [[]], {"a": {1: [2.5]}}],
        "shared": [shared, shared],
        "long": list(range(3000)),
        "dict": {i: str(i) for i in range(3000)},
    }
    stream = io.BytesIO(pickle.dumps(value, protocol) + b"rest")
    ours = TensorUnpickler().load(stream)
    assert ours == value and stream.read() == b"rest"
    assert ours["shared"][0] is ours["shared"][1]
    assert repr(ours) == repr(value)  # types, too


def test_lazy_negation_is_refused(tmp_path):
    tensor = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    assert tensor.is_neg()
    refused(save({"w": tensor}, tmp_path / "a.pt"), "negation is pending")


def test_wrong_files(tmp_path):
    path = tmp_path / "model.bin"
    refused(tmp_path / "no.pt", "no such file")
    for content, *words in [
        (b"", "0 bytes"),
        (b"x", "not a PyTorch file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "not a PyTorch file"),
        (b"{}" * 1000, "not a PyTorch file"),
        (b"\0" * 100, "not a PyTorch file"),
        (b"\x80" * 100, "not a PyTorch file"),
        (pickle.dumps({"a": 1}), "not one of torch.save"),
        (pickle.dumps(5), "not one of torch.save"),
        (pickle.dumps({"a": np.zeros(3)}), "refers to numpy"),
        (b"PK\x03\x04", "zip"),
    ]:
        path.write_bytes(content)
        refused(path, str(path), *words)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b.txt", "x")
    refused(path, "no data.pkl")
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)
    refused(path, "TorchScript")
    path.unlink()
    path.mkdir()
    refused(path, "neither model.safetensors nor")


def test_other_byte_order(tmp_path):
    path = save({"w": numbers(4)}, tmp_path / "a.pt")
    rezipped(path, change=lambda name, data: b"big" if name.endswith("byteorder") else data)
    refused(path, "big-endian")
    save({"w": numbers(4)}, path, "legacy")
    path.write_bytes(path.read_bytes().replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89"))
    refused(path, "big-endian")


def test_archives_without_byte_order_are_little(tmp_path):
    path = save({"w": numbers(4)}, tmp_path / "a.pt")
    rezipped(path, change=lambda name, data: None if name.endswith("byteorder") else data)
    same(open_checkpoint(path), {"w": numbers(4)})


def test_damaged_entries(tmp_path):
    path = save({"w": numbers(4)}, tmp_path / "a.pt")
    content = path.read_bytes()
    rezipped(path, change=lambda name, data: data[:-1] if "/data/" in name else data)
    refused(path, "truncated: a/data/0 has 15 bytes, but 16 are needed")
    path.write_bytes(content)
    rezipped(path, change=lambda name, data: None if "/data/" in name else data)
    refused(path, "tensor w is in storage 0, which is not there")
    path.write_bytes(content.replace(b"PK\x03\x04", b"PK\x03\x05").replace(b"PK\x03\x05", b"PK\x03\x04", 1))
    refused(path, "a.pt")


@pytest.mark.parametrize("form", ["zip", "deflated", "legacy"])
def test_cut_files_are_refused(form, tmp_path):
    truth = {**{f"layers.{i}.weight": numbers(4, 3) for i in range(3)}, "d2t": torch.arange(9)}
    path = save(truth, tmp_path / "a.pt", "legacy" if form == "legacy" else "zip")
    if form == "deflated":
        rezipped(path)
    content = path.read_bytes()
    for cut in {*range(0, len(content), max(len(content) // 120, 1)), *range(len(content) - 40, len(content))}:
        path.write_bytes(content[:cut])
        refused(path, str(path))
    path.write_bytes(content)
    same(open_checkpoint(path), truth)


@pytest.mark.parametrize("form", ["zip", "deflated", "legacy"])
def test_damage_anywhere_is_a_value_error_or_harmless(form, tmp_path):
    truth = {**{f"layers.{i}.weight": numbers(4, 3) for i in range(3)}, "d2t": torch.arange(9)}
    path = save(truth, tmp_path / "a.pt", "legacy" if form == "legacy" else "zip")
    if form == "deflated":
        rezipped(path)
    content = path.read_bytes()
    draw = random.Random(0)
    for _ in range(150):
        broken = bytearray(content)
        for _ in range(draw.choice([1, 1, 4])):
            broken[draw.randrange(len(broken))] = draw.choice([0, 255, draw.randrange(256)])
        path.write_bytes(broken)
        try:
            checkpoint = open_checkpoint(path)
            for name in checkpoint.names():
                if checkpoint.dtype(name) == "float32":
                    checkpoint.read(name)
        except ValueError as error:
            assert str(error).isprintable(), error
