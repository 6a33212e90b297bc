"""The graphs of one worker of several export to MindIR too: they gather where the workers meet, and hold its part."""

from __future__ import annotations

import pytest
from test_ascend_export import BFLOAT16, BLOCK, DOCUMENTED, FUSED, HEADS, KV_HEADS, LAYERS, STRUCTURE, Graph, K, export

from ms_spec.models.parallel import Shard
from ms_spec.verify.buckets import Buckets

# The last: copies that a process makes which has compiled graphs for CPU before; see caches_in_place.
TOGETHER = {"AllGather", "Transpose", "Unstack", "TensorMove"}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setenv("MS_DEV_SIDE_EFFECT_LOAD_ELIM", "3")


def test_a_workers_graphs(tmp_path):
    """Four workers, so that two have the same key head."""
    size, buckets = 4, Buckets((2,), (K + 1,))
    files = export("Qwen3ForCausalLM", tmp_path, 64, buckets=buckets, chunks=(64,), shard=Shard(1, size))
    for (kind, _, _), path in files.items():
        graph = Graph(path)
        # The embeddings, two sums in each layer, the logits, and those of a prompt that is scored.
        assert graph.count["AllGather"] == 2 * LAYERS + 2 + (kind == "prefill")
        assert graph.count["FusedInferAttentionScore"] == graph.count["ReshapeAndCache"] == LAYERS
        assert set(graph.count) <= STRUCTURE | FUSED | DOCUMENTED | TOGETHER, set(graph.count)
        for call in graph.calls("FusedInferAttentionScore"):
            constant = {place: graph.constants[call[place]] for place in (HEADS, KV_HEADS)}
            assert (constant[HEADS].i, constant[KV_HEADS].i) == (4 // size, 1)
        held = [value for name, value in graph.parameters.items() if name.endswith("layers.0.attention.k_cache")]
        assert held == [(BFLOAT16, [held[0][1][0], BLOCK, 64])]
        (down,) = [value for name, value in graph.parameters.items() if name.endswith("layers.0.down.own.weight")]
        assert down == (BFLOAT16, [128, 160 // size])


def test_counts_that_do_not_divide_are_refused(tmp_path):
    with pytest.raises(ValueError, match="num_attention_heads = 4 cannot be shared out to 3 workers"):
        export("LlamaForCausalLM", tmp_path, 64, shard=Shard(0, 3))
