"""Which process of an msrun job this is, from the environment alone. Imports no MindSpore.

A job has a scheduler, which only helps the workers to find each other, and workers of rank 0, 1, ... Rank 0 is the one
that runs the user's program; the others do what it says (:mod:`ms_spec.worker`).
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from ms_spec.errors import ConfigError

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "msrun_launch.sh"


@dataclass(frozen=True)
class World:
    """rank: of this worker; None: it is the scheduler. size: how many workers there are."""

    rank: int | None
    size: int


def world() -> World | None:
    """The job that this process belongs to; None outside msrun. ConfigError if msrun has given it no rank."""
    role, size = os.environ.get("MS_ROLE"), os.environ.get("MS_WORKER_NUM", "")
    if role not in ("MS_SCHED", "MS_WORKER") or not size.isdecimal():
        return None
    if role == "MS_SCHED":
        return World(None, int(size))
    rank = os.environ.get("RANK_ID", "")
    if not rank.isdecimal():
        raise ConfigError("RANK_ID is not set for this worker; start msrun with --node_rank on every machine")
    return World(int(rank), int(size))


def leads() -> bool:
    """Whether this process runs the user's program: alone, or as rank 0 of a job."""
    here = world()
    return here is None or here.rank == 0


def check_world(tensor_parallel_size: int) -> None:
    """Raises ConfigError, with the command to run, unless this process is one of so many workers."""
    here, size = world(), tensor_parallel_size
    if here is None and size > 1:
        raise ConfigError(
            f"tensor_parallel_size = {size}: needs {size} processes, and this is one alone; start it with: "
            f"{launch_command(size)}"
        )
    if here is not None and here.size != size:
        raise ConfigError(
            f"tensor_parallel_size = {size}: this job has {here.size} worker{'s' * (here.size > 1)}; use "
            f"tensor_parallel_size = {here.size}, or start it with: {launch_command(size)}"
        )


def launch_command(size: int) -> str:
    """What to type to run this program with ``size`` workers."""
    program = [*sys.argv] or [""]
    if Path(program[0]).name in ("ms-spec", "__main__.py") and program[1:2] == ["run"]:
        program = program[2:]
    elif not program[0].endswith(".py"):  # typed in, or a command that has no file of its own
        program = ["SCRIPT.py"]
    return shlex.join([*_launcher(), str(size), *program])


def _launcher() -> list[str]:
    if not SCRIPT.is_file():
        return ["python", "-m", "ms_spec.launch"]
    try:
        return ["bash", str(SCRIPT.relative_to(Path.cwd()))]
    except (ValueError, OSError):
        return ["bash", str(SCRIPT)]
