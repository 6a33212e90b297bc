"""A model that several workers hold parts of. See :mod:`ms_spec.group`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mindspore import Tensor

from ms_spec.config import EngineConfig
from ms_spec.group import BUILD, CLOSE, RUN, SLOT, STOP, Group
from ms_spec.runner import Inputs, ModelRunner

_CLOCK = (3, 4)
"""Columns of a step's output that tell the time, which is each worker's own."""


class ParallelRunner(ModelRunner):
    """A :class:`ModelRunner` of which every worker has one: rank 0 tells the others of each call before it begins.

    engine: the number of its model among those of the job.
    """

    def __init__(self, group: Group, engine: int, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._group, self._engine = group, engine
        self._buckets = self.plan()
        group.fit(max(sum(array.nbytes for array in self._new_inputs(b).arrays()) for b in self._buckets))

    def meet(self) -> None:
        """Waits until all workers have built it."""
        self._group.meet()
        self._group.heartbeat.end(b"")

    def _compute(self, bucket: tuple[str, int, int], inputs: Inputs) -> tuple[np.ndarray, list[Tensor]]:
        group = self._group
        group.heartbeat.begin()
        try:
            if group.leads:
                for slot in sorted(self._tables.changed):
                    group.tell(SLOT, self._engine, slot, self._tables.rows(slot))
                group.tell(RUN, self._engine, self._buckets.index(bucket), inputs.arrays())
            packed, others = super()._compute(bucket, inputs)
        except BaseException:
            group.failed = True
            raise
        group.heartbeat.end(np.delete(packed[inputs.slot > 0], _CLOCK, 1).tobytes())
        return packed, others

    def repeat(self, place: int, content: np.ndarray) -> None:
        """The call that rank 0 has told of: graph number ``place`` of the plan, on inputs of these bytes."""
        inputs, at = self._inputs_of(self._buckets[place]), 0
        for array in inputs.arrays():
            array.reshape(-1).view(np.uint8)[:] = content[at : at + array.nbytes]
            at += array.nbytes
        self._compute(self._buckets[place], inputs)

    def take(self, slot: int, content: np.ndarray) -> None:
        """What rank 0 has told of a slot's request before the call that looks at it."""
        self._tables.write(slot, content)


@contextmanager
def announced(group: Group, config: EngineConfig) -> Iterator[int]:
    """Rank 0: has the others build the model that is built inside the block. Gives its number."""
    engine = group.new_engine()
    group.heartbeat.begin()
    given = json.dumps(config.model_dump(mode="json", exclude_unset=True)).encode()
    group.tell(BUILD, engine, 0, [np.frombuffer(given, np.uint8)])
    try:
        yield engine
    except BaseException:
        group.failed = True
        raise


def dismiss(group: Group, engine: int) -> None:
    """Rank 0: lets the others drop their parts of a model."""
    if not group.failed:
        group.tell(CLOSE, engine)


def follow(group: Group) -> None:
    """The other workers: does what rank 0 says, until it says that this is all."""
    from ms_spec.assembly import assemble_part

    runners: dict[int, Any] = {}
    while True:
        kind, engine, place, content = group.hear()
        if kind == RUN:
            runners[engine].repeat(place, content)
        elif kind == SLOT:
            runners[engine].take(place, content)
        elif kind == BUILD:
            group.heartbeat.begin()
            runners[engine] = assemble_part(EngineConfig(**json.loads(content.tobytes())), group, engine)
        elif kind == CLOSE:
            runners.pop(engine, None)
        elif kind == STOP:
            return
