"""Compiles the C++ kernels and wraps them as MindSpore operators."""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any, Callable

from mindspore import ops

from ms_spec.models.compiler import NoCompiler, shared_library

__all__ = ["NoCompiler", "kernel", "library"]

SOURCES = Path(__file__).parent / "kernels"
# Contraction is always on and vectors are written out, so that every copy of a kernel sums in the same way.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno"),
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
    *("-pthread", "-fPIC"),
)


@functools.cache
def library() -> Path:
    """Path of the compiled kernels.

    Raises:
        NoCompiler: see :func:`ms_spec.models.compiler.shared_library`.
    """
    return shared_library(SOURCES, FLAGS)


def kernel(name: str, out_shape: Callable, out_dtype: Callable, mutates: bool = False) -> Any:
    """An operator that calls the C function ``name``. ``mutates``: it writes to one of its inputs."""
    op = ops.Custom(f"{library()}:{name}", out_shape=out_shape, out_dtype=out_dtype, func_type="aot")
    if mutates:
        op.add_prim_attr("side_effect_mem", True)
    return op
