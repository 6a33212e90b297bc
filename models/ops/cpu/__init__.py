"""Fused C++ kernels for CPU. Results of a row have the same bits whatever rows stand beside it."""

from __future__ import annotations

from ms_spec.models.ops.cpu import clock, layers, rows, sampling
from ms_spec.models.ops.cpu.build import NoCompiler, library

__all__ = ["CpuOps", "NoCompiler"]


class CpuOps:
    """The CPU backend. See :class:`ms_spec.models.ops.interface.Backend`."""

    name = "cpu"
    host_bounds = False
    chunks: tuple[int, ...] = (64, 512)

    Rows = rows.Rows
    Pick = rows.Pick
    Block = rows.Block
    TakeRows = rows.TakeRows
    Embedding = layers.Embedding
    Norm = layers.Norm
    Linear = layers.Linear
    NormLinear = layers.NormLinear
    Head = layers.NormLinear
    NormGatedLinear = layers.NormGatedLinear
    LinearAdd = layers.LinearAdd
    Attention = layers.Attention
    WriteHistory = layers.WriteHistory
    ReadCarry = layers.ReadCarry
    Probs = sampling.Probs
    Argmax = sampling.Argmax
    InverseCDF = sampling.InverseCDF
    Match = sampling.Match
    Logprobs = sampling.Logprobs
    Entropy = sampling.Entropy
    Grid = sampling.Grid
    NgramLookup = sampling.NgramLookup
    Stamp = clock.Stamp
    fuse = staticmethod(layers.fuse)
    join = staticmethod(layers.join)
    AddParts = layers.AddParts
    JoinParts = layers.JoinParts
    Writer = staticmethod(layers.Writer)

    def __init__(self) -> None:
        library()  # raises NoCompiler here, not in the middle of a network
