"""Every method's step graphs export to MindIR for Ascend: verification, the drafter's passes, and caches in place."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Callable

import mindspore as ms
import numpy as np
import pytest
from test_ascend_export import (
    BFLOAT16,
    BLOCK,
    BLOCK_TABLE,
    DOCUMENTED,
    FUSED,
    INPUTS,
    KEY,
    LAYERS,
    LENGTHS_KV,
    MAX_LEN,
    STRUCTURE,
    TRAPPED,
    VOCAB,
    Graph,
    config,
)

from ms_spec.export import export_graphs
from ms_spec.models.config import ModelConfig
from ms_spec.models.drafts import DflashShape, Draft, Eagle3Shape, EagleShape, LayerShape, MedusaShape, MtpShape
from ms_spec.models.ops.interface import ASKED
from ms_spec.models.ops.limits import check_ascend
from ms_spec.proposers.registry import build_proposer
from ms_spec.shaping import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from ms_spec.speculative_config import METHODS, SpeculativeConfig
from ms_spec.verify.buckets import Buckets
from ms_spec.work import MAX_BANNED

K, N, CHUNK = 2, 2, 64
IDS = np.arange(0, VOCAB, 3, dtype=np.int32)
"""Of a draft with a vocabulary of its own."""


def layer(target: ModelConfig, **more: Any) -> dict[str, Any]:
    """A drafter's decoder layer: no dimension of its attention is the target's."""
    same = {field.name: getattr(target, field.name) for field in fields(LayerShape)}
    return {**same, "num_layers": 1, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "qk_norm": False, **more}


def eagle(target: ModelConfig) -> EagleShape:
    return EagleShape(**layer(target), vocab_size=VOCAB, fc_bias=True, own_embeddings=True)


def eagle3(target: ModelConfig) -> Eagle3Shape:
    return Eagle3Shape(
        **layer(target),
        target_hidden_size=target.hidden_size,
        aux_layers=(0, 1, 2),
        vocab_size=VOCAB,
        draft_vocab_size=len(IDS),
        norm_before_fc=False,
        fc_norm=True,
        norm_before_residual=True,
        norm_output=False,
        own_embeddings=False,
        own_head=True,
        logit_scale=1.0,
        token_map=IDS,
    )


def medusa(target: ModelConfig) -> MedusaShape:
    return MedusaShape(target.hidden_size, VOCAB, VOCAB, K, 1, True, False, None)


def mtp(target: ModelConfig) -> MtpShape:
    same = {name: getattr(target, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
    return MtpShape(**layer(target, **same), vocab_size=VOCAB)


def dflash(target: ModelConfig) -> DflashShape:
    return DflashShape(
        **layer(target, num_layers=2, qk_norm=True),
        target_hidden_size=target.hidden_size,
        aux_layers=(1, 2),
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        block_size=K + 1,
        mask_token_id=5,
        causal=(False, True),
        sliding_window=None,
        own_embeddings=False,
        own_head=False,
        token_map=None,
    )


def small(target: ModelConfig) -> ModelConfig:
    return replace(target, num_layers=1, num_heads=8, num_kv_heads=4, head_dim=32)


@dataclass(frozen=True)
class Case:
    """A method and what its drafter puts into a graph.

    passes: number of the grid whose bounds each of its attention operators gets; norms: its RmsNorms; written: cache
    writes without attention.
    """

    method: str
    shape: Callable[[ModelConfig], Any] | None = None
    passes: tuple[int, ...] = ()
    norms: int = 0
    written: int = 0
    architecture: str = "Qwen3ForCausalLM"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def target(self) -> ModelConfig:
        return config(self.architecture, 128)

    def grids(self, width: int) -> tuple[int, ...]:
        """Columns of the grids that the proposer gets bounds for."""
        own = {"draft_model": (width + 1, 1), "dflash": (K + 1, K), "medusa": (1,)}
        return own.get(self.method, (width, 1) if self.passes else ())

    @property
    def num_drafts(self) -> int:
        return 1 if self.method == "extract_hidden_states" else K

    def export(self, folder: Path) -> None:
        shape = None if self.shape is None else self.shape(self.target)
        chosen = {"method": self.method, "num_speculative_tokens": self.num_drafts, **dict(self.options)}
        if shape is not None and self.method != "mtp":
            chosen["model"] = "draft"
        spec = SpeculativeConfig(**chosen)

        def proposer(backend, site):
            draft = None if shape is None else Draft(self.method, shape, None, None, None, 0)
            return build_proposer(spec, backend, replace(site, draft=draft))

        export_graphs(
            self.target,
            folder,
            num_drafts=self.num_drafts,
            max_num_seqs=N,
            buckets=Buckets((N,), (self.num_drafts + 1,)),
            chunks=(CHUNK,),
            max_len=MAX_LEN,
            block_size=BLOCK,
            make_proposer=proposer,
        )


CHAIN = (0, *[1] * (K - 1))
CASES = {
    "suffix": Case("suffix"),
    "draft_model": Case("draft_model", small, CHAIN, norms=K * (4 + 1)),
    "eagle": Case("eagle", eagle, CHAIN, norms=K, options=(("disable_padded_drafter_batch", True),)),
    "eagle3": Case("eagle3", eagle3, CHAIN, norms=3 + K * 4, options=(("draft_sample_method", "probabilistic"),)),
    "medusa": Case("medusa", medusa),
    "mtp": Case("mtp", mtp, CHAIN, norms=K * 5, architecture="MiMoForCausalLM"),
    "dflash": Case("dflash", dflash, (0, 0), norms=1 + 2 * (4 + 1) + 1, written=2),
    "extract_hidden_states": Case(
        "extract_hidden_states",
        options=(("draft_model_config", {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}}),),
    ),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """All graphs, written by other processes: whether caches are copied is settled with the first graph of each."""
    folder = tmp_path_factory.mktemp("methods")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MS_DEV_")}
    command, names = [sys.executable, str(Path(__file__).resolve()), str(folder)], list(CASES)
    running = [
        subprocess.Popen(
            [*command, *half], cwd=folder, env={**environment, "GLOG_v": "3"}, stderr=subprocess.PIPE, text=True
        )
        for half in (names[::2], names[1::2])
    ]
    for errors, process in [(process.communicate()[1], process) for process in running]:
        assert process.returncode == 0, errors[-3000:]
    return folder


def real_users(graph: Graph, name: str) -> list[str]:
    """The values that operators make of a value, also where it is handed on in a tuple or another shape."""
    users = []
    for operator, inputs, output in graph.nodes:
        if name in inputs and operator != "UpdateState":
            handed_on = operator in ("MakeTuple", "Reshape", "Depend")
            users += real_users(graph, output) if handed_on else [output]
    return users


def check_order(graph: Graph) -> None:
    """What is read is read where it is, not copied: nothing overwrites it before all that read it are done."""
    assert graph.count["TensorMove"] == 0
    writers = ("ReshapeAndCache", "ScatterNdUpdate")
    writes = [(inputs, output) for operator, inputs, output in graph.nodes if operator in writers]
    assert writes
    for (parameter, state), load in ((i, o) for operator, i, o in graph.nodes if operator == "Load"):
        for inputs, output in writes:
            if parameter in inputs and output not in graph.before(state):
                assert graph.before(output) >= set(real_users(graph, load)), f"{parameter} is written too early"


def check_attention(graph: Graph, case: Case, width: int) -> None:
    """Lengths come from the host, and each pass sees its cache as it has just written it."""
    bounds = list(graph.inputs)[INPUTS.index("bounds")]
    of_grid = list(graph.inputs)[len(INPUTS) :]
    chunk = width == CHUNK
    calls = graph.calls("FusedInferAttentionScore")
    wanted = [None if chunk else bounds] * LAYERS
    wanted += [None if chunk and i == 0 and case.passes == CHAIN else of_grid[i] for i in case.passes]
    assert [None if graph.is_none(call[LENGTHS_KV]) else call[LENGTHS_KV] for call in calls] == wanted
    assert [graph.is_none(call[BLOCK_TABLE]) for call in calls] == [one is None for one in wanted]
    seen: dict[str, int] = {}
    for call in calls:
        for place, cache in ((KEY, "k_cache"), (KEY + 1, "v_cache")):
            name, state = graph.load_of(call[place], cache)
            seen[name] = seen.get(name, int(case.written > 0 and "proposer" in name)) + 1
            before = graph.before(state)
            written = [o for operator, i, o in graph.nodes if operator == "ReshapeAndCache" and name in i]
            assert sum(output in before for output in written) == seen[name], name
    layers = 1 if case.passes == CHAIN else len(case.passes)
    assert len(seen) == 2 * (LAYERS + (layers if case.passes else 0))


@pytest.mark.parametrize(
    ("name", "kind"),
    [(c, k) for c in CASES for k in ("decode", "prefill") if (c, k) != ("extract_hidden_states", "decode")],
)
def test_graph(name, kind, exported):
    case = CASES[name]
    n, w = (N, K + 1) if kind == "decode" else (1, CHUNK)
    path = exported / name / f"{kind}_{n}x{w}.mindir"
    graph, drafts = Graph(path), case.num_drafts

    emitted = w if kind == "decode" else 1
    blocks = MAX_LEN // BLOCK
    shapes = [[N + 1, VOCAB], [N + 1, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]]
    shapes += [[n], [n, w], [n], [n, blocks], [n * w], [n, 4], [n, MAX_BANNED], [n], [n, 3], [n, len(ASKED)]]
    shapes += [[n], [n], [n, emitted + drafts]]
    assert list(graph.inputs.values()) == shapes + [[n * grid] for grid in case.grids(w)]
    assert not TRAPPED & set(graph.inputs)
    states = [[CHUNK, 2, case.target.hidden_size]] if name == "extract_hidden_states" else []
    packed = emitted + (drafts if name != "suffix" else 0)
    scores = [n, emitted + w * (kind == "prefill"), 2 + 2 * 20]
    assert graph.outputs == [[n, 5 + packed], scores, *states]

    used = set(graph.count)
    assert used <= STRUCTURE | FUSED | DOCUMENTED, used - (STRUCTURE | FUSED | DOCUMENTED)
    layers = LAYERS + len(case.passes)
    assert graph.count["FusedInferAttentionScore"] == graph.count["Swiglu"] == layers
    assert graph.count["ReshapeAndCache"] == layers + case.written
    of_target = 2 * LAYERS + 1 + 2 * LAYERS * case.target.qk_norm
    # A prefill also norms all rows: for the log-probabilities of the prompt, and for proposers that want normed states.
    assert graph.count["RmsNorm"] == of_target + case.norms + (kind == "prefill")

    check_attention(graph, case, w)
    check_order(graph)
    assert ms.load(str(path)) is not None


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.passes])
def test_caches(name, exported):
    """The drafter's are as many blocks as the target's, in its own shape, which the operators take."""
    shape = CASES[name].shape(CASES[name].target)
    check_ascend(shape.head_dim, BLOCK, "bfloat16", K + 1, shape.num_heads, shape.num_kv_heads)
    parameters = Graph(exported / name / f"decode_{N}x{K + 1}.mindir").parameters
    of_target = [value for at, value in parameters.items() if "target.layers" in at and at.endswith("k_cache")]
    own = [value for at, value in parameters.items() if "proposer" in at and at.endswith(("k_cache", "v_cache"))]
    blocks = N * MAX_LEN // BLOCK + 1
    assert of_target == [(BFLOAT16, [blocks, BLOCK, 2 * 128])] * LAYERS
    assert own == [(BFLOAT16, [blocks, BLOCK, shape.num_kv_heads * shape.head_dim])] * 2 * shape.num_layers


def test_no_method_is_left_out():
    assert {case.method for case in CASES.values()} | {"ngram"} == set(METHODS), "ngram: test_ascend_export"


def test_more_columns_than_fused_attention_takes_are_refused(tmp_path):
    def proposer(backend, site):
        site = replace(site, draft=Draft("draft_model", small(site.target.config), None, None, None, 0))
        spec = SpeculativeConfig(method="draft_model", model="draft", num_speculative_tokens=15)
        return build_proposer(spec, backend, site)

    with pytest.raises(ValueError, match=r"num_drafts=15: .* 17 tokens .* takes 16 .*; use 14"):
        export_graphs(config("Qwen3ForCausalLM", 128), tmp_path / "none", num_drafts=15, make_proposer=proposer)
    assert not (tmp_path / "none").exists()


if __name__ == "__main__":
    for name in sys.argv[2:]:
        CASES[name].export(Path(sys.argv[1]) / name)
