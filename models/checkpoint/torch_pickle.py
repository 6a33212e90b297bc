"""What ``torch.save`` pickles of tensors: storages by key, and views of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any, Callable

from ms_spec.models.checkpoint.restricted_pickle import Refused, Symbol, load, put_items

# torch's name of a dtype -> bytes of an element
WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
WIDTHS.update({"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1})
WIDTHS.update({"bool": 1, "complex128": 16, "complex64": 8, "complex32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1})
WIDTHS.update({"float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1})

_STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.ComplexFloatStorage": "complex64",
    "torch.ComplexDoubleStorage": "complex128",
    "torch.UntypedStorage": "uint8",
    "torch.storage.UntypedStorage": "uint8",
}
_DTYPES = {f"torch.{name}": name for name in WIDTHS}
_NAMES = frozenset({*_STORAGES, *_DTYPES})
_MOST_AXES = 32


@dataclass(frozen=True)
class Storage:
    """A run of ``count`` elements of ``dtype``, found in the file by ``key``."""

    key: str
    dtype: str
    count: int


@dataclass(frozen=True)
class View:
    """A tensor: ``shape``, ``strides`` and ``offset`` in elements of ``dtype``, all of them >= 0."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def end(self) -> int:
        """Bytes from the storage's start to the end of the last element."""
        return (self.offset + extent(self.shape, self.strides)) * WIDTHS[self.dtype]


def extent(shape: Iterable[int], strides: Iterable[int]) -> int:
    """Elements from the first to the last of a strided tensor, both counted; 0 if it has none."""
    last = 0
    for size, stride in zip(shape, strides):
        if size == 0:
            return 0
        last += (size - 1) * stride
    return last + 1


class TensorUnpickler:
    """Reads pickles of one file. ``storages``: all that they have named, by key."""

    def __init__(self) -> None:
        self.storages: dict[str, Storage] = {}

    def load(self, stream: IO[bytes]) -> Any:
        """Plain containers and Views. Errors as in ``restricted_pickle.load``."""
        return load(stream, _CALLS, _NAMES, self._storage)

    def _storage(self, identity: Any) -> Storage:
        # ("storage", type, key, device, elements), and in the older format a view of the storage or None.
        if type(identity) is not tuple or len(identity) not in (5, 6):
            raise TypeError
        tag, kind, key, _, count, *view = identity
        if type(tag) is not str or type(kind) is not Symbol or type(key) is not str or type(count) is not int:
            raise TypeError
        if tag != "storage" or kind.name not in _STORAGES or count < 0:
            raise TypeError
        if view and view[0] is not None:
            raise Refused("has views of storages, as PyTorch before 0.4 wrote them; save it again with a newer one")
        storage = Storage(key, _STORAGES[kind.name], count)
        known = self.storages.setdefault(key, storage)
        if known != storage:
            raise ValueError(f"storage {key} is {known.count} {known.dtype} and {count} {storage.dtype}")
        return storage


def _ordered_dict(*arguments: Any) -> dict[Any, Any]:
    """The content follows, or (Python 2) is a list of pairs."""
    result: dict[Any, Any] = {}
    if arguments:
        (pairs,) = arguments
        if type(pairs) is not list or not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
            raise TypeError
        put_items(result, pairs)
    return result


def _size(sizes: Any) -> tuple[int, ...]:
    return _naturals(sizes)


def _tensor_v1(storage: Any, offset: Any, shape: Any, strides: Any) -> View:
    return _view(storage, None, offset, shape, strides)


def _tensor_v2(
    storage: Any, offset: Any, shape: Any, strides: Any, gradient: Any, hooks: Any, metadata: Any = None
) -> View:
    return _view(storage, None, offset, shape, strides, metadata)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, gradient: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> View:
    if type(dtype) is not Symbol or dtype.name not in _DTYPES:
        raise TypeError
    return _view(storage, _DTYPES[dtype.name], offset, shape, strides, metadata)


def _parameter(data: Any, *_: Any) -> View:
    if type(data) is not View:
        raise TypeError
    return data


def _view(storage: Any, dtype: str | None, offset: Any, shape: Any, strides: Any, metadata: Any = None) -> View:
    if type(storage) is not Storage:
        raise TypeError
    (offset,) = _naturals((offset,))
    shape, strides = _naturals(shape), _naturals(strides)
    if len(shape) != len(strides) or len(shape) > _MOST_AXES:
        raise TypeError
    if metadata:
        raise Refused("has a tensor whose conjugation or negation is pending; save its .resolve_neg().resolve_conj()")
    return View(storage, dtype or storage.dtype, offset, shape, strides)


def _naturals(values: Any) -> tuple[int, ...]:
    if type(values) not in (tuple, list) or not all(type(v) is int and 0 <= v < 1 << 62 for v in values):
        raise TypeError
    return tuple(values)


_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor_v1,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
