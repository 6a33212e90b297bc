"""What a process costs: time to its first token, and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bench import ROOT, Bench, ngram
from benchmarks.figures import Figure

LIMIT_S = 600


def first_token(bench: Bench) -> Iterator[Figure]:
    """The command line, from its start to the first character of its answer.

    Warm: the second start and later ones. Cold: with an empty cache folder, so that kernels are compiled, weights
    packed and the tokenizer built; only the model file is there (nothing is downloaded).
    """
    from ms_spec.models.user_cache import cache_root

    bench.loaded.tokenizer  # noqa: B018  (fetches the model, where it has to be fetched)
    config = {"max_num_seqs": 1, "speculative_config": ngram(4)}
    _start(bench.model, None)
    warm = []
    for turn in range(bench.times(5)):
        bench.say(f"first token, warm: start {turn + 1} of {bench.times(5)}")
        warm.append(_start(bench.model, None))
    yield Figure("first_token_warm", median(warm), {"seconds": [round(s, 2) for s in warm]}, config)
    cold = []
    for turn in range(1 if bench.quick else 3):
        bench.say(f"first token, cold: start {turn + 1}")
        with tempfile.TemporaryDirectory(prefix="ms-spec-cold-") as folder:
            models = cache_root() / "models"
            if models.is_dir():
                (Path(folder) / "models").symlink_to(models, target_is_directory=True)
            cold.append(_start(bench.model, folder))
    yield Figure("first_token_cold", median(cold), {"seconds": [round(s, 2) for s in cold]}, config)


def _start(model: str, cache: str | None) -> float:
    """Seconds from the start of the process to the first byte of its answer."""
    command = [sys.executable, "-m", "ms_spec", "generate", "--model", model, "--prompt", "The sea is", "--max-tokens"]
    command += ["8", "--max-num-seqs", "1", "--speculative-config", json.dumps(ngram(4))]
    environment = {**os.environ, **({"MS_SPEC_CACHE": cache} if cache else {})}
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=ROOT)
        try:
            assert process.stdout is not None
            first = os.read(process.stdout.fileno(), 1)
            seconds = time.perf_counter() - start
            process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
        if process.returncode or not first:
            errors.seek(0)
            raise RuntimeError(f"ms-spec generate failed: {errors.read().decode(errors='replace')[-500:]}")
    return seconds


def memory(bench: Bench) -> Iterator[Figure]:
    """VmHWM of processes of their own: the most memory that was resident, mapped files included."""
    bench.say("peak memory of a process")
    peak = _child("peak", bench)
    yield Figure("peak_memory", peak["peak_gb"], peak, bench.engine_args(4))
    bench.say("memory while loading")
    packed = _child("loading", bench)
    with tempfile.TemporaryDirectory(prefix="ms-spec-cold-") as folder:
        from ms_spec.models.user_cache import cache_root

        for name in ("models", "kernels"):
            if (cache_root() / name).is_dir():
                (Path(folder) / name).symlink_to(cache_root() / name, target_is_directory=True)
        packing = _child("loading", bench, folder)
    shares = {
        name: round(one["above_import_gb"] / one["held_gb"], 3)
        for name, one in (("packed", packed), ("packing", packing))
    }
    yield Figure("loading_memory", max(shares.values()), {"ratios": shares, **packing}, {"model": bench.model})


def _child(what: str, bench: Bench, cache: str | None = None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.child", what, bench.model, str(bench.max_len)]
    environment = {**os.environ, **({"MS_SPEC_CACHE": cache} if cache else {})}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stderr.strip()[-500:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
