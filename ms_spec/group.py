"""The workers of an msrun job as one of them sees the others: rank 0 says what is computed, all compute it.

What rank 0 says are records of one fixed size, broadcast by MindSpore. So no worker decides anything by itself: no
clock, no order of a set and no draft of its own can make the workers' graphs differ.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from mindspore import Tensor, nn, ops

from ms_spec.heartbeat import FOLDER, Heartbeat
from ms_spec.models.parallel import Shard
from ms_spec.runtime import graph_thread, use_mode
from ms_spec.world import world

RUN, SLOT, BUILD, CLOSE, IDLE, STOP = range(6)
"""Kinds of messages: a graph call, what the request in a slot asks of its logits, a new engine, an engine that is
closed, nothing, the end."""
_HEAD = 4
_FIRST_WORDS = 1024
_IDLE_S, _KEEP_UP_S = 5.0, 1.0
"""On CPU, MindSpore gives up when a worker has waited half a minute for another."""


class _Broadcast(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.op = ops.Broadcast(0)

    def construct(self, record: Tensor) -> Tensor:
        return self.op((record,))[0]


class _Meeting(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.op = ops.AllGather()

    def construct(self, x: Tensor) -> Tensor:
        return self.op(x)


class Group:
    """This worker and the others. All methods are called on the graph thread, but :meth:`stop`.

    A message is (kind, engine, place, content); content longer than a record goes out in several.
    """

    def __init__(self, shard: Shard, heartbeat: Heartbeat) -> None:
        self.shard, self.heartbeat = shard, heartbeat
        self.leads = shard.rank == 0
        self.num_engines = 0
        self.failed = False
        """A call of the workers has failed: what they would say to each other now, nobody would hear."""
        self._record = np.zeros(_FIRST_WORDS, np.int32)
        self._broadcast, self._meeting = _Broadcast(), _Meeting()
        self._met = 0.0
        self._spoken = threading.Event()
        self._over = threading.Event()
        if self.leads:
            atexit.register(self.stop)

    def new_engine(self) -> int:
        """Rank 0: the number of one more model. From the first one on the others listen, and must hear something."""
        self.num_engines += 1
        if self.num_engines == 1:
            threading.Thread(target=self._keep_awake, name="ms-spec-idle", daemon=True).start()
        return self.num_engines

    def fit(self, size: int) -> None:
        """Makes records large enough for ``size`` bytes of content. All workers call it at the same place."""
        words = _HEAD + -(-size // 4)
        if words > self._record.size:
            self._record = np.zeros(words, np.int32)

    def keep_up(self) -> None:
        """Called now and then by workers who are on their way to :meth:`meet`: the others are waiting there."""
        if time.monotonic() - self._met > _KEEP_UP_S:
            self._all_there(False)

    def meet(self) -> None:
        """Waits for all workers, however long it takes. All of them call it."""
        while not self._all_there(True):
            pass

    def _all_there(self, here: bool) -> bool:
        use_mode(False)
        seen = self._meeting(Tensor(np.array([here], np.float32))).asnumpy()
        self._met = time.monotonic()
        return bool(seen.all())

    def tell(self, kind: int, engine: int = 0, place: int = 0, arrays: Sequence[np.ndarray] = ()) -> None:
        """Rank 0: says it to all others. ``arrays``: the content, their bytes one behind the other."""
        record, room = self._record, self._record[_HEAD:].view(np.uint8)
        content = np.concatenate([room[:0], *(array.reshape(-1).view(np.uint8) for array in arrays)])
        record[:_HEAD] = kind, engine, place, content.size
        for at in range(0, max(content.size, 1), room.size):
            piece = content[at : at + room.size]
            room[: piece.size] = piece
            self._exchange()
        self._spoken.set()

    def hear(self) -> tuple[int, int, int, np.ndarray]:
        """The others: what rank 0 says next. content: uint8."""
        record = self._exchange()
        kind, engine, place, size = record[:_HEAD].tolist()
        pieces = [record[_HEAD:].view(np.uint8)]
        while sum(piece.size for piece in pieces) < size:
            pieces.append(self._exchange()[_HEAD:].view(np.uint8))
        return kind, engine, place, np.concatenate(pieces)[:size]

    def stop(self) -> None:
        """Rank 0, at the end of the program: lets the others go. They have nobody else to tell them."""
        if not self._over.is_set():
            self._over.set()
            if not self.failed:
                graph_thread().run(self.tell, STOP)

    def _exchange(self) -> np.ndarray:
        use_mode(False)
        try:
            heard: np.ndarray = self._broadcast(Tensor(self._record)).asnumpy()
        except BaseException:
            self.failed = True
            raise
        return heard

    def _keep_awake(self) -> None:
        """Has rank 0 say something where the program is busy with other things."""
        while not self._over.wait(_IDLE_S):
            if not self._spoken.is_set() and not self.failed:
                with suppress(Exception):  # the next call of the program tells
                    graph_thread().run(self._say_nothing)
            self._spoken.clear()

    def _say_nothing(self) -> None:
        if not self._over.is_set() and not self.failed:
            self.tell(IDLE)


_group: Group | None = None


def join() -> Group | None:
    """The workers of this process's job, once they all are there; None outside msrun, and for a single worker.

    On the graph thread, after :func:`ms_spec.runtime.setup_mindspore`. MindSpore joins a job once a process: later
    calls give the same group. In the scheduler's process it does not return before the workers have ended.
    """
    global _group
    here = world()
    if here is None or _group is not None:
        return _group
    from mindspore.communication import get_group_size, get_rank, init

    if here.rank is None:
        init()
        return None
    heartbeat = Heartbeat(os.environ.get(FOLDER), here.rank)
    init()
    if (get_rank(), get_group_size()) != (here.rank, here.size):
        raise RuntimeError(f"MindSpore counts this worker as {get_rank()} of {get_group_size()}, msrun as {here}")
    if here.size > 1:
        _group = Group(Shard(here.rank, here.size), heartbeat)
    return _group
