"""MindSpore's process-wide state, set in one place, and the one thread that runs graphs.

Two threads inside MindSpore graphs at once deadlock the process, compiling included. So every ``LLM`` of a process
shares one thread, and everybody else hands it work by queue.

Who wants to do something while a graph runs does it on a thread of its own: the main one has to wait (see
:mod:`ms_spec.interrupt`).
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from concurrent.futures import Future
from typing import Any, Callable, TypeVar

from ms_spec.errors import EngineError
from ms_spec.interrupt import HeldInterrupts, ignore_interrupts, same_handler

T = TypeVar("T")


class Call(Future):
    """A queued call and its result."""

    unwanted = False
    """Whoever waits for it was interrupted."""

    def __init__(self, held: HeldInterrupts) -> None:
        super().__init__()
        self.held = held

    def give_up(self) -> None:
        """Asks it to end early."""
        self.unwanted = True


class WorkThread:
    """Runs callables one after another on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Call, Callable, tuple, dict]] = queue.SimpleQueue()
        self._running: Call | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls ``function`` on the thread and waits for its result. From that thread itself: calls it.

        KeyboardInterrupt comes when the call has ended; see :meth:`check`.

        Raises:
            EngineError: in a forked process, if MindSpore was in use before.
        """
        if _inherited:
            raise EngineError(
                "MindSpore was in use before this process was forked, and would hang here; start processes with "
                "multiprocessing's 'spawn' method, and make the LLM in them"
            )
        if threading.current_thread() is self._thread:
            return function(*args, **kwargs)
        with HeldInterrupts() as held:
            call = Call(held)
            self._work.put((call, function, args, kwargs))
            held.wait(call, call.give_up)
        return call.result()

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Has ``function`` called after what it was given before, without waiting for it. Only inside a call of another
        WorkThread, which has to wait for it before it ends: whoever waits for that one waits for this one, too.
        """
        call = Call(_here.call.held)
        self._work.put((call, function, args, {}))
        return call

    def check(self) -> None:
        """For long calls, to ask now and then: raises KeyboardInterrupt if nobody wants their result any more."""
        if self._interrupted():
            raise KeyboardInterrupt

    def may_go_on(self) -> bool:
        """For calls that can end at any time, to ask now and then: whether they are still wanted, and none waits."""
        return self._work.empty() and not self._interrupted()

    def _interrupted(self) -> bool:
        return self._running is not None and self._running.unwanted

    def _loop(self) -> None:
        ignore_interrupts()
        while True:
            call, function, args, kwargs = self._work.get()
            self._running = _here.call = call
            try:
                call.held.until_it_waits()
                result = self._call(function, *args, **kwargs)
            except BaseException as error:
                call.set_exception(error)
            else:
                call.set_result(result)
                del result
            self._running = _here.call = None
            del call, function, args, kwargs  # an idle thread must not keep a dropped LLM alive

    def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return function(*args, **kwargs)


class GraphThread(WorkThread):
    """The one that MindSpore's graphs run on."""

    def __init__(self) -> None:
        super().__init__("ms-spec-graphs")

    def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        with same_handler():
            return function(*args, **kwargs)


_here = threading.local()
"""``call``: the one that a WorkThread is busy with, on that thread."""
_thread: GraphThread | None = None
_planner: WorkThread | None = None
_lock = threading.Lock()
_in_use = _inherited = False
"""Whether MindSpore has been set up in this process; whether it was in the one that this was forked from."""


def graph_thread() -> GraphThread:
    """The process's graph thread, started at first use (and anew in a forked child)."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = GraphThread()
        return _thread


def plan_thread() -> WorkThread:
    """The thread of engines that plan while a graph runs, started at first use. It waits for all graphs it submits."""
    global _planner
    with _lock:
        if _planner is None:
            _planner = WorkThread("ms-spec-plans")
        return _planner


def _forget_thread() -> None:
    global _thread, _planner, _lock, _inherited
    _thread, _planner, _lock, _inherited = None, None, threading.Lock(), _inherited or _in_use


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_thread)


def use_mode(eager: bool) -> None:
    """Switches the process between compiled graphs and PyNative, where it is not there already."""
    import mindspore as ms

    wanted = ms.PYNATIVE_MODE if eager else ms.GRAPH_MODE
    if ms.get_context("mode") != wanted:
        ms.set_context(mode=wanted)


def caches_in_place() -> None:
    """Has the graphs of Ascend read caches where they are. Call it before MindSpore compiles the process's first graph.

    By default MindSpore copies a parameter that a graph reads more than once, and so the whole cache of a drafter for
    each of its passes. The copies are for graphs that write to it before they are done with what they have read; ours
    never do.
    """
    os.environ.setdefault("MS_DEV_SIDE_EFFECT_LOAD_ELIM", "3")


def _check_protobuf() -> None:
    """MindSpore's import fails with protobuf's own kind of messages, and then takes the process down."""
    api = sys.modules.get("google.protobuf.internal.api_implementation")
    if "mindspore" not in sys.modules and api is not None and api.Type() == "upb":
        raise ValueError(
            "protobuf: imported before MindSpore, in a form that MindSpore cannot use; import mindspore first, or set "
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python in the environment"
        )


def setup_mindspore(device: str, eager: bool = False) -> None:
    """Imports MindSpore and sets what it keeps per process: device, mode, quiet logs. Call it on the graph thread.

    Args:
        device: "cpu" or "ascend".
        eager: run operator by operator (PyNative) instead of compiled graphs.

    Raises:
        ValueError: MindSpore is not installed, or cannot use the device on this machine.
    """
    global _in_use
    os.environ.setdefault("GLOG_v", "3")  # errors only; must be set before the import
    _check_protobuf()
    _in_use = True
    try:
        import mindspore as ms
    except ImportError as error:
        raise ValueError(
            f"mindspore: not importable ({error}); install it with: pip install 'mindspore>=2.9,<2.11'"
        ) from None
    target = {"cpu": "CPU", "ascend": "Ascend"}[device]
    try:
        # Once it has run something, MindSpore refuses even to be told what it already knows.
        if ms.get_context("device_target") != target or device == "ascend":
            ms.set_device(target)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"device: {device!r} cannot be used on this machine ({reason}); use device='cpu'") from None
    use_mode(eager)
    if device == "ascend":
        caches_in_place()
        # The kernels behind ReshapeAndCache exist only for graphs launched kernel by kernel with inference boost.
        ms.set_context(jit_config={"jit_level": "O0", "infer_boost": "on"})
