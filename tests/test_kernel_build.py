"""Building the kernels: kept, checked, built anew where damaged, and for one process where nothing can be kept.

The sources are a few lines, so that building takes a moment only.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ms_spec.models import compiler as compiling
from ms_spec.models.ops import select
from ms_spec.models.ops.cpu import build
from ms_spec.models.ops.cpu.build import NoCompiler

SECOND = """
#ifndef NUMBER
#define NUMBER 41
#endif
extern "C" int other() { return NUMBER; }
"""


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "a.cpp").write_text('extern "C" int other(); extern "C" int answer() { return other(); }')
    (folder / "b.cpp").write_text(SECOND)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("MS_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)


def library() -> Path:
    """What a new process would get."""
    return build.library.__wrapped__()


def answer(file: Path) -> int:
    return ctypes.CDLL(str(file)).answer()


def fails(*_: Any) -> bytes:
    raise AssertionError("compiled again")


def test_they_are_built_once(monkeypatch: Any, tmp_path: Path) -> None:
    file = library()
    assert file.parent == tmp_path / "cache" / "kernels" and answer(file) == 41
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    monkeypatch.setattr(compiling, "_compile", fails)
    assert library() == file


@pytest.mark.parametrize("damage", ["cut", "zeros", "empty", "other"])
def test_a_damaged_file_is_never_loaded(damage: str) -> None:
    file = library()
    whole = file.read_bytes()
    half = len(whole) // 2
    damaged = {"cut": whole[:half], "zeros": whole[:half] + bytes(half), "empty": b"", "other": b"x" * 100}[damage]
    file.unlink()  # this process has it mapped
    file.write_bytes(damaged)
    again = library()
    assert again.parent == file.parent and answer(again) == 41
    assert compiling._usable(again)


def test_what_killed_builds_left_is_removed(tmp_path: Path) -> None:
    kernels = tmp_path / "cache" / "kernels"
    old = time.time() - 2 * 86400
    for name in ("tmpold", ".old.so.x1", "tmpnew", "ms_spec_other.so"):
        (kernels / name).mkdir(parents=True)
        if "new" not in name:
            os.utime(kernels / name, (old, old))
    library()
    assert {path.name for path in kernels.iterdir()} > {"tmpnew", "ms_spec_other.so"}
    assert not (kernels / "tmpold").exists() and not (kernels / ".old.so.x1").exists()


@pytest.mark.parametrize(
    "environment",
    [
        {"MS_SPEC_CACHE": "/proc/nope"},
        {"MS_SPEC_CACHE": "/dev/null"},
        {"MS_SPEC_CACHE": "~nobody-of-this-name/x"},
        {"MS_SPEC_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/proc/nope"},
    ],
    ids=lambda environment: environment["MS_SPEC_CACHE"] or "home",
)
def test_where_nothing_can_be_kept(environment: dict[str, str], monkeypatch: Any, caplog: Any) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        assert answer(library()) == 41
    (record,) = caplog.records
    where = environment["MS_SPEC_CACHE"] or environment["HOME"]
    assert "MS_SPEC_CACHE" in record.message and ("~" in where or where in record.message)


def test_a_place_that_nothing_can_be_loaded_from(monkeypatch: Any, tmp_path: Path, caplog: Any) -> None:
    usable = compiling._usable
    monkeypatch.setattr(compiling, "_usable", lambda file: "cache" not in file.parts and usable(file))
    with caplog.at_level(logging.WARNING):
        file = library()
    assert answer(file) == 41 and tmp_path not in file.parents and "cannot be loaded" in caplog.text


def test_the_compiler_may_have_arguments(monkeypatch: Any) -> None:
    monkeypatch.setenv("CXX", "g++ -O1 '-DNUMBER=(40 + 2)'")
    assert answer(library()) == 42


@pytest.mark.parametrize("compiler", ["g++ '", "/no/such/compiler", "false", "g++ -fno-such-option"])
def test_a_compiler_that_is_none(compiler: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(NoCompiler) as error:
        library()
    assert "\n" not in str(error.value) and compiler.split()[0] in str(error.value)


def test_no_compiler_goes_on_when_one_has_failed() -> None:
    begun = time.perf_counter()
    with pytest.raises(NoCompiler, match="false failed: 1"):
        compiling._call([["false"], ["sh", "-c", "sleep 30; sleep 30"], ["sleep", "30"]])
    assert time.perf_counter() - begun < 10


@pytest.mark.parametrize(("name", "device"), [("ascend", "cpu"), ("cpu", "ascend")])
def test_operations_of_another_device(name: str, device: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("MS_SPEC_OPS", name)
    with pytest.raises(ValueError, match=f"MS_SPEC_OPS: the '{name}' operations do not run on device '{device}'"):
        select(device)
