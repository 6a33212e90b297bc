"""Measures the process that it runs in: ``python -m benchmarks.child WHAT MODEL MAX_LEN`` prints one JSON object."""

from __future__ import annotations

import json
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

GB = 1e9


def status(field: str) -> int:
    """A size of this process in bytes: "VmRSS" (now) or "VmHWM" (the most so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """The peak is counted from here, where the kernel allows it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(model: str, max_len: int) -> dict[str, Any]:
    """One request that fills the context, with n-gram drafts."""
    from benchmarks.bench import Bench, greedy

    bench = Bench(model, [])
    new = 32
    with_drafts = bench.engine(drafts=4)
    ids = bench.text_ids(max_len - new)
    with_drafts.generate([ids], greedy(new), use_tqdm=False)
    return {"peak_gb": status("VmHWM") / GB, "prompt_tokens": len(ids), "new_tokens": new}


def loading_memory(model: str, max_len: int) -> dict[str, Any]:
    """Opens the checkpoint and loads its weights, as an engine does, with a KV cache of next to nothing."""
    import mindspore as ms

    forget_peak()
    start = status("VmRSS")
    from ms_spec.models.decoder import Decoder
    from ms_spec.models.floats import HELD
    from ms_spec.models.loading import load
    from ms_spec.models.ops import select
    from ms_spec.models.weights import load_weights

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    loaded = load(model)
    backend = select("cpu")
    target = Decoder(loaded.config, backend, 2, 16, 16, loaded.config.dtype)
    specs = target.weights()
    load_weights(specs, loaded.checkpoint, cache_key=backend.name)
    for parameter in {id(spec.parameter): spec.parameter for spec in specs}.values():
        parameter.asnumpy().reshape(-1)[::512].sum()  # a mapped file takes memory when it is read
    unique = {(id(spec.parameter), spec.part): spec for spec in specs}
    held = sum(math.prod(s.held_shape()) * HELD[s.dtype].itemsize for s in unique.values())
    return {"above_import_gb": (status("VmHWM") - start) / GB, "held_gb": held / GB, "import_gb": start / GB}


if __name__ == "__main__":
    print(json.dumps({"peak": peak_memory, "loading": loading_memory}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))))
