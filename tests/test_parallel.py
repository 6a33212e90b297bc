"""Two to four workers under msrun compute what one process computes, and speculation changes nothing there either."""

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
from ms_spec.models.sources import resolve

LOUD = (17, 40, 90)
HERE = Path(__file__).resolve().parent
SIZES = {"max_model_len": 128, "max_num_batched_tokens": 64, "generation_config": "vllm"}
ALLOWED = [4, 5, 60, 100, 126]
PROMPTS = [[5, 9, 5, 9, 5], [7, 11, 13, 7, 11, 13, 7], list(range(20, 50)), [3]]


FAMILIES = ("llama", "qwen3", "tied")
SMOLLM2, SOME = "smollm2-135m", list(range(1000, 1016))
TEXT = "Red, green, blue, red, green, blue, red, green,"


@functools.cache
def target(family: str) -> Path:
    """Llama with biases and Qwen3, both with 2 key heads (fewer than 4 workers); "tied": Qwen3 with a key head for each
    of 4 workers, whose embeddings are the output matrix.

    127 tokens: no number of workers divides them.
    """
    if family == "tied":
        return tiny_model("qwen3", kv_heads=4, tie=True, vocab=127)
    biases = {"bias": True, "mlp_bias": True} if family == "llama" else {}
    return td.target(family, loud=LOUD, layers=2, vocab=127, **biases)


def drafting(method: str, model: Path | None = None, **fields: Any) -> dict[str, Any]:
    given = {"method": method, "num_speculative_tokens": 2, **fields}
    return {"speculative_config": given if model is None else {**given, "model": str(model)}}


def engines(workers: int) -> dict[str, dict[str, Any]]:
    common = {"tensor_parallel_size": workers, "max_num_seqs": 1, **SIZES}
    lookup = drafting("ngram", prompt_lookup_min=1, prompt_lookup_max=3)
    eagle3 = td.eagle3(vocab=127, loud=LOUD, draft_vocab=None, aux_ids=[0, 1, 2])
    shared: dict[str, Any] = {"draft_tensor_parallel_size": workers}
    both: dict[str, Any] = {
        "plain": {},
        "eagle3": drafting("eagle3", eagle3),
        "eagle3 shared out": drafting("eagle3", eagle3, **shared),
    }
    cases = {(family, name): extra for family in ("llama", "qwen3") for name, extra in both.items()}
    cases["llama", "ngram"] = {**lookup, "max_num_seqs": 4 // workers, "async_scheduling": True}
    cases["llama", "draft_model"] = {**drafting("draft_model", target("llama")), "async_scheduling": True}
    cases["qwen3", "draft_model shared out"] = drafting("draft_model", target("qwen3"), **shared)
    cases.update({("tied", "plain"): {}, ("tied", "ngram"): lookup})
    return {f"{f} {n}": {"model": str(target(f)), **common, **extra} for (f, n), extra in cases.items()}


@functools.cache
def job(workers: int) -> tuple[Path, dict[str, Any]]:
    """Tiny models of all families."""
    logits = [(str(target(family)), PROMPTS[2]) for family in FAMILIES]
    plan = {"logits": logits, "engines": engines(workers), "prompts": PROMPTS, "max_tokens": 24, "allowed": ALLOWED}
    return run(workers, plan)


@functools.cache
def smollm2() -> tuple[Path, dict[str, Any]]:
    """9 query and 3 key heads, which three workers can share."""
    resolve(SMOLLM2)  # fetched here, not by each worker
    lookup = drafting("ngram", prompt_lookup_min=1, prompt_lookup_max=3)
    engine = {"model": SMOLLM2, "tensor_parallel_size": 3, "max_num_seqs": 1, **SIZES, **lookup}
    plan = {"logits": [(SMOLLM2, SOME)], "engines": {"ngram": engine}, "prompts": [TEXT], "max_tokens": 12}
    return run(3, {**plan, "allowed": ALLOWED})


def run(workers: int, plan: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Runs ``parallel_job.py`` under msrun itself. Returns its folder and its texts."""
    folder = new_folder()
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
@pytest.mark.parametrize("number, family", enumerate(FAMILIES))
def test_logits(workers, number, family):
    folder, _ = job(workers)
    check_logits(folder, workers, number, target(family), PROMPTS[2])


def check_logits(
    folder: Path, workers: int, number: int, model: Path | str, ids: list[int], within: float = 1e-4
) -> None:
    """Those of one process, and the same bits on all workers."""
    wanted = Forward(model).grid(np.array([ids]), np.zeros(1), np.zeros(1, int))[0]
    each = [np.load(folder / f"logits_{number}_{rank}.npy") for rank in range(workers)]
    assert np.abs(each[0] - wanted).max() < within
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
            assert text["undrafted"] == text["ids"][0], name
            assert 5 < text["accepted"] <= text["drafted"], name
    assert len({tuple(ids) for ids in texts["tied plain"]["ids"]}) == len(PROMPTS)
    for family in ("llama", "qwen3"):
        shared, whole = (texts[f"{family} eagle3{how}"] for how in (" shared out", ""))
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


def test_smollm2():
    folder, texts = smollm2()
    check_logits(folder, 3, 0, SMOLLM2, SOME, within=1e-3)  # thirty layers, and logits up to 33
    text = texts["ngram"]
    assert text["errors"] == [None]
    assert text["ids"] == [text["undrafted"]]
    assert 5 < text["accepted"] <= text["drafted"]
