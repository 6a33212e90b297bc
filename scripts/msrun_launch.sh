#!/usr/bin/env bash
# Runs a run file or a Python program with tensor parallelism, on N workers of this machine:
#
#   bash scripts/msrun_launch.sh N CONFIG.yaml [KEY=VALUE ...]
#   bash scripts/msrun_launch.sh N SCRIPT.py [ARGUMENT ...]
#
# Options stand before N: --port PORT, --log-dir FOLDER. See docs/parallel.md.
if [ -z "$PYTHON" ]; then
    own="$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python"
    PYTHON=python
    if [ -z "$VIRTUAL_ENV" ] && [ -x "$own" ]; then
        PYTHON=$own
    fi
fi
exec "$PYTHON" -m ms_spec.launch "$@"
