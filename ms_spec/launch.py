"""Starts a program on N workers and watches them: ``python -m ms_spec.launch N CONFIG.yaml|SCRIPT.py [arguments]``.

The processes and their environment are those of msrun. Rank 0 runs the program, the others and the scheduler run
:mod:`ms_spec.worker`. msrun notices a dead worker after most of a minute, and a hanging one never; so the processes are
started and watched here, and none of them outlives this one.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ms_spec.errors import ConfigError
from ms_spec.heartbeat import FOLDER
from ms_spec.watch import Job, Process, watch

EXIT_FAILURE, EXIT_MISTAKE = 1, 2
_HOST = "127.0.0.1"
_JOIN_S = 3600
"""How long workers wait for each other to start. The first may fetch a model first."""
_PR_SET_PDEATHSIG = 1
_CHATTER = re.compile(rb"\[INFO\] DISTRIBUTED\([^\n]*\n")
"""What MindSpore says when a worker leaves, whatever level of messages was asked for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: rank 0's, or 1 if another process failed."""
    parsed = _parser().parse_args(arguments)
    try:
        program = _program(parsed.program, parsed.arguments)
        if parsed.workers < 1:
            raise ConfigError(f"N = {parsed.workers}: must be at least 1")
        port = _port(parsed.port or os.environ.get("MS_SPEC_PORT"))
        logs = Path(parsed.log_dir)
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log-dir {logs}: {error.strerror}") from None
        return _run(program, parsed.workers, port, logs)
    except ConfigError as error:
        print(f"msrun_launch: error: {error}", file=sys.stderr)
        return EXIT_MISTAKE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="msrun_launch",
        description="Runs a program with tensor parallelism: rank 0's output comes here, logs go to a folder.",
        epilog="Environment: MS_SPEC_PORT is a default for --port, MS_SPEC_THREADS says how many threads each worker "
        "computes with (default: the cores, shared out).",
    )
    parser.add_argument("--port", help="the scheduler's port (default: a free one)")
    parser.add_argument("--log-dir", default="msrun_log", help="folder of the logs (default: %(default)s)")
    parser.add_argument("workers", metavar="N", type=int, help="how many workers: the program's tensor_parallel_size")
    parser.add_argument("program", metavar="CONFIG_OR_SCRIPT", help="a run file (.yaml) or a Python program (.py)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program gets")
    return parser


def _program(name: str, arguments: Sequence[str]) -> list[str]:
    """What rank 0 runs."""
    suffix = Path(name).suffix.lower()
    if suffix not in (".py", ".yaml", ".yml"):
        raise ConfigError(f"{name}: must be a run file (.yaml, .yml) or a Python program (.py)")
    if not Path(name).is_file():
        raise ConfigError(f"{name}: no such file")
    command = [name] if suffix == ".py" else ["-m", "ms_spec", "run", name]
    return [sys.executable, *command, *arguments]


def _port(given: str | None) -> int:
    """The port that was asked for, if nobody listens there; otherwise a free one."""
    if given is not None and not (given.isdecimal() and 1 <= int(given) <= 65535):
        raise ConfigError(f"port {given!r}: must be a number from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, int(given or 0)))
        except OSError as error:
            raise ConfigError(
                f"port {given} cannot be used ({error.strerror}); give another one, or none: a free one is found"
            ) from None
        port: int = probe.getsockname()[1]
    return port


def _run(program: Sequence[str], workers: int, port: int, logs: Path) -> int:
    beats = Path(tempfile.mkdtemp(prefix="ms-spec-beats-"))
    job = Job(beats, logs)
    before = {number: signal.signal(number, lambda number, _: _asked(job, number)) for number in _SIGNALS}
    try:
        common = _environment(workers, port, beats)
        serve = [sys.executable, "-m", "ms_spec.worker"]
        scheduler = {**common, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"}
        job.processes.append(_start("scheduler", serve, scheduler, logs / "scheduler.log"))
        for rank in range(workers):
            own = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank), "RANK_ID": str(rank), "DEVICE_ID": str(rank)}
            command = program if rank == 0 else serve
            log = logs / f"worker_{rank}.log"
            job.processes.append(_start(f"rank {rank}", command, {**common, **own}, log, shown=rank == 0))
        return watch(job)
    finally:
        job.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
        shutil.rmtree(beats, ignore_errors=True)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _asked(job: Job, number: int) -> None:
    """Ctrl-C goes to the program, which knows what to do with it; a second one, and other signals, end everything."""
    if number == signal.SIGINT and not job.interrupted:
        job.interrupted = True
        job.signal_first(number)
    else:
        job.ended_by = number


def _environment(workers: int, port: int, beats: Path) -> dict[str, str]:
    """What msrun sets for all processes, and what is ours."""
    threads = max(1, (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1) // workers)
    return {
        "MS_SPEC_THREADS": str(threads),
        **os.environ,
        "MS_WORKER_NUM": str(workers),
        "RANK_SIZE": str(workers),
        "MS_SCHED_HOST": _HOST,
        "MS_SCHED_PORT": str(port),
        "MS_TOPO_TIMEOUT": str(_JOIN_S),
        "PYTHONUNBUFFERED": "1",
        FOLDER: str(beats),
    }


def _start(name: str, command: Sequence[str], environment: dict[str, str], log: Path, shown: bool = False) -> Process:
    """Starts a process in a group of its own, which dies with this one.

    ``shown``: its stdout and stderr are the terminal's; the log gets a copy of stderr.
    """
    parent = os.getpid()

    def die_with_parent() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    stream = log.open("wb")
    # A process in the background cannot read from a terminal.
    stdin = None if shown and not (sys.stdin is None or sys.stdin.isatty()) else subprocess.DEVNULL
    outputs: dict[str, Any] = {"stdout": stream, "stderr": subprocess.STDOUT}
    if shown:
        outputs = {"stdout": None, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        command, env=environment, stdin=stdin, start_new_session=True, preexec_fn=die_with_parent, **outputs
    )
    if not shown:
        stream.close()
        return Process(name, process, log)
    assert process.stderr is not None
    copier = threading.Thread(target=_copy, args=(process.stderr, stream), daemon=True)
    copier.start()
    return Process(name, process, log, copier)


def _copy(source: IO[bytes], log: IO[bytes]) -> None:
    """To the terminal and to the log, as it comes."""
    terminal = getattr(sys.stderr, "buffer", None)
    with log:
        while True:
            content = os.read(source.fileno(), 1 << 16)
            if not content:
                return
            log.write(content)
            log.flush()
            if terminal is not None:
                with suppress(OSError, ValueError):
                    terminal.write(_CHATTER.sub(b"", content))
                    terminal.flush()


if __name__ == "__main__":
    sys.exit(main())
