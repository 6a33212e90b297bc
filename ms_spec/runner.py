"""Owns the model, its caches and its compiled steps; turns ``Work`` into tensors and tensors into ``Result``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mindspore import Tensor

from ms_spec.config import EngineConfig
from ms_spec.limits import device_of, model_limits
from ms_spec.models.decoder import Decoder
from ms_spec.models.loading import Loaded
from ms_spec.models.ops.interface import Backend
from ms_spec.models.weights import load_weights
from ms_spec.proposers.registry import build_proposer
from ms_spec.randomness import matched_uniforms, step_uniforms
from ms_spec.runtime import use_mode
from ms_spec.step import DecodeStep, PrefillStep, new_history
from ms_spec.verify.buckets import Buckets
from ms_spec.verify.rules import make_rule
from ms_spec.work import MAX_BANNED, Result, Work


@dataclass
class _Inputs:
    """The host's arrays of one bucket and the tensors that share their memory: nothing is allocated per step."""

    slot: np.ndarray
    tokens: np.ndarray
    start: np.ndarray
    block_tables: np.ndarray
    bounds: np.ndarray
    sampling: np.ndarray
    banned: np.ndarray
    banned_until: np.ndarray
    limit: np.ndarray
    uniforms: np.ndarray
    tensors: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, n: int, w: int, blocks: int, drawn: int, host_bounds: bool) -> _Inputs:
        made = cls(
            slot=np.zeros(n, np.int32),
            tokens=np.full((n, w), -1, np.int32),
            start=np.zeros(n, np.int32),
            block_tables=np.zeros((n, blocks), np.int32),
            bounds=np.ones(n * w if host_bounds else 1, np.int32),
            sampling=np.tile(np.array([0, 0, 1, 0], np.float32), (n, 1)),
            banned=np.full((n, MAX_BANNED), -1, np.int32),
            banned_until=np.zeros(n, np.int32),
            limit=np.zeros(n, np.int32),
            uniforms=np.zeros((n, 2 * drawn), np.float32),
        )
        made.tensors = tuple(Tensor.from_numpy(array) for array in made.arrays())
        return made

    def arrays(self) -> list[np.ndarray]:
        """In the order of the steps' arguments."""
        return [getattr(self, name) for name in self.__dataclass_fields__ if name != "tensors"]

    def copies(self) -> tuple[Tensor, ...]:
        """Tensors that share no memory with the host's arrays."""
        return tuple(Tensor(array) for array in self.arrays())


class ModelRunner:
    """The compiled model. See :class:`ms_spec.work.Runner`; all calls come from the graph thread.

    Args:
        target: the model, weights loaded.
        backend: the device operations that it is written in.
        buckets: batch and width buckets of the decode graphs.
        chunks: prompt lengths of the prefill graphs, rising.
        num_drafts: K, 0 without speculation.
        make_proposer: makes the proposer of one step graph; None without speculation.
        rule_options: keyword arguments of :func:`ms_spec.verify.rules.make_rule`.
        eager: run operator by operator, without compiled graphs.
    """

    def __init__(
        self,
        target: Decoder,
        backend: Backend,
        buckets: Buckets,
        chunks: Sequence[int],
        *,
        num_blocks: int,
        block_size: int,
        max_len: int,
        max_num_seqs: int,
        num_drafts: int,
        make_proposer: Callable[[], Any] | None,
        rule_options: dict[str, Any],
        eager: bool = False,
    ) -> None:
        self.num_blocks, self.block_size, self.max_len = num_blocks, block_size, max_len
        self.buckets, self.chunks, self.num_drafts = buckets, tuple(chunks), num_drafts
        self.num_compiled = 0
        self._eager = eager
        self._host_bounds = backend.host_bounds
        self._table_width = -(-max_len // block_size)
        history = new_history(max_num_seqs, max_len)
        self._steps: dict[tuple[str, int, int], DecodeStep | PrefillStep] = {}
        for bucket in self.plan():
            kind, _, w = bucket
            rule = make_rule(backend, w if kind == "decode" else 1, **rule_options)
            step = (DecodeStep if kind == "decode" else PrefillStep)(
                target, backend, rule, history, make_proposer() if make_proposer else None
            )
            # MindSpore's phase for inference: from the second call on, no checks of the arguments. So a Cell a bucket.
            step.phase = "increment"
            self._steps[bucket] = step
            self._matched = rule.matched
        self._inputs: dict[tuple[str, int, int], _Inputs] = {}

    def plan(self) -> list[tuple[str, int, int]]:
        """Every graph that :meth:`warm_up` compiles: (kind, n, w)."""
        decode = [("decode", n, w) for w in self.buckets.widths for n in self.buckets.batches]
        return decode + [("prefill", 1, chunk) for chunk in self.chunks]

    def graph(self, bucket: tuple[str, int, int]) -> tuple[Any, tuple[Tensor, ...]]:
        """The step that runs a bucket of :meth:`plan`, and inputs of padding for it. Compiles nothing."""
        kind, n, w = bucket
        drawn = w if kind == "decode" else 1
        return self._steps[bucket], _Inputs.of(n, w, self._table_width, drawn, self._host_bounds).tensors

    def warm_up(self, progress: Callable[[int], object] = lambda graphs: None) -> None:
        """Compiles every graph by running it on padding alone. ``progress`` hears of each."""
        for bucket in self.plan():
            self._run(bucket, [])
            progress(1)

    def prefill(self, work: Work, last: bool) -> Result | None:
        """One chunk of a prompt, in as many calls as its length takes. None unless it is the ``last``."""
        most = self.chunks[-1]
        while len(work.tokens) > most:
            self._run(("prefill", 1, most), [replace(work, tokens=work.tokens[:most], draft_limit=0)])
            work = replace(work, tokens=work.tokens[most:], start=work.start + most)
        chunk = next(c for c in self.chunks if c >= len(work.tokens))
        out = self._run(("prefill", 1, chunk), [work])
        return self._result(out[0], 1) if last else None

    def decode(self, works: list[Work]) -> list[Result]:
        """One step of every request."""
        n, w = self.buckets.pick(len(works), max(len(work.tokens) for work in works))
        out = self._run(("decode", n, w), works)
        return [self._result(row, w) for row in out[: len(works)]]

    @staticmethod
    def _result(row: list[int], width: int) -> Result:
        emitted, accepted, drafts = row[:3]
        return Result(row[3 : 3 + emitted], row[3 + width : 3 + width + drafts], accepted)

    def _run(self, bucket: tuple[str, int, int], works: list[Work]) -> list[list[int]]:
        kind, n, w = bucket
        inputs = self._inputs.get(bucket)
        if inputs is None:
            drawn = w if kind == "decode" else 1
            inputs = self._inputs[bucket] = _Inputs.of(n, w, self._table_width, drawn, self._host_bounds)
            self.num_compiled += 1
        for i, work in enumerate(works):
            self._fill(inputs, i, work)
        if len(works) < n:
            inputs.slot[len(works) :] = 0
            inputs.tokens[len(works) :] = -1
            inputs.limit[len(works) :] = 0
        use_mode(self._eager)  # another model of this process, or its user, may have switched it
        step = self._steps[bucket]
        # A tensor that a device has seen may stay there as it was; only memory shared with the graph can be reused.
        tensors = inputs.copies() if self._host_bounds else inputs.tensors
        return step(*tensors).asnumpy().tolist()

    def _fill(self, inputs: _Inputs, i: int, work: Work) -> None:
        size, tables = len(work.tokens), inputs.block_tables
        inputs.slot[i] = work.slot
        inputs.tokens[i, :size] = work.tokens
        inputs.tokens[i, size:] = -1
        inputs.start[i] = work.start
        tables[i, : len(work.block_table)] = work.block_table
        inputs.sampling[i] = (work.temperature, work.top_k, work.top_p, work.min_p)
        inputs.banned_until[i] = work.banned_until
        if work.banned_until:
            inputs.banned[i] = -1
            inputs.banned[i, : len(work.banned)] = work.banned
        inputs.limit[i] = work.draft_limit
        if self._host_bounds:
            width = inputs.tokens.shape[1]
            inputs.bounds[i * width : (i + 1) * width] = np.minimum(work.start + 1 + np.arange(width), self.max_len)
        if work.temperature > 0:
            drawn = inputs.uniforms.shape[1] // 2
            if self._matched:
                inputs.uniforms[i, :drawn] = matched_uniforms(work.seed, work.sample, work.output_index, drawn)
            else:
                # Keyed by the engine's K, not the bucket's: neighbours that widen the bucket change no number.
                drawn_for = step_uniforms(work.seed, work.sample, work.output_index, self.num_drafts)
                inputs.uniforms[i, : drawn - 1] = drawn_for[: drawn - 1]
                inputs.uniforms[i, drawn - 1] = drawn_for[self.num_drafts]


class _Watched:
    """A checkpoint that calls ``progress`` whenever something is read from it."""

    def __init__(self, checkpoint: Any, progress: Callable[[], None]) -> None:
        self._checkpoint, self._progress = checkpoint, progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def read(self, *arguments: Any) -> np.ndarray:
        self._progress()
        return self._checkpoint.read(*arguments)


def build_runner(config: EngineConfig, loaded: Loaded, backend: Backend, progress: Callable[[], None]) -> ModelRunner:
    """Loads the weights onto the device and makes the step Cells. Nothing is compiled yet.

    ``progress`` is called now and then; what it raises ends the work.

    Raises:
        ValueError: the checkpoint does not fit its config.
    """
    device, limits = device_of(config), model_limits(config, loaded.config)
    dtype = {"auto": loaded.config.dtype, "float": "float32", "half": "float16"}.get(config.dtype, config.dtype)
    target = Decoder(loaded.config, backend, limits.num_blocks, limits.block_size, limits.max_model_len, dtype)
    load_weights(target.weights(), _Watched(loaded.checkpoint, progress), cache_key=backend.name)
    speculation, sampler = config.speculative_config, config.additional_config.rejection_sampler_config
    num_drafts = limits.num_speculative_tokens
    method = speculation.rejection_sample_method if speculation else None
    longest = min(limits.prefill_chunk, backend.chunks[-1])
    chunks = sorted({min(chunk, longest) for chunk in backend.chunks})
    return ModelRunner(
        target,
        backend,
        Buckets.for_device(
            device, limits.max_num_seqs, num_drafts, config.compilation_config.cudagraph_capture_sizes, num_drafts > 0
        ),
        chunks,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        num_drafts=num_drafts,
        make_proposer=(lambda: build_proposer(speculation, backend)) if speculation else None,
        rule_options={
            "method": "block" if config.block_verify else method or "standard",
            "entropy": sampler.enable_entropy_verify,
            "posterior_threshold": sampler.posterior_threshold,
            "posterior_alpha": sampler.posterior_alpha,
        },
        eager=config.eager,
    )
