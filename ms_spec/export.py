"""Writes every graph that an engine would compile for Ascend as MindIR. Needs no NPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms

from ms_spec.models.config import ModelConfig
from ms_spec.models.ops.ascend import AscendOps
from ms_spec.models.ops.interface import Backend
from ms_spec.models.ops.limits import MAX_WIDTH, check_ascend, storage_dtype
from ms_spec.models.ops.parallel import beside, shared_out
from ms_spec.models.parallel import Shard, part, unshared
from ms_spec.proposers.base import Site
from ms_spec.runner import ModelRunner, implementation
from ms_spec.runtime import caches_in_place
from ms_spec.verify.buckets import Buckets

WHOLE = Shard()


def export_graphs(
    config: ModelConfig,
    folder: str | Path,
    *,
    num_drafts: int,
    max_num_seqs: int = 8,
    buckets: Buckets | None = None,
    chunks: Sequence[int] = (64, 512),
    max_len: int = 2048,
    block_size: int = 128,
    dtype: str | None = None,
    make_proposer: Callable[[Backend, Site], Any] | None = None,
    rule_options: dict[str, Any] | None = None,
    model_impl: str = "ms_spec",
    shard: Shard = WHOLE,
    carries: bool = False,
) -> dict[tuple[str, int, int], Path]:
    """Exports the decode and prefill graphs of a model. The weights are zeros: the graphs are what is wanted.

    Args:
        config: the model's shape.
        folder: where ``decode_<n>x<w>.mindir`` and ``prefill_<n>x<w>.mindir`` go; made if it is not there.
        num_drafts: K; 0 without speculation.
        max_num_seqs: most requests in a step.
        buckets: of the decode graphs. Those that an engine would use for drafts of any length if None.
        chunks: the prefill buckets.
        max_len, block_size: of the paged cache.
        dtype: of weights, cache and activations; the model's own if None.
        make_proposer: makes the proposer from the operations and its site (draft None); None: the graphs draft nothing.
        rule_options: as :func:`ms_spec.verify.rules.make_rule` takes them.
        model_impl: whose network the target is: "ms_spec" or "mindformers".
        shard: the worker whose graphs they are, where several share the model (and a drafter has it as a whole).
        carries: the graphs of an engine with ``async_scheduling``.

    Returns:
        The file of each graph (kind, n, w).

    Raises:
        ValueError: the Ascend operators cannot run such a model.
    """
    dtype, _ = storage_dtype(dtype or config.dtype)
    reason = unshared(config, shard.size)
    if reason is not None:
        raise ValueError(f"shard: {reason} cannot be shared out to {shard.size} workers")
    own = part(config, shard)
    check_ascend(own.head_dim, block_size, dtype, num_drafts + 1, own.num_heads, own.num_kv_heads)
    backend = AscendOps(dtype)
    buckets = buckets or Buckets.for_device("ascend", max_num_seqs, num_drafts, variable_width=True)
    num_blocks = max_num_seqs * -(-max_len // block_size) + 1
    network, make_runner = implementation(model_impl)
    with _unmet(shard):
        target = network(own, shared_out(backend, shard), num_blocks, block_size, max_len, dtype)
        site = Site(target, None, num_blocks, block_size, max_len, max_num_seqs, dtype)
        proposer = None if make_proposer is None else make_proposer(beside(backend, shard), site)
    widest = 0 if proposer is None else max(proposer.grids(num_drafts + 1), default=0)
    if widest > MAX_WIDTH:
        raise ValueError(
            f"num_drafts={num_drafts}: the proposer runs {widest} tokens of a request at once, and Ascend's fused "
            f"attention takes {MAX_WIDTH} per decode round; use {num_drafts + MAX_WIDTH - widest}"
        )
    runner = make_runner(
        target,
        backend,
        buckets,
        chunks,
        num_blocks=num_blocks,
        block_size=block_size,
        max_len=max_len,
        max_num_seqs=max_num_seqs,
        num_drafts=num_drafts,
        proposer=proposer,
        rule_options=rule_options or {},
        carries=carries,
    )
    return export_runner(runner, folder)


@contextmanager
def _unmet(shard: Shard) -> Iterator[None]:
    """MindSpore takes the size of a group that has not met from the environment."""
    wanted = {"RANK_ID": str(shard.rank), "RANK_SIZE": str(shard.size)} if shard.size > 1 else {}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def export_runner(runner: ModelRunner, folder: str | Path) -> dict[tuple[str, int, int], Path]:
    """Exports every graph of ``runner.plan()`` and returns their files.

    In a process that has compiled graphs before, they may copy caches, see :func:`ms_spec.runtime.caches_in_place`.
    """
    caches_in_place()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for bucket in runner.plan():
        kind, n, w = bucket
        step, inputs = runner.graph(bucket)
        path = folder / f"{kind}_{n}x{w}.mindir"
        ms.export(step, *inputs, file_name=str(path.with_suffix("")), file_format="MINDIR")
        files[bucket] = path
    return files
