"""Watches the processes of a job, and ends all of them when one has died, hangs, or computes something else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ms_spec.heartbeat import Beat, path_of, read_beat

POLL_S = 0.2
SILENT_S = 25.0
"""So long a process may not have been heard of: it lives, but does not run."""
BEHIND_S = 30.0
"""So long a worker may not have begun a graph call that another has begun."""
LEAVE_S = 20.0
"""So long the others may take to end after rank 0 has ended."""
_SETTLE_S = 1.0
EXIT_FAILURE = 1


@dataclass
class Process:
    """A process of a job. name: "scheduler", or "rank 0" and so on."""

    name: str
    process: subprocess.Popen
    log: Path
    copier: threading.Thread | None = None

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()

    def fate(self) -> str:
        """How it has ended."""
        code = self.process.returncode
        if code < 0:
            with suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def last_error(self) -> str:
        """The last line of its log that tells of an error, or the last line; "" for an empty log."""
        if self.copier is not None:
            self.copier.join(1)
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        lines = [line.strip() for line in lines if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b|.*\berror:", line)]
        return (errors or lines or [""])[-1][:300]


@dataclass
class Job:
    """The scheduler, then the workers in the order of their ranks. beats: folder of the heartbeats."""

    beats: Path
    logs: Path
    processes: list[Process] = field(default_factory=list)
    interrupted: bool = False
    ended_by: int = 0
    """A signal that asks for the end of everything."""
    over: bool = False

    @property
    def workers(self) -> list[Process]:
        """In the order of their ranks."""
        return self.processes[1:]

    def signal_first(self, number: int) -> None:
        """Sends a signal to rank 0."""
        if self.workers:
            _send(self.workers[0], number)

    def kill(self) -> None:
        """Ends all processes, and what they have started."""
        if self.over:
            return
        self.over = True
        for process in self.processes:
            _send(process, signal.SIGKILL)
        for process in self.processes:
            process.process.wait()


def _send(process: Process, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.process.pid, number)


def watch(job: Job) -> int:
    """Waits for the end. Returns the exit code, after one line on stderr if it is not rank 0's own."""
    look = _Look(job)
    first = job.workers[0]
    while True:
        if job.ended_by:
            return 128 + job.ended_by
        code = first.code
        if code is not None:
            if code == 0:
                _let_leave(job)
                return 0
            if code < 0:
                return _failed(job, f"{first.name} {first.fate()}")
            # Its own words stand on the terminal already.
            return code if job.interrupted else _failed(job, f"{first.name} {first.fate()}", code)
        dead = [process for process in job.processes if process.code not in (None, 0)]
        if dead:
            fates = [f"{one.name} {one.fate()}" for one in dead]
            error = dead[0].last_error()
            told = f"{fates[0]}: {error}" if error and dead[0].process.returncode > 0 else fates[0]
            _settle(first)
            return _failed(job, told)
        trouble = look.trouble()
        if trouble:
            return _failed(job, trouble)
        time.sleep(POLL_S)


def _settle(first: Process) -> None:
    """What ended another process may end rank 0 too: it may say why."""
    with suppress(subprocess.TimeoutExpired):
        first.process.wait(_SETTLE_S)


def _failed(job: Job, what: str, code: int = EXIT_FAILURE) -> int:
    job.kill()
    first = job.workers[0]
    if first.copier is not None:
        first.copier.join(1)
    print(f"msrun_launch: error: {what}; all workers have been ended, their logs are in {job.logs}", file=sys.stderr)
    return code


def _let_leave(job: Job) -> None:
    """After rank 0's end: the others have been told, if there was somebody to tell them."""
    end = time.monotonic() + LEAVE_S
    if not all(read_beat(path_of(job.beats, rank)) for rank in range(len(job.workers))):
        return  # the program has used no workers
    while time.monotonic() < end and not job.ended_by and any(one.code is None for one in job.workers):
        time.sleep(POLL_S)


class _Look:
    """What the heartbeats tell."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._behind: dict[int, tuple[int, float]] = {}
        self._alive: dict[int, tuple[object, float]] = {}

    def trouble(self) -> str | None:
        """A worker that hangs or has gone its own way, None if there is none."""
        names = [process.name for process in self._job.workers]
        seen = {rank: read_beat(path_of(self._job.beats, rank)) for rank in range(len(names))}
        beats = {rank: one for rank, one in seen.items() if one is not None}
        return self._silent(names, beats) or self._laggard(names, beats) or self._stray(names, beats)

    def _silent(self, names: list[str], beats: dict[int, tuple[Beat, float]]) -> str | None:
        """Neither its file's time moves on, nor the processor time that it has taken.

        While the workers wait for each other to start, MindSpore lets none of their threads run.
        """
        for rank, (beat, written) in beats.items():
            if not beat.begun:
                continue
            sign = written, _cpu_ticks(self._job.workers[rank].process.pid)
            before, since = self._alive.get(rank, (None, 0.0))
            if sign != before:
                self._alive[rank] = (sign, time.monotonic())
            elif time.monotonic() - since > SILENT_S:
                return f"{names[rank]} hangs: it has not moved for {SILENT_S:.0f} s"
        return None

    def _laggard(self, names: list[str], beats: dict[int, tuple[Beat, float]]) -> str | None:
        furthest = max((beat.begun for beat, _ in beats.values()), default=0)
        for rank, (beat, _) in beats.items():
            if beat.begun == furthest:
                self._behind.pop(rank, None)
                continue
            begun, since = self._behind.get(rank, (-1, 0.0))
            if begun != beat.begun:
                self._behind[rank] = (beat.begun, time.monotonic())
            elif time.monotonic() - since > BEHIND_S:
                return f"{names[rank]} hangs: it has not begun graph call {beat.begun + 1}, which others have begun"
        return None

    def _stray(self, names: list[str], beats: dict[int, tuple[Beat, float]]) -> str | None:
        """Checksums after as many calls, seen of two workers, must be the same."""
        sums: dict[int, tuple[int, int]] = {}
        for rank, (beat, _) in beats.items():
            for calls, value in beat.sums.items():
                other, expected = sums.setdefault(calls, (rank, value))
                if value != expected:
                    return (
                        f"{names[rank]} diverges: after {calls} graph calls its results are not those of {names[other]}"
                    )
        return None


def _cpu_ticks(pid: int) -> int:
    """Processor time of a process, 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return 0
