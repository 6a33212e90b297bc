"""Tests run side by side, in as many processes as the machine has cores."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads of kernels spin for their next one: two pools on the same cores take far more than twice as long as one.
    os.environ.setdefault("MS_SPEC_THREADS", "1")
