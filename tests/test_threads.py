"""The number of threads that share a kernel's work changes no bit of what it computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPUTED = """
import hashlib
import numpy as np
from engines import copying_model, llm
from forward import Forward
from ms_spec import SamplingParams

ids = np.random.default_rng(0).integers(3, 160, 101)
for dtype in ("float32", "bfloat16"):
    logits = Forward(copying_model(), "cpu", dtype).run(ids, [64, 16, 16, 5], width=64)
    assert np.isfinite(logits).all()
    print(hashlib.sha256(logits.tobytes()).hexdigest())
sampling = [SamplingParams(temperature=t, seed=s, max_tokens=60, ignore_eos=True) for s, t in enumerate((0, 0, 0.8, 1))]
prompts = [ids[:n].tolist() for n in (5, 17, 70, 40)]
for one in llm(copying_model(), k=4, max_num_seqs=4).generate(prompts, sampling, use_tqdm=False):
    print(one.outputs[0].token_ids)
"""


def computed(threads: int) -> str:
    environment = {**os.environ, "MS_SPEC_THREADS": str(threads), "GLOG_v": "3"}
    folder = Path(__file__).resolve().parent
    done = subprocess.run(
        [sys.executable, "-c", COMPUTED], capture_output=True, text=True, env=environment, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def alone() -> str:
    return computed(1)


@pytest.mark.parametrize("threads", [2, 5])
def test_any_number_of_threads(alone: str, threads: int) -> None:
    assert computed(threads) == alone and len(alone.splitlines()) == 6
