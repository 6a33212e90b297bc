"""Ctrl-C: it reaches the caller, between steps, and the process and the LLM live on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

# MindSpore's way: while a graph runs, the handler is its own and ends the process.
NATIVE = """
import ctypes, os, signal, threading, time
from ms_spec.interrupt import HeldInterrupts
from ms_spec.runtime import GraphThread

libc = ctypes.CDLL(None)
libc.signal.restype = ctypes.c_void_p
libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
graphs = GraphThread()

def graph(seconds=0.4):
    before = libc.signal(signal.SIGINT, 0)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(seconds)
    libc.signal(signal.SIGINT, before)
    done.append(1)
    return "result"

done = []
"""


@pytest.fixture(autouse=True)
def interruptible():
    """Who starts the tests in the background of a script starts them deaf to Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", NATIVE + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, cwd=TESTS, check=False, timeout=20, **options)


def succeeds(code: str) -> None:
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_keyboard_interrupt_comes_when_the_graph_has_ended() -> None:
    succeeds("""
        threading.Thread(target=threading.Event().wait, daemon=True).start()  # it might get the signal instead
        for _ in range(3):
            try:
                graphs.run(graph)
            except KeyboardInterrupt:
                assert done.pop() == 1
            else:
                raise AssertionError
        assert graphs.run(lambda: 3) == 3 and not done
    """)


def test_a_step_is_finished_before() -> None:
    succeeds("""
        got = []
        try:
            with HeldInterrupts():
                got.append(graphs.run(graph))
                got.append(graphs.run(lambda: 3))
        except KeyboardInterrupt:
            assert got == ["result", 3]
        else:
            raise AssertionError
    """)


def test_long_calls_end_early() -> None:
    succeeds("""
        def compile():
            graph()
            graphs.check()
            done.append(2)

        for _ in range(2):
            try:
                graphs.run(compile)
            except KeyboardInterrupt as error:
                assert done == [1] and error.__context__ is None
                done.clear()
        graphs.run(graphs.check)
    """)


def test_the_handler_in_place_decides() -> None:
    succeeds("""
        seen = []
        signal.signal(signal.SIGINT, lambda *_: seen.append(1))
        assert graphs.run(graph) == "result" and seen == [1]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert graphs.run(lambda: (graph(), graphs.check())) == ("result", None) and seen == [1]
        signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            graphs.run(graph)
        except ZeroDivisionError:
            assert done == [1, 1, 1]
    """)
    done = run("signal.signal(signal.SIGINT, signal.SIG_DFL); graphs.run(graph); print('not reached')")
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")


def test_other_threads_stay_out_of_its_way() -> None:
    succeeds("""
        other = threading.Thread(target=lambda: graphs.run(graph))
        try:
            with HeldInterrupts():
                other.start()
                other.join()
        except KeyboardInterrupt:
            assert done == [1]
        else:
            raise AssertionError
    """)


def test_a_second_one_does_not_end_the_process() -> None:
    """It finds the main thread busy with the first, and MindSpore's handler: that sends SIGTERM."""
    succeeds("""
        def twice():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            done.append(1)

        for _ in range(2):
            try:
                with HeldInterrupts():
                    graphs.run(twice)
            except KeyboardInterrupt:
                assert done.pop() == 1
            else:
                raise AssertionError
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    """)


def test_sigterm_is_not_held() -> None:
    ended = run("""
        def graph():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        with HeldInterrupts():
            graphs.run(graph)
    """)
    assert ended.returncode == -signal.SIGTERM
    succeeds("""
        def handler(*_):
            done.append("handled")
        signal.signal(signal.SIGTERM, handler)
        def graph():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
            done.append("ended")
        with HeldInterrupts():
            graphs.run(graph)
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("after it")
        assert done == ["handled", "ended", "after it", "handled"], done
        assert signal.getsignal(signal.SIGTERM) is handler
    """)


ENGINE = """
import os, subprocess, sys
import ms_spec

def interrupt(seconds):  # from outside, as a terminal does it
    subprocess.Popen(f"sleep {seconds}; kill -INT {os.getpid()}", shell=True)

params = ms_spec.SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
arguments = dict(model=sys.argv[1], max_num_seqs=2, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
"""

USED_ON = (
    ENGINE
    + """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()  # it might get the signal instead
llm = ms_spec.LLM(**arguments)
prompts = [[5, 6, 7], [8, 9]]
wanted = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
interrupted = 0
for number in range(40):
    try:
        interrupt(0.0007 * number)
        while True:
            llm.generate(prompts, params, use_tqdm=False)
    except KeyboardInterrupt:
        interrupted += 1
    assert not llm._engine.has_unfinished()
assert interrupted == 40
assert [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)] == wanted
print("used on")
interrupt(0.05)
while True:
    for _ in llm.stream(prompts, params):
        pass
"""
)

TWICE = (
    ENGINE
    + """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
llm = ms_spec.LLM(**arguments)
for number in range(30):
    try:
        try:
            delay = 0.0007 * number
            subprocess.Popen(f"sleep {delay}; kill -INT {os.getpid()}; kill -INT {os.getpid()}", shell=True)
            while True:
                llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
        except KeyboardInterrupt:
            threading.Event().wait(0.05)  # the second may come only now
    except KeyboardInterrupt:
        pass
print("used on")
interrupt(0.05)
while True:
    for _ in llm.stream([[5, 6, 7], [8, 9]], params):
        pass
"""
)

WHILE_IT_IS_MADE = (
    ENGINE
    + """
import mindspore, ms_spec.llm, ms_spec.runner  # takes seconds, and is interrupted like any import
before = ms_spec.runner.ModelRunner.warm_up
def warm_up(self, progress):
    interrupt(0.3)
    before(self, progress)
ms_spec.runner.ModelRunner.warm_up = warm_up
ms_spec.LLM(**arguments)
print("not reached")
"""
)


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        pytest.param(USED_ON, "used on\n", id="used"),
        pytest.param(USED_ON.replace("**arguments", "async_scheduling=True, **arguments"), "used on\n", id="ahead"),
        pytest.param(TWICE, "used on\n", id="twice"),
        pytest.param(WHILE_IT_IS_MADE, "", id="made"),
    ],
)
def test_an_interrupted_llm(code: str, printed: str) -> None:
    from tiny import tiny_model

    environment = {**os.environ, "GLOG_v": "3"}
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model())], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGINT, printed), done.stderr  # as Python ends by itself
    assert done.stderr.rstrip().endswith("KeyboardInterrupt") and "terminate called" not in done.stderr
    assert time.perf_counter() - begun < 60
