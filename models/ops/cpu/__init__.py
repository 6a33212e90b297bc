"""Fused C++ kernels for CPU. Results of a row have the same bits whatever rows stand beside it."""

from __future__ import annotations

from ms_spec.models.ops.cpu import layers, sampling
from ms_spec.models.ops.cpu.build import NoCompiler, library

__all__ = ["CpuOps", "NoCompiler"]


class CpuOps:
    """The CPU backend. See :class:`ms_spec.models.ops.interface.Backend`."""

    name = "cpu"
    host_bounds = False
    chunks: tuple[int, ...] = (64, 512)

    Rows = layers.Rows
    Pick = layers.Pick
    Embedding = layers.Embedding
    NormLinear = layers.NormLinear
    NormGatedLinear = layers.NormGatedLinear
    LinearAdd = layers.LinearAdd
    Attention = layers.Attention
    WriteHistory = layers.WriteHistory
    Probs = sampling.Probs
    InverseCDF = sampling.InverseCDF
    Entropy = sampling.Entropy
    Grid = sampling.Grid
    NgramLookup = sampling.NgramLookup
    fuse = staticmethod(layers.fuse)

    def __init__(self) -> None:
        library()  # raises NoCompiler here, not in the middle of a network
