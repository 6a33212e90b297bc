"""Compiles C++ sources that travel with the package at first use, and keeps the result in the user's cache."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ms_spec.models.user_cache import cache_root, write_atomically

_log = logging.getLogger("ms_spec")


class NoCompiler(RuntimeError):
    """No C++ compiler could build a library."""


def _cpu_identity() -> str:
    """Names the processor, since libraries are built for exactly this one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def shared_library(sources: Path, flags: Sequence[str]) -> Path:
    """Path of the library made of a folder's ``.cpp`` files, built into the cache if it is not there or is damaged.

    It is built anew when a file of the folder, a flag, the compiler or the processor changes. Where the cache cannot be
    written, it is built for this process alone.

    Raises:
        NoCompiler: there is no compiler (``CXX``, g++, clang++, c++), or it failed.
    """
    compiler = _compiler()
    digest = hashlib.sha256("\0".join((*flags, *compiler, _cpu_identity())).encode())
    for file in sorted(sources.iterdir()):
        digest.update(file.read_bytes())
    folder, name = cache_root() / "kernels", f"ms_spec_{digest.hexdigest()[:20]}"
    with contextlib.suppress(OSError):
        for file in sorted(folder.glob(f"{name}_*.so")):
            if _usable(file):
                return file
    content = _compile(compiler, sources, flags)
    name = f"{name}_{_checksum(content)}.so"
    try:
        write_atomically(folder / name, content)
        if not _usable(folder / name):
            raise OSError("what is there cannot be loaded")
        return folder / name
    except OSError as error:
        _log.warning(
            "the kernels are built anew at every start: %s cannot be used (%s); "
            "set MS_SPEC_CACHE to a folder you can write to",
            folder,
            error.strerror or error,
        )
    return _for_this_process(name, content)


def _compiler() -> list[str]:
    """The command, with arguments if ``CXX`` has some; empty if there is none."""
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise NoCompiler(f"CXX = {os.environ['CXX']!r}: {error}") from None
    return given or next(([c] for c in ("g++", "clang++", "c++") if shutil.which(c)), [])


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _usable(file: Path) -> bool:
    """Whether it holds what its name says, and can be loaded from where it is."""
    try:
        if _checksum(file.read_bytes()) != file.stem.rpartition("_")[2]:
            return False
        ctypes.CDLL(str(file))
    except OSError:
        return False
    return True


def _for_this_process(name: str, content: bytes) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="ms-spec-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (folder / name).write_bytes(content)
    except OSError as error:
        raise NoCompiler(f"no place for the kernels: {error}") from None
    if not _usable(folder / name):
        raise NoCompiler(f"{folder / name} cannot be loaded")
    return folder / name


def _compile(compiler: list[str], folder: Path, flags: Sequence[str]) -> bytes:
    """The shared object."""
    if not compiler:
        raise NoCompiler("no C++ compiler found (tried CXX, g++, clang++, c++)")
    sources = sorted(folder.glob("*.cpp"))
    try:
        with tempfile.TemporaryDirectory(prefix="ms-spec-") as place:
            objects = [str(Path(place) / f"{source.stem}.o") for source in sources]
            _call([[*compiler, *flags, "-c", "-o", o, str(s)] for o, s in zip(objects, sources)])
            built = Path(place) / "library.so"
            _call([[*compiler, "-shared", "-pthread", "-o", str(built), *objects]])
            return built.read_bytes()
    except OSError as error:
        raise NoCompiler(f"no place to build the kernels: {error}") from None


def _call(commands: list[list[str]]) -> None:
    """Runs compilers side by side. None goes on when one has failed, or at Ctrl-C.

    Raises:
        NoCompiler: with the first line of what a compiler complains about.
    """
    running: set[subprocess.Popen[str]] = set()
    over = threading.Event()

    def end(process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)

    def call(command: list[str]) -> None:
        try:
            # A session of its own: what a compiler starts ends with it.
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
        except OSError as error:
            raise NoCompiler(f"{command[0]} could not be started: {error}") from error
        running.add(process)
        if over.is_set():
            end(process)
        complaints = process.communicate()[1].splitlines()
        running.discard(process)
        if process.returncode:
            first = next((line for line in complaints if "error" in line), None) or (complaints or [""])[0]
            raise NoCompiler(f"{command[0]} failed: {first.strip() or process.returncode}")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        calls = [pool.submit(call, command) for command in commands]
        try:
            for one in as_completed(calls):
                one.result()
        except BaseException:
            over.set()
            for one in calls:
                one.cancel()
            for process in list(running):
                end(process)
            raise
