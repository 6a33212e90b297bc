"""mindformers' Qwen3 as target: its step graphs export, and on emulated operators it is our own Qwen3."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindformers_cases as cases
import numpy as np
import pytest
from forward import Forward
from test_ascend_export import BFLOAT16, DOCUMENTED, INPUTS, STRUCTURE, Graph
from tiny import tiny_model

import ms_spec
from ms_spec.config import EngineConfig
from ms_spec.errors import ConfigError
from ms_spec.limits import model_limits
from ms_spec.models.loading import load
from ms_spec.models.mindformers_limits import check_mindformers

LAYERS = 2
OPERATORS = {"ApplyRotaryPosEmb", "PagedAttention", "ReshapeAndCache", "RmsNorm"}
PLAIN = {"SplitWithSize"}
CACHE, TABLES, LENGTHS, MASK, QUERY_LENGTHS = (1, 2), 3, 4, 7, 8
"""Places among the inputs of PagedAttention."""


def model(**changes: Any) -> Path:
    return tiny_model("qwen3", layers=LAYERS, vocab=cases.VOCAB, dtype="bfloat16", scale=0.05, **changes)


@dataclass
class Probe:
    """What the other process found, where its graphs are, and what it left behind."""

    found: dict[str, np.ndarray]
    graphs: Path
    printed: str
    left: list[str]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    folder, here = tmp_path_factory.mktemp("graphs"), tmp_path_factory.mktemp("here")
    script = Path(__file__).parent / "mindformers_probe.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MS_DEV", "LOG_MF"))}
    environment["MS_SPEC_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    done = subprocess.run(
        [sys.executable, str(script), str(model()), str(folder)],
        cwd=here, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(folder / "found.npz") as found:
        yield Probe(dict(found), folder, done.stdout, sorted(path.name for path in here.iterdir()))


@pytest.fixture(scope="module")
def ours() -> Forward:
    """Our own Cells on CPU: the same weights, activations in float32."""
    return Forward(model(), dtype="bfloat16", max_len=cases.MAX_LEN, requests=2)


@pytest.mark.parametrize("dtype", list(cases.CLOSE))
def test_logits_are_those_of_our_own_cells(probe, ours, dtype):
    for i, grid in enumerate(cases.GRIDS):
        want = ours.grid(grid.tokens, grid.start, np.array(grid.slots) - 1)
        live = grid.tokens >= 0
        got = probe.found[f"{dtype}{i}"]
        assert got.shape == want.shape and np.isfinite(got).all()
        assert want[live].std() > 0.3
        np.testing.assert_allclose(got[live], want[live], atol=cases.CLOSE[dtype], rtol=0, err_msg=f"grid {i}")


def test_whole_steps_emit_the_best_tokens_and_look_up_drafts(probe, ours):
    for slot, prompt in cases.PROMPTS.items():
        text = [*prompt, *probe.found[f"ids{slot}"].tolist()]
        assert len(text) > len(prompt) + cases.STEPS
        logits = ours.run(np.array(text), [len(text)], context=slot - 1)
        for at in range(len(prompt), len(text)):
            assert logits[at - 1, text[at]] >= logits[at - 1].max() - 2 * cases.CLOSE[cases.DTYPE], (
                f"slot {slot}, token {at}"
            )
        want = next(
            (
                text[i + n : i + n + cases.K]
                for n in (3, 2, 1)
                for i in range(len(text) - n)
                if text[i : i + n] == text[-n:]
            ),
            [],
        )
        assert probe.found[f"drafts{slot}"].tolist() == want


def test_weights_are_those_that_mindformers_loads(probe):
    assert probe.found["differences"] == 0


def test_nothing_is_printed_and_nothing_left_in_the_working_directory(probe):
    assert (probe.printed, probe.left) == ("", [])


@pytest.mark.parametrize(("kind", "n", "w"), [("decode", 2, 1), ("decode", 2, cases.K + 1), ("prefill", 1, 64)])
def test_one_step_graph_exports(probe, kind, n, w):
    graph = Graph(probe.graphs / f"{kind}_{n}x{w}.mindir")
    at = INPUTS.index("bounds")
    assert list(graph.inputs) == [*INPUTS[:at], "batch_valid_length", "q_seq_lens", *INPUTS[at + 1 :]]
    assert graph.inputs["batch_valid_length"] == graph.inputs["q_seq_lens"] == [n]
    columns = w if kind == "decode" else 1
    told = columns if kind == "decode" else columns + w  # log-probabilities: those of a prompt, too
    assert graph.outputs == [[n, 5 + columns + cases.K], [n, told, 2 + 2 * 20]]

    assert all(graph.count[name] == LAYERS for name in OPERATORS - {"RmsNorm"})
    assert graph.count["RmsNorm"] == 4 * LAYERS + 1
    assert graph.count["Sort"] == 1, "the sampler"
    assert graph.count["ScatterNdUpdate"] >= 1, "the history"
    known = STRUCTURE | OPERATORS | DOCUMENTED | PLAIN
    assert set(graph.count) <= known, set(graph.count) - known

    assert len({call[4] for call in graph.calls("ReshapeAndCache")}) == 1, "slots are computed once"
    for layer, call in enumerate(graph.calls("PagedAttention")):
        assert (call[LENGTHS], call[QUERY_LENGTHS]) == ("batch_valid_length", "q_seq_lens")
        assert not graph.is_none(call[MASK]) and not graph.is_none(call[TABLES])
        for place, which in zip(CACHE, ("key_cache", "value_cache")):
            name, state = graph.load_of(call[place], f"{which}.{layer}")
            assert graph.parameters[name] == (BFLOAT16, [13, cases.BLOCK, 2, 16])
            written = [graph.made_by[x] for x in graph.before(state) if x in graph.made_by]
            writers = [inputs for operator, inputs in written if operator == "ReshapeAndCache"]
            assert any(name in inputs for inputs in writers), "attention may read the cache before it is written"


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_an_npu_it_stops_at_construction(device):
    with pytest.raises(ConfigError, match="model_impl = 'mindformers': needs device = 'ascend'") as caught:
        ms_spec.LLM(str(model()), model_impl="mindformers", device=device)
    assert "\n" not in str(caught.value)
    assert "mindformers" not in sys.modules


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("must be one of auto, ms_spec, mindformers", {"model_impl": "vllm"}),
        ("tensor_parallel_size = 2: must be 1 with", {"model_impl": "mindformers", "tensor_parallel_size": 2}),
        ("enforce_eager = true", {"model_impl": "mindformers", "enforce_eager": True}),
        (
            "method = 'eagle': must be ngram or suffix with model_impl = 'mindformers'",
            {
                "model_impl": "mindformers",
                "speculative_config": {"method": "eagle", "model": "draft", "num_speculative_tokens": 2},
            },
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, arguments):
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig.parse(device="ascend", **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("LlamaForCausalLM", lambda: tiny_model("llama")),
        ("attention_bias", lambda: tiny_model("qwen3", bias=True)),
        ("rope_scaling of type 'yarn'", lambda: tiny_model("qwen3", rope_scaling={"rope_type": "yarn", "factor": 4.0})),
    ],
)
def test_other_models_are_refused_before_they_are_loaded(words, path):
    config = EngineConfig.parse(str(path()), device="ascend", model_impl="mindformers")
    with pytest.raises(ConfigError, match=words) as caught:
        model_limits(config, load(config.model).config)
    assert "\n" not in str(caught.value)


def test_no_other_network_gets_into_the_graph():
    class Drafter:
        taps = ()

        def grids(self, width):
            return (1,)

    from ms_spec.mindformers_runner import MindformersRunner

    with pytest.raises(ValueError, match=r"Drafter runs a network of its own.*only ngram and suffix draft"):
        MindformersRunner(proposer=Drafter())


def test_own_cells_are_the_default():
    assert EngineConfig.parse().model_impl == "auto"
    EngineConfig.parse(model_impl="ms_spec", device="cpu")
    check_mindformers(load(str(model())).config)
