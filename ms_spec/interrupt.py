"""Ctrl-C while graphs run.

MindSpore puts a handler of its own on SIGINT when a graph compiles or runs, and leaves it there; that one ends the
process with SIGTERM. So whoever waits for a graph blocks SIGINT and waits for the signal and the result together: a
thread that waits for a signal gets it past all handlers, and the main thread gets it first. It is raised again, for
whatever handler was there before (as a rule KeyboardInterrupt), when nothing would be left half done.

A main thread that blocks SIGINT and does not wait for it passes it on to threads of other libraries (OpenBLAS has
one), and there MindSpore's handler would run. So no graph starts before the main thread waits, and none ends before
the handler is the one from before.

A second Ctrl-C may come when the main thread has just taken the first. Then that handler does run, and sends SIGTERM.
So SIGTERM is caught as long as a block lasts, and takes its course unless there was a Ctrl-C before it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Callable

_AVAILABLE = hasattr(signal, "sigwaitinfo")
_WAKE: Any = getattr(signal, "SIGRTMAX", None)
_END: Any = _WAKE and _WAKE - 1
"""What a SIGTERM becomes in a block. Of several signals the one with the lowest number is taken first: Ctrl-C."""
_sigaction: Any = ctypes.PyDLL(None).sigaction if _AVAILABLE else None


def ignore_interrupts() -> None:
    """This thread, and those that it starts, are never the ones to get SIGINT."""
    if _AVAILABLE:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


@functools.cache
def _main_status(pid: int) -> int | None:
    """The kernel's account of a process's main thread, kept open; None where there is none to read."""
    with suppress(OSError):
        return os.open(f"/proc/{pid}/task/{pid}/status", os.O_RDONLY)
    return None


@contextmanager
def same_handler() -> Iterator[None]:
    """The handler of SIGINT when this ends is the one when it began. Unlike ``signal.signal``: on any thread."""
    if not _AVAILABLE:
        yield
        return
    before = ctypes.create_string_buffer(512)  # more than a struct sigaction takes anywhere
    _sigaction(signal.SIGINT, None, before)
    try:
        yield
    finally:
        _sigaction(signal.SIGINT, before, None)


class _HeldEnd:
    """The handler of SIGTERM in the outermost block: the main thread hears of it where it waits, or when that ends."""

    def __init__(self) -> None:
        self._waits = threading.get_ident()
        self._before = signal.signal(signal.SIGTERM, self)

    def __call__(self, *_: Any) -> None:
        signal.pthread_kill(self._waits, _END)

    def take_place(self) -> None:
        """As if nobody had held it."""
        signal.signal(signal.SIGTERM, self._before)
        signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self)

    def close(self) -> bool:
        """Puts the handler from before back. Whether there was one that nobody has taken."""
        signal.signal(signal.SIGTERM, self._before)
        return signal.sigtimedwait({_END}, 0) is not None


class HeldInterrupts:
    """A block that Ctrl-C does not cut in two: it takes effect where the block ends. Blocks may be nested.

    On other threads than the main one: the block only stays out of the signal's way.
    """

    def __init__(self) -> None:
        self._main = _AVAILABLE and threading.current_thread() is threading.main_thread()
        self._asked = False
        self._waits = False
        self._left = False
        self._before: Any = None
        self._end: Any = None
        self._outermost = False

    def __enter__(self) -> HeldInterrupts:
        if self._main and signal.getsignal(signal.SIGINT) is not None:  # None: not Python's, could not be put back
            self._before = signal.signal(signal.SIGINT, self._note)
        if _AVAILABLE:
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, _WAKE, _END})
        if self._before is not None:
            self._end = signal.getsignal(signal.SIGTERM)
            self._outermost = self._end is not None and not isinstance(self._end, _HeldEnd)
            if self._outermost:
                self._end = _HeldEnd()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = True
        ended = self._outermost and self._end.close() and not self._asked
        if _AVAILABLE:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if ended:
            signal.raise_signal(signal.SIGTERM)
        if self._asked:
            signal.raise_signal(signal.SIGINT)

    def _note(self, *_: Any) -> None:
        self._asked = self._before != signal.SIG_IGN

    def until_it_waits(self) -> None:
        """For the thread that does the work, before MindSpore gets it: until the main thread is inside :meth:`wait`.

        Costs nothing from the second time on, when it has seen it there.
        """
        if not self._main or self._waits:
            return
        status = _main_status(os.getpid())
        while status is not None and not self._left:
            blocked = os.pread(status, 4096, 0).partition(b"SigBlk:")[2].split(maxsplit=1)[0]
            if not int(blocked, 16) >> (signal.SIGINT - 1) & 1:  # a signal that is waited for does not count as blocked
                self._waits = True
                return
            time.sleep(0)

    def wait(self, future: Future, on_interrupt: Callable[[], None]) -> None:
        """Until the future is done, whatever happens. ``on_interrupt`` is called at Ctrl-C."""
        if not self._main:
            wait([future])
            return
        me = threading.get_ident()
        future.add_done_callback(lambda _: signal.pthread_kill(me, _WAKE))  # exactly one, and it is always taken
        failure: BaseException | None = None
        while True:
            try:
                number = signal.sigwaitinfo({signal.SIGINT, _WAKE, _END}).si_signo
                if number == _END:
                    if not self._asked:  # else it is MindSpore's answer to another Ctrl-C
                        self._end.take_place()
                    continue
                if number == _WAKE:
                    break
                self._note()
                if self._asked:
                    on_interrupt()
            except BaseException as error:  # by the handler of another signal
                failure = error
        if failure is not None:
            raise failure
