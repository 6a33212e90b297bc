"""Tests may run in processes side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads of kernels spin for their next one: two pools on the same cores take far more than twice as long as one.
    os.environ.setdefault("MS_SPEC_THREADS", "1")


@pytest.fixture(scope="module", params=["plain", "fused"])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    """The operations of sampling, verifying and looking up: those for every device, and those for CPU."""
    import mindspore as ms

    from ms_spec.models.ops import plain_sampling
    from ms_spec.models.ops.cpu import sampling

    ms.set_context(mode=ms.GRAPH_MODE)
    return plain_sampling if request.param == "plain" else sampling


@pytest.fixture
def eager() -> Iterator[None]:
    """Operator by operator: the emulators compute on the host."""
    from ms_spec.runtime import use_mode

    use_mode(True)
    yield
    use_mode(False)
