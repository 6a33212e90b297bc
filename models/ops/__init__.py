"""Device operations, and which of their backends to use."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ms_spec.models.ops.interface import Backend

BACKENDS = ("cpu", "reference", "ascend")
_log = logging.getLogger("ms_spec")


def select(device: str) -> Backend:
    """The operations for ``device`` ("cpu" or "ascend"), or those that ``MS_SPEC_OPS`` names.

    Raises:
        ValueError: ``MS_SPEC_OPS`` names no backend, or one for another device.
    """
    name = os.environ.get("MS_SPEC_OPS", "").lower() or device.lower()
    if name not in BACKENDS:
        raise ValueError(f"MS_SPEC_OPS: {name!r} is no backend; allowed: {', '.join(BACKENDS)}")
    if name not in ("reference", device.lower()):
        raise ValueError(
            f"MS_SPEC_OPS: the {name!r} operations do not run on device {device!r}; use 'reference', or unset it"
            + (" (ms_spec.export writes Ascend graphs on any machine)" if name == "ascend" else "")
        )
    if name == "ascend":
        from ms_spec.models.ops.ascend import AscendOps

        return AscendOps()
    if name == "cpu":
        from ms_spec.models.ops.cpu import CpuOps, NoCompiler

        try:
            return CpuOps()
        except NoCompiler as error:
            _log.warning("fused CPU kernels are not available (%s): running the slow plain operations", error)
    from ms_spec.models.ops.reference import ReferenceOps

    return ReferenceOps()
