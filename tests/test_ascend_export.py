"""Every graph exports to MindIR without a device, and the files hold the fused operators, wired as they have to be.

Those of methods with weights of their own are in ``test_ascend_export_methods``.
"""

from __future__ import annotations

import re
from collections import Counter

import mindspore as ms
import pytest
from mindspore import ops
from mindspore.ops import auto_generate
from mindspore.train.mind_ir_pb2 import ModelProto

from ms_spec.export import export_graphs
from ms_spec.models.config import ModelConfig, RopeConfig
from ms_spec.proposers.ngram import NgramProposer
from ms_spec.verify.buckets import Buckets

LAYERS, K, BLOCK, MAX_LEN, VOCAB = 2, 3, 128, 1024, 300
TRAPPED = {"batch_valid_length", "q_seq_lens", "actual_seq_qlen", "actual_seq_kvlen"}
"""Names of graph inputs that MindSpore's runtime takes for the lengths of all attention operators."""
INPUTS = [
    "bias",
    "bad_words",
    "slot",
    "tokens",
    "start",
    "block_tables",
    "bounds",
    "sampling",
    "banned",
    "banned_until",
    "penalties",
    "asked",
    "limit",
    "next_token",
    "uniforms",
]
BFLOAT16 = 16  # TensorProto.DataType

# Places among the inputs of FusedInferAttentionScore: tensors first, then its options.
KEY, MASK, LENGTHS_KV, BLOCK_TABLE = 1, 4, 6, 14
HEADS, SCALE, LAYOUT, KV_HEADS, SPARSE, PRECISE, BLOCK_SIZE = 24, 25, 28, 29, 30, 31, 32

STRUCTURE = {"Constant", "Depend", "Load", "MakeTuple", "TupleGetItem", "UpdateState"}
FUSED = {"FusedInferAttentionScore", "ReshapeAndCache", "RmsNorm", "Swiglu"}
DOCUMENTED = {
    "Add", "Argmax", "BroadcastTo", "Cast", "ClampScalar", "Concat", "CumProd", "CumSum", "Div", "EqScalar", "Equal",
    "Exp", "ExpandDims", "FloorDiv", "Gather", "GatherD", "Greater", "GreaterEqual", "Less", "LessEqual",
    "LessScalar", "Log", "LogicalAnd", "LogicalOr", "MaskedFillScalar", "MatMul", "Maximum", "Minimum", "Mul", "Muls",
    "ReLU", "ReduceAll", "ReduceMax", "ReduceMin", "ReduceSum", "Reshape", "ScatterNdUpdate", "Select", "SiLU", "Sort",
    "Split", "Squeeze", "Stack", "StridedSlice", "Sub", "SumExt", "TensorScatterElements", "TopK",
}  # fmt: skip
"""Plain operators in use: what MindSpore says about each names Ascend."""
PARTS = {
    "ClampScalar": "clamp", "EqScalar": "eq", "LessScalar": "less", "MaskedFillScalar": "masked_fill", "Muls": "mul",
    "SumExt": "sum",
}  # fmt: skip
"""Operators that have no page of their own, and the functions that MindSpore makes them of."""


class Graph:
    """A MindIR file, read back. Names are cut to their last part."""

    def __init__(self, path):
        model = ModelProto()
        model.ParseFromString(path.read_bytes())
        assert not model.functions, "a graph with control flow"
        graph = model.graph
        self.inputs = {self.short(i.name): list(i.tensor[0].dims) for i in graph.input}
        self.outputs = [shape for o in graph.output for shape in self.shapes(o)]
        self.parameters = {self.short(p.name): (p.data_type, list(p.dims)) for p in graph.parameter}
        self.nodes = [(self.operator(n), [self.short(i) for i in n.input], self.short(n.output[0])) for n in graph.node]
        self.made_by = {output: (operator, inputs) for operator, inputs, output in self.nodes}
        self.constants = {self.short(n.output[0]): n.attribute[0] for n in graph.node if n.op_type == "Constant"}
        self.count = Counter(operator for operator, _, _ in self.nodes)

    @staticmethod
    def shapes(output) -> list[list[int]]:
        tensors = output.tensor or [part.tensors[0] for part in output.attr_info.values]
        return [list(tensor.dims) for tensor in tensors]

    @staticmethod
    def short(name: str) -> str:
        return name.split(":")[-1]

    @staticmethod
    def operator(node) -> str:
        return node.op_type.split("::")[-1].split(":")[0]

    def calls(self, operator: str) -> list[list[str]]:
        return [inputs for name, inputs, _ in self.nodes if name == operator]

    def is_none(self, name: str) -> bool:
        constant = self.constants.get(name)
        return constant is not None and constant.type == 25  # AttributeProto.NONE

    def before(self, name: str) -> set[str]:
        """Everything that a value depends on, itself included."""
        seen, left = set(), [name]
        while left:
            at = left.pop()
            if at not in seen:
                seen.add(at)
                left += self.made_by.get(at, ("", []))[1]
        return seen

    def load_of(self, name: str, ending: str) -> list[str]:
        """[parameter, state] of the one Load that a value takes a parameter of that name from."""
        chain, at = [], name
        while True:
            operator, inputs = self.made_by[at]
            chain.append(operator)
            if operator == "Load":
                assert inputs[0].endswith(ending), chain
                return inputs
            assert operator in ("MakeTuple", "Reshape", "Gather"), chain
            at = inputs[0]


def config(architecture: str, head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=160,
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        output_bias=False,
        mlp_bias=False,
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=architecture != "LlamaForCausalLM",
        max_position_embeddings=MAX_LEN,
        dtype="bfloat16",
    )


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Exporting sets a variable, which is not for the tests that come after."""
    monkeypatch.setenv("MS_DEV_SIDE_EFFECT_LOAD_ELIM", "3")


def export(architecture, folder, head_dim=128, **options):
    def proposer(backend, site):
        return NgramProposer(backend, 2, 4, K)

    options = {"max_num_seqs": 2, "chunks": (64, 512), "max_len": MAX_LEN, "block_size": BLOCK, **options}
    return export_graphs(config(architecture, head_dim), folder, num_drafts=K, make_proposer=proposer, **options)


def check(
    graph: Graph, kind: str, n: int, w: int, qk_norm: bool, head_dim: int, more_inputs: tuple[str, ...] = ()
) -> None:
    assert list(graph.inputs) == [*INPUTS, *more_inputs] and not TRAPPED & set(graph.inputs)
    assert graph.inputs["tokens"] == [n, w] and graph.inputs["bounds"] == [n * w]
    smallest = kind == "prefill" and w < 512  # it can tell the log-probabilities of the prompt
    emitted = w if kind == "decode" else 1
    assert graph.outputs == [[n, 5 + emitted + K], [n, emitted + w * smallest, 2 + 2 * 20]]

    assert graph.count["FusedInferAttentionScore"] == graph.count["ReshapeAndCache"] == LAYERS
    assert graph.count["RmsNorm"] == 2 * LAYERS + 1 + (2 * LAYERS if qk_norm else 0) + smallest
    assert graph.count["Swiglu"] == LAYERS
    assert graph.count["Sort"] == 1, "the sampler"
    assert graph.count["ScatterNdUpdate"] >= 1, "the history"
    assert set(graph.count) <= STRUCTURE | FUSED | DOCUMENTED, set(graph.count) - (STRUCTURE | FUSED | DOCUMENTED)

    caches = [f"layers.{i}.attention.{name}_cache" for i in range(LAYERS) for name in ("k", "v")]
    for cache in caches:
        held = [value for name, value in graph.parameters.items() if name.endswith(cache)]
        assert held == [(BFLOAT16, [held[0][1][0], BLOCK, 2 * head_dim])]

    slots = {inputs[4] for inputs in graph.calls("ReshapeAndCache")}
    masks = {inputs[MASK] for inputs in graph.calls("FusedInferAttentionScore")}
    assert len(slots) == len(masks) == 1, "slots and mask are computed once"
    # Per layer: attention takes the cache as the same layer's ReshapeAndCache left it.
    for layer, call in enumerate(graph.calls("FusedInferAttentionScore")):
        constant = {place: graph.constants[call[place]] for place in range(HEADS, len(call))}
        assert constant[HEADS].i == 4 and constant[KV_HEADS].i == 2
        assert constant[SCALE].f == pytest.approx(head_dim**-0.5)
        assert constant[LAYOUT].i == 0 and constant[SPARSE].i == 0, "BSH, a mask of our own"
        by_row = w <= 16
        if by_row:
            assert call[LENGTHS_KV] == "bounds", "lengths come straight from the host"
            assert constant[BLOCK_SIZE].i == BLOCK and constant[PRECISE].i == 0
            assert not graph.is_none(call[BLOCK_TABLE])
        else:
            assert graph.is_none(call[LENGTHS_KV]) and graph.is_none(call[BLOCK_TABLE])
            assert constant[BLOCK_SIZE].i == 0 and constant[PRECISE].i == 2
        for place, which in ((KEY, "k_cache"), (KEY + 1, "v_cache")):
            name, state = graph.load_of(call[place], f"layers.{layer}.attention.{which}")
            written = [graph.made_by[x] for x in graph.before(state) if x in graph.made_by]
            writers = [inputs for operator, inputs in written if operator == "ReshapeAndCache"]
            assert any(name in inputs for inputs in writers), "attention may read the cache before it is written"


@pytest.mark.parametrize(
    ("architecture", "head_dim", "batches"),
    [("LlamaForCausalLM", 64, (1, 2)), ("Qwen2ForCausalLM", 128, (2,)), ("Qwen3ForCausalLM", 128, (2,))],
)
def test_every_graph_exports_with_its_fused_operators(architecture, head_dim, batches, tmp_path):
    files = export(architecture, tmp_path, head_dim, buckets=Buckets(batches, (1, 2, 4)))
    decode = {("decode", n, w) for n in batches for w in (1, 2, 4)}
    assert set(files) == decode | {("prefill", 1, 64), ("prefill", 1, 512)}
    for (kind, n, w), path in files.items():
        assert path.name == f"{kind}_{n}x{w}.mindir"
        check(Graph(path), kind, n, w, architecture == "Qwen3ForCausalLM", head_dim)
    assert ms.load(str(path)) is not None


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_every_plain_operator_is_documented_for_ascend(name):
    """MindSpore's pages are made of these texts. Many refer to a function's."""
    text = getattr(ops, PARTS.get(name, name), None) or getattr(auto_generate, name)
    while "Supported Platforms" not in text.__doc__:
        text = getattr(ops, re.findall(r":func:`mindspore\.ops\.(\w+)`", text.__doc__)[0])
    assert "``Ascend``" in text.__doc__.partition("Supported Platforms")[2].splitlines()[1]


@pytest.mark.parametrize("rule", [{"method": "block", "entropy": True}, {"method": "standard", "entropy": True}])
def test_other_rules_export_too(rule, tmp_path):
    files = export("Qwen3ForCausalLM", tmp_path, buckets=Buckets((2,), (K + 1,)), chunks=(64,), rule_options=rule)
    for (kind, n, w), path in files.items():
        check(Graph(path), kind, n, w, True, 128)


def test_steps_that_carry_on_export_too(tmp_path):
    files = export("Qwen3ForCausalLM", tmp_path, buckets=Buckets((2,), (1, K + 1)), chunks=(64,), carries=True)
    for (kind, n, w), path in files.items():
        graph, decodes = Graph(path), kind == "decode"
        check(graph, kind, n, w, True, 128, ("carried",) if decodes else ())
        (carry,) = [value for name, value in graph.parameters.items() if name.endswith("carry")]
        assert carry[1] == [3, 1 + K]
        assert sum(inputs[0].endswith("carry") for inputs in graph.calls("ScatterNdUpdate")) == 1
        if decodes:  # the tokens of the first layer come from what was left behind
            assert "carried" in graph.before(graph.calls("ReshapeAndCache")[0][0])


def test_a_short_prefill_chunk_runs_row_by_row(tmp_path):
    files = export("LlamaForCausalLM", tmp_path, buckets=Buckets((1,), (1,)), chunks=(16,))
    check(Graph(files["prefill", 1, 16]), "prefill", 1, 16, False, 128)


@pytest.mark.parametrize(
    ("words", "options"),
    [("block_size=8", {"block_size": 8}), ("head_dim=72", {"head_dim": 72}), ("dtype", {"dtype": "int8"})],
)
def test_what_ascend_cannot_run_is_refused_before_anything_is_written(words, options, tmp_path):
    with pytest.raises(ValueError, match=words):
        export("LlamaForCausalLM", tmp_path / "none", **options)
    assert not (tmp_path / "none").exists()
