"""MindSpore's graph executor, watched: how many graphs it compiles and how long it runs them.

It takes the place of the executor object that every Cell calls. Nothing of ms-spec is changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Watched:
    """The executor with counters. ``seconds`` is the time inside its calls, until a result is handed back."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.compiled = 0
        self.runs = 0
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        self.compiled += 1
        return self._executor.compile(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        start = time.perf_counter()
        try:
            return self._executor(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


@contextmanager
def watched() -> Iterator[Watched]:
    """All graphs of this process, as long as the block runs."""
    from mindspore.graph.api import _cell_graph_executor as cells

    original = cells._graph_executor
    cells._graph_executor = watch = Watched(original)
    try:
        yield watch
    finally:
        cells._graph_executor = original


class Reads:
    """Step Cells whose results are timed when the host reads them (``asnumpy``): a graph may still be running then."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0.0
        """Seconds in the Cells' calls, their own Python code included."""

    def of(self, cell: Any) -> Any:
        """``cell``, timed."""

        def call(*tensors: Any) -> Any:
            start = time.perf_counter()
            result = cell(*tensors)
            self.calls += time.perf_counter() - start
            return tuple(_Result(one, self) for one in result)

        return call


class _Result:
    def __init__(self, tensor: Any, reads: Reads) -> None:
        self._tensor, self._reads = tensor, reads

    def asnumpy(self) -> Any:
        start = time.perf_counter()
        try:
            return self._tensor.asnumpy()
        finally:
            self._reads.seconds += time.perf_counter() - start
