"""The entry point: ``ms-spec``, and ``python -m ms_spec``."""

from __future__ import annotations

import signal


def main() -> None:
    """Runs the command line."""
    # Ctrl-C while modules are imported: the process ends, without a trace of where it was.
    python_handles_it = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if python_handles_it:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ms_spec import cli

    if python_handles_it:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
