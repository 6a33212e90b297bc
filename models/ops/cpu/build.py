"""Compiles the C++ kernels at first use and wraps them as MindSpore operators."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

from mindspore import ops

from ms_spec.models.user_cache import cache_root

SOURCES = Path(__file__).parent / "kernels"
# Contraction is always on and vectors are written out, so that every copy of a kernel sums in the same way.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno"),
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
    *("-pthread", "-fPIC"),
)


class NoCompiler(RuntimeError):
    """No C++ compiler could build the kernels."""


def _cpu_identity() -> str:
    """Names the processor, since the kernels are built for exactly this one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


@functools.cache
def library() -> Path:
    """Path of the compiled kernels, built into the user's cache if they are not there yet.

    Raises:
        NoCompiler: there is no compiler (``CXX``, g++, clang++, c++), or it failed.
    """
    compiler = os.environ.get("CXX") or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    sources = sorted(SOURCES.glob("*.cpp"))
    digest = hashlib.sha256("\0".join((*FLAGS, compiler or "", _cpu_identity())).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.read_bytes())
    target = cache_root() / "kernels" / f"ms_spec_{digest.hexdigest()[:20]}.so"
    if target.exists():
        return target
    if compiler is None:
        raise NoCompiler("no C++ compiler found (tried CXX, g++, clang++, c++)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [[compiler, *FLAGS, "-c", "-o", str(o), str(s)] for o, s in zip(objects, sources)]
            list(pool.map(_call, commands))
        built = Path(folder) / "kernels.so"
        _call([compiler, "-shared", "-pthread", "-o", str(built), *map(str, objects)])
        built.replace(target)  # atomic: another process may be doing the same
    return target


def _call(command: list[str]) -> None:
    """Runs the compiler. Raises NoCompiler with the first line of what it complains about."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoCompiler(f"{command[0]} could not be started: {error}") from error
    if done.returncode:
        complaint = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NoCompiler(f"{command[0]} failed: {complaint[0].strip() if complaint else done.returncode}")


def kernel(name: str, out_shape: Callable, out_dtype: Callable, mutates: bool = False) -> Any:
    """An operator that calls the C function ``name``. ``mutates``: it writes to one of its inputs."""
    op = ops.Custom(f"{library()}:{name}", out_shape=out_shape, out_dtype=out_dtype, func_type="aot")
    if mutates:
        op.add_prim_attr("side_effect_mem", True)
    return op
