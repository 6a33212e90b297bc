"""Ctrl-C while graphs run.

MindSpore puts a handler of its own on SIGINT for as long as a graph compiles or runs, and that one ends the process
with SIGTERM. So SIGINT is blocked, a thread waits for it, and passes it on to the main thread as another signal.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def _raise(*_: Any) -> None:
    raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """KeyboardInterrupt at Ctrl-C inside this block, whatever runs. Threads that are to be left alone start inside it.

    Does nothing outside the main thread, or where the system has no such signals.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "sigtimedwait"):
        yield
        return
    main = threading.get_ident()
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if signal.sigtimedwait({signal.SIGINT}, 0.2) and not over.is_set():
                signal.pthread_kill(main, signal.SIGUSR2)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGUSR2, _raise)
    thread = threading.Thread(target=watch, name="ms-spec-interrupt", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR2, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
