"""What test_mindformers.py runs in a process of its own: mindformers changes MindSpore, loggers and the environment.

    python mindformers_probe.py MODEL FOLDER

MODEL is a Qwen3 of the test's own; FOLDER gets the exported graphs and ``found.npz``, see ``main``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ascend_emulator as emulator
import mindformers_cases as cases
import mindspore as ms
import numpy as np
from ascend_emulator import values
from mindspore import Tensor, nn, ops

from ms_spec.config import EngineConfig
from ms_spec.export import export_graphs
from ms_spec.limits import model_limits
from ms_spec.mindformers_runner import MindformersRunner
from ms_spec.models.loading import Loaded, load
from ms_spec.models.mindformers_qwen3 import MindformersQwen3, build_network
from ms_spec.models.ops.ascend import AscendOps
from ms_spec.models.weights import load_weights
from ms_spec.proposers.ngram import NgramProposer
from ms_spec.runner import build_runner
from ms_spec.runtime import graph_thread, setup_mindspore, use_mode
from ms_spec.verify.buckets import Buckets
from ms_spec.work import Work


class MatMul:
    """x W^T. The CPU has none for bfloat16, nor any of the next two."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return Tensor(values(x) @ values(weight).T).astype(x.dtype)


class Gather:
    def __call__(self, table: Tensor, index: Tensor, axis: int) -> Tensor:
        assert axis == 0
        return Tensor(values(table)[index.asnumpy()]).astype(table.dtype)


class SiLU(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        wide = x.astype(ms.float32)
        return (wide / (1 + ops.exp(-wide))).astype(x.dtype)


STAND_INS = {
    "ApplyRotaryPosEmb": lambda op: emulator.ApplyRotaryPosEmb(op.cos_format),
    "Gather": lambda op: Gather(),
    "MatMul": lambda op: MatMul(),
    "PagedAttention": lambda op: emulator.PagedAttention(op.head_num, op.scale_value, op.kv_head_num),
    "ReshapeAndCache": lambda op: emulator.ReshapeAndCache(),
    "RmsNorm": lambda op: emulator.RmsNorm(op.epsilon),
}
"""By the name of the operator that they stand for."""


def emulate(network: nn.Cell) -> None:
    """Puts emulated operators into all layers."""
    for _, cell in network.cells_and_names():
        for owner in (cell, getattr(cell, "quant_method", None)):
            for name, value in list(vars(owner).items()) if owner is not None else ():
                if isinstance(value, ops.Primitive) and value.name in STAND_INS:
                    object.__setattr__(owner, name, STAND_INS[value.name](value))
        if type(cell).__name__ == "SiLU" and hasattr(cell, "silu"):
            cell.silu = SiLU()


class Logits(nn.Cell):
    """Those of all cells of a grid."""

    def __init__(self, target: MindformersQwen3) -> None:
        super().__init__()
        self.target = target

    def construct(self, tokens, start, tables, batch_valid_length, q_seq_lens):
        rows = self.target.rows(tokens, start, tables, (batch_valid_length, q_seq_lens))
        return self.target.head(self.target(rows)[-1], rows)


def new_target(loaded: Loaded, dtype: str = cases.DTYPE) -> tuple[MindformersQwen3, AscendOps]:
    backend = AscendOps(dtype, emulator)
    target = MindformersQwen3(loaded.config, backend, cases.NUM_BLOCKS, cases.BLOCK, cases.MAX_LEN, dtype)
    load_weights(target.weights(), loaded.checkpoint, cache_key=None)
    emulate(target.network)
    for cache in (*target.key_caches, *target.value_caches):  # what earlier requests left behind
        cache.set_data(Tensor(np.full(cache.shape, 2.0, np.float32), cache.dtype))
    return target, backend


def logits_of_grids(loaded: Loaded, dtype: str) -> dict[str, np.ndarray]:
    cell = Logits(new_target(loaded, dtype)[0])
    found = {}
    for i, grid in enumerate(cases.GRIDS):
        n, w = grid.tokens.shape
        inputs = (grid.tokens, grid.start, grid.tables(), grid.start + w, np.full(n, w))
        out = cell(*(Tensor(np.asarray(x, np.int32)) for x in inputs))
        found[f"{dtype}{i}"] = values(out).reshape(n, w, -1)
    return found


def generated(loaded: Loaded) -> dict[str, np.ndarray]:
    """The ids that whole steps emit for each prompt, and the drafts behind the last one."""
    target, backend = new_target(loaded)
    runner = MindformersRunner(
        target,
        backend,
        Buckets((1, 2), (1, cases.K + 1)),
        (16, 32),
        num_blocks=cases.NUM_BLOCKS,
        block_size=cases.BLOCK,
        max_len=cases.MAX_LEN,
        max_num_seqs=2,
        num_drafts=cases.K,
        proposer=NgramProposer(backend, 1, 3, cases.K),
        rule_options={},
        eager=True,
    )
    for bucket in runner.plan():
        emulate(runner.graph(bucket)[0])
    outputs, drafts, accepted = {}, {}, 0
    for slot, prompt in cases.PROMPTS.items():
        for first in range(0, len(prompt), 32):
            work = Work(slot, prompt[first : first + 32], first, cases.TABLES[slot], draft_limit=cases.K)
            result = runner.prefill(work, first + 32 >= len(prompt))
        outputs[slot], drafts[slot] = list(result.tokens), result.drafts
    for _ in range(cases.STEPS):
        works = [
            Work(slot, [out[-1], *drafts[slot]], len(cases.PROMPTS[slot]) + len(out) - 1, cases.TABLES[slot],
                 draft_limit=cases.K)
            for slot, out in outputs.items()
        ]  # fmt: skip
        for work, result in zip(works, runner.decode(works)):
            outputs[work.slot] += result.tokens
            drafts[work.slot] = result.drafts
            accepted += result.num_accepted
    found = {f"ids{slot}": np.array(ids) for slot, ids in outputs.items()}
    found.update({f"drafts{slot}": np.array(ids, np.int64) for slot, ids in drafts.items()})
    return {**found, "accepted": np.array(accepted)}


def loaded_differently(model: Path, loaded: Loaded) -> int:
    """How many parameters differ from what mindformers itself makes of the checkpoint."""
    from mindformers import build_context

    build_context(
        {
            "use_legacy": False,
            "run_mode": "predict",
            "use_parallel": False,
            "context": {"mode": 0, "device_target": "CPU"},
            "parallel": {},
            "parallel_config": {},
        }
    )
    theirs = build_network(loaded.config, cases.NUM_BLOCKS, cases.BLOCK, cases.MAX_LEN, cases.DTYPE)
    theirs.load_weights(str(model))
    ours = new_target(loaded)[0].network
    pairs = list(zip(theirs.get_parameters(), ours.get_parameters()))
    assert len(pairs) == len(list(theirs.get_parameters())) > 10
    return sum(not np.array_equal(values(a), values(b)) or not values(a).any() for a, b in pairs)


def engine_builds_it(model: Path, loaded: Loaded) -> None:
    """What an LLM does on an NPU, up to the first graph."""
    speculation = {"method": "ngram", "num_speculative_tokens": cases.K}
    config = EngineConfig.parse(
        str(model), device="ascend", model_impl="mindformers", max_model_len=64, speculative_config=speculation
    )
    limits = model_limits(config, loaded.config)
    runner = build_runner(config, limits, loaded, None, AscendOps(), lambda: None)
    assert isinstance(runner, MindformersRunner) and ("prefill", 1, 64) in runner.plan()
    network = runner.graph(("decode", 8, cases.K + 1))[0].step.target.network
    assert all(values(parameter).any() for parameter in network.get_parameters())


def main(model: Path, folder: Path) -> None:
    """Writes what whole steps generate, and in how many weights the loaders differ."""
    setup_mindspore("cpu")
    loaded = load(model)

    def proposer(backend: Any, site: Any) -> NgramProposer:
        return NgramProposer(backend, 1, 3, cases.K)

    export_graphs(
        loaded.config,
        folder,
        num_drafts=cases.K,
        max_num_seqs=2,
        buckets=Buckets((2,), (1, cases.K + 1)),
        chunks=(64,),
        max_len=cases.MAX_LEN,
        block_size=cases.BLOCK,
        dtype=cases.DTYPE,
        make_proposer=proposer,
        model_impl="mindformers",
    )
    engine_builds_it(model, loaded)
    use_mode(True)
    found = generated(loaded)
    for dtype in cases.CLOSE:
        found.update(logits_of_grids(loaded, dtype))
    np.savez(folder / "found.npz", differences=loaded_differently(model, loaded), **found)


if __name__ == "__main__":
    graph_thread().run(main, Path(sys.argv[1]), Path(sys.argv[2]))  # where an LLM would build it
