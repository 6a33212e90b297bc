"""Two and four workers under msrun compute what one process computes, and speculation changes nothing there either."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_drafts as td
from forward import Forward
from tiny import new_folder, tiny_model

from ms_spec.heartbeat import FOLDER, path_of, read_beat

LOUD = (17, 40, 90)
HERE = Path(__file__).resolve().parent
SIZES = {"max_model_len": 128, "max_num_batched_tokens": 64, "generation_config": "vllm"}
ALLOWED = [4, 5, 60, 100, 126]
PROMPTS = [[5, 9, 5, 9, 5], [7, 11, 13, 7, 11, 13, 7], list(range(20, 50)), [3]]


@functools.cache
def target(family: str) -> Path:
    """Biases and 2 key heads (fewer than 4 workers), or norms of heads and embeddings that are the output matrix.

    127 tokens: no number of workers divides them.
    """
    if family == "llama":
        return td.target(loud=LOUD, layers=2, vocab=127, bias=True, mlp_bias=True)
    return tiny_model("qwen3", kv_heads=4, tie=True, vocab=127)


def engines(workers: int) -> dict[str, dict[str, Any]]:
    common = {"tensor_parallel_size": workers, "max_num_seqs": 1, **SIZES}

    def drafting(method: str, model: Path | None = None, **fields: Any) -> dict[str, Any]:
        given = {"method": method, "num_speculative_tokens": 2, **fields}
        return {"speculative_config": given if model is None else {**given, "model": str(model)}}

    lookup = drafting("ngram", prompt_lookup_min=1, prompt_lookup_max=3)
    eagle3 = td.eagle3(vocab=127, loud=LOUD, draft_vocab=None, aux_ids=[0, 1, 2])
    llama = {
        "plain": {},
        "ngram": {**lookup, "max_num_seqs": 4 // workers, "async_scheduling": True},
        "eagle3": drafting("eagle3", eagle3),
        "eagle3 shared out": drafting("eagle3", eagle3, draft_tensor_parallel_size=workers),
        "draft_model": {**drafting("draft_model", target("llama")), "async_scheduling": True},
    }
    cases = {("llama", name): extra for name, extra in llama.items()}
    cases.update({("qwen3", "plain"): {}, ("qwen3", "ngram"): lookup})
    return {f"{f} {n}": {"model": str(target(f)), **common, **extra} for (f, n), extra in cases.items()}


@functools.cache
def job(workers: int) -> tuple[Path, dict[str, Any]]:
    """Runs ``parallel_job.py`` under msrun itself. Returns its folder and its texts."""
    folder = new_folder()
    logits = [(str(target(family)), PROMPTS[2]) for family in ("llama", "qwen3")]
    plan = {"logits": logits, "engines": engines(workers), "prompts": PROMPTS, "max_tokens": 24, "allowed": ALLOWED}
    (folder / "plan.json").write_text(json.dumps(plan))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = {"worker_num": workers, "local_worker_num": workers, "master_port": port, "log_dir": folder, "join": True}
    arguments = [f"--{name}={value}" for name, value in {**options, "cluster_time_out": 60}.items()]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mindspore.parallel.cluster.run",
            *arguments,
            str(HERE / "parallel_job.py"),
            str(folder),
        ],
        env={**os.environ, "PATH": path, "MS_SPEC_THREADS": "1", FOLDER: str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder, json.loads((folder / "texts.json").read_text())


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("number, family", enumerate(("llama", "qwen3")))
def test_logits(workers, number, family):
    folder, _ = job(workers)
    ids = np.array([PROMPTS[2]])
    wanted = Forward(target(family)).grid(ids, np.zeros(1), np.zeros(1, int))[0]
    each = [np.load(folder / f"logits_{number}_{rank}.npy") for rank in range(workers)]
    assert np.abs(each[0] - wanted).max() < 1e-4
    assert np.abs(wanted).max() > 1
    assert all(np.array_equal(each[0], other) for other in each)


@pytest.mark.parametrize("workers", [2, 4])
def test_greedy_text_is_that_of_plain_decoding(workers):
    _, texts = job(workers)
    for name, text in texts.items():
        family = name.split()[0]
        assert text["errors"] == [None] * len(PROMPTS)
        assert text["ids"] == texts[f"{family} plain"]["ids"], name
        assert text["sampled"] == texts[f"{family} plain"]["sampled"], name
        assert text["shaped"] == texts[f"{family} plain"]["shaped"], name
        assert set(text["shaped"]) <= set(ALLOWED) and len(set(text["shaped"])) > 1, name
        if "plain" not in name:
            assert 5 < text["accepted"] <= text["drafted"], name
    assert len({tuple(ids) for ids in texts["qwen3 plain"]["ids"]}) == len(PROMPTS)
    shared, whole = (texts[f"llama eagle3{how}"] for how in (" shared out", ""))
    assert shared["accepted"] == whole["accepted"]


@pytest.mark.parametrize("workers", [2, 4])
def test_all_workers_have_computed_the_same(workers):
    """Also where a request has wishes of its own, which lie on each worker."""
    folder, _ = job(workers)
    beats = [read_beat(path_of(folder, rank)) for rank in range(workers)]
    assert all(beat is not None and beat[0] == beats[0][0] for beat in beats)
    assert beats[0][0].ended > 100


@pytest.mark.parametrize("workers", [2, 4])
def test_only_rank_0_comes_back(workers):
    folder, texts = job(workers)
    assert (folder / "came").read_text() == "0\n" * len(texts)
