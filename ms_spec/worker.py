"""What all processes of an msrun job do but rank 0's: ``python -m ms_spec.worker``, or ``LLM(...)`` in a program."""

from __future__ import annotations

from typing import NoReturn

from ms_spec.runtime import graph_thread, setup_mindspore
from ms_spec.world import world


def serve(device: str) -> NoReturn:
    """Serves until the job is over, then ends the process. ``device``: "cpu" or "ascend"."""
    here = world()
    assert here is not None
    graph_thread().run(_serve, "cpu" if here.rank is None else device)
    raise SystemExit(0)


def _serve(device: str) -> None:
    setup_mindspore(device)
    from ms_spec.group import join
    from ms_spec.parallel_runner import follow

    group = join()
    if group is not None:
        follow(group)


def main() -> NoReturn:
    """Serves the job that msrun, or :mod:`ms_spec.launch`, has started this process for."""
    from ms_spec.config import EngineConfig
    from ms_spec.limits import device_of

    serve(device_of(EngineConfig.parse()))


if __name__ == "__main__":
    main()
