"""Network operations on CPU: one fused kernel each, over the live rows only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_spec.models.ops.cpu.build import kernel
from ms_spec.models.ops.cpu.rows import HORIZON
from ms_spec.models.ops.interface import Geometry
from ms_spec.models.weights import WeightSpec

LANES = 16
_HELD_AS = {"float32": ms.float32, "bfloat16": ms.uint16, "float16": ms.float16}


def _packed(name: str, dtype: str) -> Parameter:
    """A placeholder; the loader puts the panels in."""
    return Parameter(Tensor(np.zeros((1, 1, LANES)), _HELD_AS[dtype]), name=name, requires_grad=False)


def _vector(name: str, size: int, fill: float = 0.0) -> Parameter:
    return Parameter(Tensor(np.full(size, fill, np.float32)), name=name, requires_grad=False)


def _zeros(name: str, shape: tuple[int, ...]) -> Parameter:
    """Zeros that take memory only where they are written."""
    parameter = Parameter(Tensor(np.zeros(1, np.float32)), name=name, requires_grad=False)
    parameter.set_data(Tensor.from_numpy(np.zeros(shape, np.float32)), slice_shape=True)
    return parameter


def _like(shape_of: int, out: int) -> tuple[Any, Any]:
    """Inference of a float32 [R, out] output, R taken from input ``shape_of``."""
    return (lambda *shapes: [shapes[shape_of][0], out]), (lambda *_: ms.float32)


class Embedding(nn.Cell):
    """Rows of the token table."""

    def __init__(self, vocab: int, hidden: int, dtype: str) -> None:
        super().__init__()
        self.shape, self.dtype = (vocab, hidden), dtype
        self.weight = _packed("weight", dtype)
        self.op = kernel(f"embedding_{dtype}", *_like(0, hidden))

    def weights(self, source: str) -> list[WeightSpec]:
        return [WeightSpec(self.weight, self.shape, "panels", self.dtype, (source,))]

    def construct(self, rows: tuple) -> Tensor:
        return self.op(rows[0], self.weight, rows[4])


_NO_BIAS = Tensor(np.zeros(1, np.float32))  # kernels take a bias for absent when it is shorter than the output


def _bias(name: str, out: int, present: bool) -> Any:
    return _vector(name, out) if present else _NO_BIAS


def _bias_specs(bias: Any, out: int, *sources: str) -> list[WeightSpec]:
    if bias is _NO_BIAS:
        return []
    return [WeightSpec(bias, (out,), "vector", "float32", tuple(f"{s}.bias" for s in sources))]


def _linear_specs(cell: Any, sources: tuple[str, ...]) -> list[WeightSpec]:
    weight = WeightSpec(cell.weight, cell.shape, "panels", cell.dtype, tuple(f"{s}.weight" for s in sources))
    return [weight, *_bias_specs(cell.bias, cell.shape[0], *sources)]


class Norm(nn.Cell):
    """RMS norm."""

    def __init__(self, size: int, eps: float, tied: Any = None) -> None:
        super().__init__()
        self.gamma = _vector("gamma", size, 1.0) if tied is None else tied.gamma
        self.eps = Tensor(np.array([eps], np.float32))
        self.size, self.tied = size, tied is not None
        self.op = kernel("norm", *_like(0, size))

    def weights(self, source: str) -> list[WeightSpec]:
        if self.tied:
            return []
        return [WeightSpec(self.gamma, (self.size,), "vector", "float32", (f"{source}.weight",))]

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        return self.op(x, self.gamma, self.eps, rows[4])


class Linear(nn.Cell):
    """A linear map."""

    def __init__(self, out: int, inner: int, dtype: str, bias: bool = False, tied: Any = None) -> None:
        super().__init__()
        self.shape, self.dtype, self.tied = (out, inner), dtype, tied is not None
        self.weight = _packed("weight", dtype) if tied is None else tied.weight
        self.bias = _bias("bias", out, bias)
        self.op = kernel(f"linear_{dtype}", *_like(0, out))

    def weights(self, *sources: str) -> list[WeightSpec]:
        return _bias_specs(self.bias, self.shape[0], *sources) if self.tied else _linear_specs(self, sources)

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        return self.op(x, self.weight, self.bias, rows[4])


class NormLinear(nn.Cell):
    """RMS norm, then a linear map."""

    def __init__(self, out: int, hidden: int, eps: float, dtype: str, bias: bool = False, tied: Any = None) -> None:
        super().__init__()
        self.shape, self.dtype, self.tied = (out, hidden), dtype, tied is not None
        self.gamma = _vector("gamma", hidden, 1.0)
        self.eps = Tensor(np.array([eps], np.float32))
        self.weight = _packed("weight", dtype) if tied is None else tied.weight
        self.bias = _bias("bias", out, bias)
        self.op = kernel(f"norm_linear_{dtype}", *_like(0, out))

    def weights(self, norm: str, *sources: str) -> list[WeightSpec]:
        gamma = WeightSpec(self.gamma, (self.shape[1],), "vector", "float32", (f"{norm}.weight",))
        if self.tied:
            return [gamma]
        return [gamma, *_linear_specs(self, sources)]

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        return self.op(x, self.gamma, self.eps, self.weight, self.bias, rows[4])


class NormGatedLinear(nn.Cell):
    """RMS norm, then silu(gate) * up."""

    def __init__(self, out: int, hidden: int, eps: float, dtype: str, bias: bool = False) -> None:
        super().__init__()
        self.shape, self.dtype = (out, hidden), dtype
        self.gamma = _vector("gamma", hidden, 1.0)
        self.eps = Tensor(np.array([eps], np.float32))
        # One matrix, 16 rows of gate and up in turn: a kernel's tile holds both halves of its outputs.
        self.gate_up = _packed("gate_up", dtype)
        self.gate_bias, self.up_bias = _bias("gate_bias", out, bias), _bias("up_bias", out, bias)
        self.op = kernel(f"norm_gated_{dtype}", *_like(0, out))

    def weights(self, norm: str, gate: str, up: str) -> list[WeightSpec]:
        (out, hidden), both = self.shape, (f"{gate}.weight", f"{up}.weight")
        return [
            WeightSpec(self.gamma, (hidden,), "vector", "float32", (f"{norm}.weight",)),
            WeightSpec(self.gate_up, (2 * out, hidden), "panels", self.dtype, both, interleaved=True),
            *_bias_specs(self.gate_bias, out, gate),
            *_bias_specs(self.up_bias, out, up),
        ]

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        return self.op(x, self.gamma, self.eps, self.gate_up, self.gate_bias, self.up_bias, rows[4])


class LinearAdd(nn.Cell):
    """A linear map added to the residual."""

    def __init__(self, out: int, inner: int, dtype: str, bias: bool = False) -> None:
        super().__init__()
        self.shape, self.dtype = (out, inner), dtype
        self.weight, self.bias = _packed("weight", dtype), _bias("bias", out, bias)
        self.op = kernel(f"linear_add_{dtype}", *_like(0, out))

    def weights(self, *sources: str) -> list[WeightSpec]:
        return _linear_specs(self, sources)

    def construct(self, x: Tensor, residual: Tensor, rows: tuple) -> Tensor:
        return self.op(x, residual, self.weight, self.bias, rows[4])


class Attention(nn.Cell):
    """Rotary embedding, cache write and attention in one kernel. The caches' layout is the kernel's own."""

    def __init__(self, geometry: Geometry, cos: Parameter, sin: Parameter) -> None:
        super().__init__()
        g = geometry
        padded = -(-g.head_dim // LANES) * LANES
        tiles = (g.num_blocks, g.num_kv_heads, g.block_size // LANES, g.head_dim, LANES)
        self.k_cache = _zeros("k_cache", tiles)
        self.v_cache = _zeros("v_cache", (g.num_blocks, g.num_kv_heads, g.block_size, padded))
        self.head_dim, self.qk_norm = g.head_dim, g.qk_norm
        self.q_gamma, self.k_gamma = (_bias(f"{c}_gamma", g.head_dim, g.qk_norm) for c in "qk")
        self.eps = Tensor(np.array([g.rms_norm_eps], np.float32))
        self.cos, self.sin = cos, sin
        self.op = kernel("attention", *_like(0, g.num_heads * g.head_dim), mutates=True)

    def weights(self, q_norm: str, k_norm: str) -> list[WeightSpec]:
        if not self.qk_norm:
            return []
        return [
            WeightSpec(self.q_gamma, (self.head_dim,), "vector", "float32", (f"{q_norm}.weight",)),
            WeightSpec(self.k_gamma, (self.head_dim,), "vector", "float32", (f"{k_norm}.weight",)),
        ]

    def construct(self, qkv: Tensor, rows: tuple) -> Tensor:
        caches = (self.k_cache, self.v_cache)
        return self.op(
            *(qkv, rows[1], rows[HORIZON], rows[2], rows[4], rows[5], self.cos, self.sin),
            *(*caches, self.q_gamma, self.k_gamma, self.eps),
        )

    def writer(self) -> WriteKV:
        """A Cell that fills the same caches."""
        return WriteKV(self)


class WriteKV(nn.Cell):
    """Rotary embedding and cache write, as an Attention does them, or all fused layers, without attention."""

    def __init__(self, owner: Attention | FusedLayer) -> None:
        super().__init__()
        self.k_cache, self.v_cache = owner.k_cache, owner.v_cache
        self.cos, self.sin = owner.cos, owner.sin
        self.k_gamma, self.eps = owner.k_gamma, owner.eps
        self.op = kernel("write_kv", lambda *_: [1], lambda *_: ms.int32, mutates=True)

    def construct(self, kv: Tensor, rows: tuple) -> Tensor:
        return self.op(
            *(kv, rows[1], rows[2], rows[4], rows[5], self.cos, self.sin),
            *(self.k_cache, self.v_cache, self.k_gamma, self.eps),
        )


def _own_parameters(layer: Any) -> dict[str, Any]:
    """What a decoder layer owns, by the names that its fused twin uses."""
    qkv, attention, gated = layer.qkv, layer.attention, layer.gated
    # Where several workers share the layer, the maps whose sums they add up hold this worker's.
    output, down = (getattr(linear, "own", linear) for linear in (layer.output, layer.down))
    return {
        "k_cache": attention.k_cache,
        "v_cache": attention.v_cache,
        "q_gamma": attention.q_gamma,
        "k_gamma": attention.k_gamma,
        "gamma": getattr(qkv, "gamma", _NO_BIAS),
        "qkv": qkv.weight,
        "qkv_bias": qkv.bias,
        "output": output.weight,
        "output_bias": output.bias,
        "gamma2": gated.gamma,
        "gate_up": gated.gate_up,
        "gate_bias": gated.gate_bias,
        "up_bias": gated.up_bias,
        "down": down.weight,
        "down_bias": down.bias,
    }


class FusedLayer(nn.Cell):
    """Decoder layers in few kernels, on parameters that hold those of all layers: each costs time at every step.

    layer: the first of them, ``index`` among ``count`` that share parameters; ``depth``: how many it runs.
    """

    def __init__(self, layer: Any, index: int, shared: dict[str, Any], count: int, depth: int = 1) -> None:
        super().__init__()
        self.made_of = (layer, index, shared, count)
        self.numbers = Tensor(np.array([layer.qkv.shape[0], layer.gated.shape[0], index, depth], np.int32))
        self.cos, self.sin, self.eps = layer.attention.cos, layer.attention.sin, layer.gated.eps
        for name, parameter in shared.items():
            setattr(self, name, parameter)
        self.dtype, self.hidden = layer.qkv.dtype, layer.gated.shape[1]

    def weights(self, at: str) -> list[WeightSpec]:
        """Those of the first layer, as parts of the shared parameters."""
        layer, index, shared, count = self.made_of
        place = {id(own): shared[name] for name, own in _own_parameters(layer).items()}
        return [replace(spec, parameter=place[id(spec.parameter)], part=(index, count)) for spec in layer.weights(at)]

    def kernel(self, name: str, mutates: bool = True) -> Any:
        """One of the layer's kernels; its output is [R, hidden]."""
        return kernel(f"{name}_{self.dtype}", *_like(0, self.hidden), mutates=mutates)

    def attention(self, x: Tensor, rows: tuple) -> tuple:
        """What a kernel takes to attend to x."""
        return (
            *(x, rows[1], rows[HORIZON], rows[2], rows[4], rows[5], self.cos, self.sin, self.eps, self.numbers),
            *(self.k_cache, self.v_cache, self.q_gamma, self.k_gamma, self.gamma, self.qkv, self.qkv_bias),
            *(self.output, self.output_bias),
        )

    def feeding(self) -> tuple:
        """The parameters of the feed-forward network."""
        return self.gamma2, self.gate_up, self.gate_bias, self.up_bias, self.down, self.down_bias


class NormedLayers(FusedLayer):
    """Layers that attend to the norm of what they add to, in one kernel."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.whole = self.kernel("layers")

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        return self.whole(*self.attention(x, rows), *self.feeding())


class FedLayer(FusedLayer):
    """A layer that attends to z as it is, and adds to something else, in one kernel."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.whole = self.kernel("fed_layer")

    def construct(self, z: Tensor, residual: Tensor, rows: tuple) -> Tensor:
        return self.whole(*self.attention(z, rows), *self.feeding(), residual)


class HalvedLayer(FusedLayer):
    """This worker's part of a layer: a kernel for each half, and behind it a sum of what all workers have."""

    def __init__(self, sums: tuple[Any, Any], *given: Any) -> None:
        super().__init__(*given)
        self.attend, self.feed = self.kernel("attend"), self.kernel("feed", mutates=False)
        self.attended, self.fed = sums

    def added(self, z: Tensor, residual: Tensor, rows: tuple) -> Tensor:
        """The residual stream behind the layer, which attends to z, or to its norm where it has one."""
        x = self.attended(self.attend(*self.attention(z, rows)), residual, rows)
        made = self.feed(x, rows[4], self.eps, self.numbers, *self.feeding())
        return self.fed(made, x, rows)


class HalvedNormedLayer(HalvedLayer):
    """See NormedLayers."""

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        return self.added(x, x, rows)


class HalvedFedLayer(HalvedLayer):
    """See FedLayer."""

    def construct(self, z: Tensor, residual: Tensor, rows: tuple) -> Tensor:
        return self.added(z, residual, rows)


def _shared_parameters(layers: list[Any]) -> dict[str, Any]:
    """Room for the parameters of all layers, by their names."""
    shared: dict[str, Any] = {}
    for name, own in _own_parameters(layers[0]).items():
        if own is _NO_BIAS:
            shared[name] = own
        elif name in ("k_cache", "v_cache"):
            shared[name] = _zeros(name, (len(layers), *own.shape))
        else:  # the loader gives it its shape
            shared[name] = Parameter(Tensor(np.zeros(1), own.dtype), name=name, requires_grad=False)
    return shared


def fuse(layers: list[Any], total: Callable[[], Any] | None = None) -> list[Any]:
    """Decoder layers of one shape, each in one kernel, or in two with a ``total`` behind each."""
    shared, count = _shared_parameters(layers), len(layers)
    normed = isinstance(layers[0].qkv, NormLinear)
    if total is None:
        made = NormedLayers if normed else FedLayer
        return [made(layer, i, shared, count) for i, layer in enumerate(layers)]
    halved = HalvedNormedLayer if normed else HalvedFedLayer
    return [halved((total(), total()), layer, i, shared, count) for i, layer in enumerate(layers)]


def join(layers: list[NormedLayers]) -> NormedLayers:
    """Neighbouring layers of one ``fuse`` in one kernel."""
    return NormedLayers(*layers[0].made_of, len(layers))


def Writer(layers: list[FusedLayer]) -> WriteKV:
    """See :class:`ms_spec.models.ops.interface.Backend`; all layers of one ``fuse`` share their caches."""
    return WriteKV(layers[0])


class AddParts(nn.Cell):
    """The sum of several workers' parts and of a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.op = kernel("add_parts", lambda parts, residual, count: residual, lambda *_: ms.float32)

    def construct(self, parts: Tensor, residual: Tensor, rows: tuple) -> Tensor:
        return self.op(parts, residual, rows[4])


class JoinParts(nn.Cell):
    """Several workers' columns beside each other."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.op = kernel("join_parts", lambda parts, count: [parts[0] // size, width], lambda *_: ms.float32)

    def construct(self, parts: Tensor, rows: tuple) -> Tensor:
        return self.op(parts, rows[4])


class ReadCarry(nn.Cell):
    """Where requests stand after a step that the host has not looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.op = kernel(
            "read_carry",
            lambda history, carry, slot, tokens, start, carried, uniforms: (tokens, start, uniforms),
            lambda *_: (ms.int32, ms.int32, ms.float32),
        )

    def construct(
        self,
        history: Parameter,
        carry: Parameter,
        slot: Tensor,
        tokens: Tensor,
        start: Tensor,
        carried: Tensor,
        uniforms: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, start, uniforms = self.op(history, carry, slot, tokens, start, carried, uniforms)
        return tokens, start, uniforms


class WriteHistory(nn.Cell):
    """Appends committed ids to each request's history."""

    def __init__(self) -> None:
        super().__init__()
        self.op = kernel("write_history", lambda *shapes: shapes[1], lambda *_: ms.int32, mutates=True)

    def construct(self, history: Parameter, slot: Tensor, start: Tensor, tokens: Tensor, count: Tensor) -> Tensor:
        return self.op(history, slot, start, tokens, count)
