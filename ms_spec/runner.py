"""Owns the model, its caches and its compiled steps; turns ``Work`` into tensors and tensors into ``Result``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor, nn

from ms_spec.async_scheduling import runs_ahead
from ms_spec.carry import CarriedStep, new_carry
from ms_spec.config import EngineConfig
from ms_spec.limits import Limits, device_of, weights_dtype
from ms_spec.models.checkpoint.sharded import sharded
from ms_spec.models.decoder import Decoder
from ms_spec.models.loading import Loaded
from ms_spec.models.ops.interface import ASKED, Backend
from ms_spec.models.ops.parallel import beside, shared_out
from ms_spec.models.parallel import Shard, part
from ms_spec.models.weights import load_weights
from ms_spec.proposers.base import NORMED, Site
from ms_spec.proposers.registry import build_proposer
from ms_spec.randomness import matched_uniforms, step_uniforms
from ms_spec.runtime import use_mode
from ms_spec.slot_tables import SlotTables
from ms_spec.step import DecodeStep, PrefillStep, new_history
from ms_spec.verify.buckets import Buckets
from ms_spec.verify.rules import make_rule
from ms_spec.work import MAX_BANNED, Result, Work

if TYPE_CHECKING:
    from ms_spec.group import Group
    from ms_spec.models.drafts import Draft


NO_PENALTIES = (1.0, 0.0, 0.0)


@dataclass
class Inputs:
    """The host's arrays of one bucket and the tensors that share their memory: nothing is allocated per step."""

    slot: np.ndarray
    tokens: np.ndarray
    start: np.ndarray
    block_tables: np.ndarray
    bounds: np.ndarray
    sampling: np.ndarray
    banned: np.ndarray
    banned_until: np.ndarray
    penalties: np.ndarray
    asked: np.ndarray
    limit: np.ndarray
    next_token: np.ndarray
    uniforms: np.ndarray
    carried: np.ndarray | None
    draft_bounds: tuple[np.ndarray, ...]
    tensors: tuple[Tensor, ...] = ()

    @classmethod
    def of(
        cls, n: int, w: int, blocks: int, drawn: int, host_bounds: bool, grids: Sequence[int], carries: bool = False
    ) -> Inputs:
        """``drawn``: uniforms of a request; ``grids``: widths of the proposer's own grids; ``carries``: for a
        :class:`ms_spec.carry.CarriedStep`."""
        made = cls(
            slot=np.zeros(n, np.int32),
            tokens=np.full((n, w), -1, np.int32),
            start=np.zeros(n, np.int32),
            block_tables=np.zeros((n, blocks), np.int32),
            bounds=np.ones(n * w if host_bounds else 1, np.int32),
            sampling=np.tile(np.array([0, 0, 1, 0], np.float32), (n, 1)),
            banned=np.full((n, MAX_BANNED), -1, np.int32),
            banned_until=np.zeros(n, np.int32),
            penalties=np.tile(np.array(NO_PENALTIES, np.float32), (n, 1)),
            asked=np.zeros((n, len(ASKED)), np.int32),
            limit=np.zeros(n, np.int32),
            next_token=np.full(n, -1, np.int32),
            uniforms=np.zeros((n, drawn), np.float32),
            carried=np.zeros(n, np.int32) if carries else None,
            draft_bounds=tuple(np.ones(n * width, np.int32) for width in grids) if host_bounds else (),
        )
        made.tensors = tuple(Tensor.from_numpy(array) for array in made.arrays())
        return made

    def arrays(self) -> list[np.ndarray]:
        """In the order of the steps' arguments."""
        names = [name for name in self.__dataclass_fields__ if name not in ("draft_bounds", "tensors")]
        return [*(array for array in map(self.__getattribute__, names) if array is not None), *self.draft_bounds]

    def copies(self) -> tuple[Tensor, ...]:
        """Tensors that share no memory with the host's arrays."""
        return tuple(Tensor(array) for array in self.arrays())


class ModelRunner:
    """The compiled model. See :class:`ms_spec.work.Runner`; all calls come from the graph thread.

    Args:
        target: the model; its weights may be loaded later.
        backend: the device operations that it is written in.
        buckets: batch and width buckets of the decode graphs.
        chunks: prompt lengths of the prefill graphs, rising.
        num_drafts: K, 0 without speculation.
        proposer: drafts at the end of every graph; None: nothing does (no speculation, or the host drafts).
        rule_options: keyword arguments of :func:`ms_spec.verify.rules.make_rule`.
        max_logprobs: most log-probabilities that a request can ask for at each place.
        eager: run operator by operator, without compiled graphs.
        carries: steps can be handed over before the results of those before them are there, see :mod:`ms_spec.carry`.
    """

    inputs_type = Inputs

    def __init__(
        self,
        target: Any,
        backend: Backend,
        buckets: Buckets,
        chunks: Sequence[int],
        *,
        num_blocks: int,
        block_size: int,
        max_len: int,
        max_num_seqs: int,
        num_drafts: int,
        proposer: Any,
        rule_options: dict[str, Any],
        max_logprobs: int = 20,
        eager: bool = False,
        carries: bool = False,
    ) -> None:
        self.num_blocks, self.block_size, self.max_len = num_blocks, block_size, max_len
        self.buckets, self.chunks, self.num_drafts = buckets, tuple(chunks), num_drafts
        self.num_compiled = 0
        self._eager = eager
        self._host_bounds = backend.host_bounds
        self._table_width = -(-max_len // block_size)
        self._proposer = proposer
        self._exported = getattr(proposer, "exported", False)
        dense = proposer is not None and proposer.dense
        target.keep(() if proposer is None else [tap for tap in proposer.taps if tap != NORMED])
        history = new_history(max_num_seqs, max_len)
        self._carries = carries
        carry = new_carry(max_num_seqs, num_drafts) if carries else None
        self._tables = SlotTables(max_num_seqs + 1, target.config.vocab_size, shared=not backend.host_bounds)
        self._steps: dict[tuple[str, int, int], nn.Cell] = {}
        for bucket in self.plan():
            kind, _, w = bucket
            rule = make_rule(backend, w if kind == "decode" else 1, dense=dense, **rule_options)
            step = self._step(bucket, target, backend, rule, history, proposer, max_logprobs, carry)
            # MindSpore's phase for inference: from the second call on, no checks of the arguments. So a Cell a bucket.
            step.phase = "increment"
            self._steps[bucket] = step
            self._matched = rule.matched
        self._inputs: dict[tuple[str, int, int], Inputs] = {}

    def _step(self, bucket: tuple[str, int, int], target: Any, backend: Backend, *parts: Any) -> nn.Cell:
        kind, _, w = bucket
        if kind == "prefill":
            return PrefillStep(target, backend, *parts, scored=w == self.chunks[0])
        step = DecodeStep(target, backend, *parts)
        return CarriedStep(step, backend) if self._carries else step

    def plan(self) -> list[tuple[str, int, int]]:
        """Every graph that :meth:`warm_up` compiles: (kind, n, w)."""
        decode = [("decode", n, w) for w in self.buckets.widths for n in self.buckets.batches]
        if self._exported:
            decode = []  # its requests end with their first token
        return decode + [("prefill", 1, chunk) for chunk in self.chunks]

    def graph(self, bucket: tuple[str, int, int]) -> tuple[Any, tuple[Tensor, ...]]:
        """The step that runs a bucket of :meth:`plan`, and inputs of padding for it. Compiles nothing."""
        return self._steps[bucket], (*self._tables.tensors(), *self._new_inputs(bucket).tensors)

    def _new_inputs(self, bucket: tuple[str, int, int]) -> Inputs:
        kind, n, w = bucket
        drawn = (w if kind == "decode" else 1) + self.num_drafts
        grids = () if self._proposer is None else self._proposer.grids(w)
        carries = self._carries and kind == "decode"
        return self.inputs_type.of(n, w, self._table_width, drawn, self._host_bounds, grids, carries)

    def meet(self) -> None:
        """Waits until the model is loaded everywhere: here it is in one piece."""

    def warm_up(self, progress: Callable[[int], object] = lambda graphs: None) -> None:
        """Compiles every graph by running it on padding alone. ``progress`` hears of each."""
        for bucket in self.plan():
            self._run(bucket, [])
            progress(1)

    def prefill(self, work: Work, last: bool) -> Result | None:
        """One chunk of a prompt, in as many calls as its length takes. See :class:`ms_spec.work.Runner`."""
        most = self.chunks[0 if work.prompt_logprobs else -1]
        states: list[Any] = []
        scores: list[list[float]] = []
        while len(work.tokens) > most:
            part = replace(work, tokens=work.tokens[:most], draft_limit=0, next_token=work.tokens[most])
            _, told, seen = self._run(("prefill", 1, most), [part])
            states.append(seen)
            scores += told[0, 1:].tolist() if work.prompt_logprobs else []
            work = replace(work, tokens=work.tokens[most:], start=work.start + most)
        chunk = next(c for c in self.chunks if c >= len(work.tokens))
        out, told, seen = self._run(("prefill", 1, chunk), [work])
        result = self._result(out[0], 1, told[0] if work.logprobs else None) if last else Result([], [])
        if work.prompt_logprobs:
            result.prompt_logprobs = scores + told[0, 1 : 1 + len(work.tokens)].tolist()
        if seen is not None:
            result.states = np.concatenate([*states, seen])
        return result if last or work.prompt_logprobs or seen is not None else None

    def decode(self, works: list[Work]) -> list[Result]:
        """One step of every request."""
        n, w = self.buckets.pick(len(works), max(len(work.tokens) for work in works))
        begin = time.perf_counter()
        out, told, _ = self._run(("decode", n, w), works)
        results = [self._result(out[i], w, told[i] if work.logprobs else None) for i, work in enumerate(works)]
        self._share_time(results, begin, out[0][3] + out[0][4] * 1e-9, time.perf_counter())
        return results

    @staticmethod
    def _result(row: list[int], width: int, told: np.ndarray | None) -> Result:
        emitted, accepted, drafts = row[:3]
        logprobs = None if told is None else told[:emitted].tolist()
        return Result(row[5 : 5 + emitted], row[5 + width : 5 + width + drafts], accepted, logprobs=logprobs)

    def _share_time(self, results: list[Result], begin: float, verified: float, end: float) -> None:
        """Splits a call's time between verifying and drafting, and among its requests."""
        if self._proposer is None:
            verified = end
        elif not begin <= verified <= end:
            return  # the device has no clock, or another one
        for result in results:
            result.verify_seconds = (verified - begin) / len(results)
            result.draft_seconds = (end - verified) / len(results)

    def _run(self, bucket: tuple[str, int, int], works: list[Work]) -> tuple[list[list[int]], Any, np.ndarray | None]:
        """The rows of the packed output, log-probabilities if a request asks for them (as the steps return them), and
        the states of a prompt's chunk where they are exported."""
        n, inputs = bucket[1], self._inputs_of(bucket)
        for i, work in enumerate(works):
            self._fill(inputs, i, work)
        if len(works) < n:
            inputs.slot[len(works) :] = 0
            inputs.tokens[len(works) :] = -1
            inputs.limit[len(works) :] = 0
            if inputs.carried is not None:
                inputs.carried[len(works) :] = 0
        packed, others = self._compute(bucket, inputs)
        told = others[0].asnumpy() if any(work.logprobs or work.prompt_logprobs for work in works) else None
        tokens = len(works[0].tokens) if works else 0  # live rows come first
        return packed.tolist(), told, others[1].asnumpy()[:tokens].copy() if self._exported else None

    def _inputs_of(self, bucket: tuple[str, int, int]) -> Inputs:
        inputs = self._inputs.get(bucket)
        if inputs is None:
            inputs = self._inputs[bucket] = self._new_inputs(bucket)
            self.num_compiled += 1
        return inputs

    def _compute(self, bucket: tuple[str, int, int], inputs: Inputs) -> tuple[np.ndarray, list[Tensor]]:
        """One call of a graph: its packed output, and the others, which the host need not look at."""
        use_mode(self._eager)  # another model of this process, or its user, may have switched it
        # A tensor that a device has seen may stay there as it was; only memory shared with the graph can be reused.
        tensors = inputs.copies() if self._host_bounds else inputs.tensors
        packed, *others = self._steps[bucket](*self._tables.tensors(), *tensors)
        return packed.asnumpy(), others

    def _fill(self, inputs: Inputs, i: int, work: Work) -> None:
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
        shaping = work.shaping
        if shaping is None:
            inputs.penalties[i] = NO_PENALTIES
            inputs.asked[i] = (0, 0, 0, work.logprobs, work.prompt_logprobs)
        else:
            self._tables.put(work.slot, shaping)
            counts = (shaping.num_prompt_tokens, shaping.biased, len(shaping.bad_words))
            inputs.penalties[i] = shaping.penalties
            inputs.asked[i] = (*counts, work.logprobs, work.prompt_logprobs)
        inputs.limit[i] = work.draft_limit
        inputs.next_token[i] = work.next_token
        if inputs.carried is not None:
            inputs.carried[i] = work.carried
        if self._host_bounds:
            self._fill_bounds(inputs, i, work)
        if work.temperature > 0:
            self._fill_uniforms(inputs.uniforms[i], work)

    def _fill_bounds(self, inputs: Inputs, i: int, work: Work) -> None:
        start = work.start + work.slack
        width, furthest = inputs.tokens.shape[1], start + len(work.tokens) + self.num_drafts + 1
        inputs.bounds[i * width : (i + 1) * width] = np.minimum(start + 1 + np.arange(width), self.max_len)
        for bounds in inputs.draft_bounds:
            width = len(bounds) // len(inputs.slot)
            bounds[i * width : (i + 1) * width] = min(furthest, self.max_len)

    def _fill_uniforms(self, uniforms: np.ndarray, work: Work) -> None:
        width = len(uniforms) - self.num_drafts
        if self._matched:
            width += work.slack  # no drafts are drawn
            uniforms[:width] = matched_uniforms(work.seed, work.sample, work.output_index, width)
            return
        # Keyed by the engine's K, not the bucket's: neighbours that widen the bucket change no number.
        drawn = step_uniforms(work.seed, work.sample, work.output_index, self.num_drafts)
        uniforms[: width - 1] = drawn[: width - 1]
        uniforms[width - 1] = drawn[self.num_drafts]
        uniforms[width:] = drawn[self.num_drafts + 1 : -1]


def implementation(model_impl: str) -> tuple[Any, type[ModelRunner]]:
    """Whose network is the target, and the runner that feeds it, by ``model_impl``."""
    if model_impl == "mindformers":
        from ms_spec.mindformers_runner import MindformersRunner
        from ms_spec.models.mindformers_qwen3 import MindformersQwen3

        return MindformersQwen3, MindformersRunner
    return Decoder, ModelRunner


class _Watched:
    """A checkpoint that calls ``progress`` whenever something is read from it."""

    def __init__(self, checkpoint: Any, progress: Callable[[], None]) -> None:
        self._checkpoint, self._progress = checkpoint, progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def read(self, *arguments: Any) -> np.ndarray:
        self._progress()
        return self._checkpoint.read(*arguments)


def build_runner(
    config: EngineConfig,
    limits: Limits,
    loaded: Loaded,
    draft: Draft | None,
    backend: Backend,
    progress: Callable[[], None],
    here: tuple[Group, int] | None = None,
) -> ModelRunner:
    """Loads the weights onto the device and makes the step Cells. Nothing is compiled yet.

    ``limits``: of this configuration, with this draft. ``progress`` is called now and then; what it raises ends the
    work. ``here``: the workers that share the model, and its number among theirs; None: it is in one piece.

    Raises:
        ValueError: a checkpoint does not fit its config.
    """
    device, dtype = device_of(config), weights_dtype(config, loaded.config)
    make_runner: Any
    network, make_runner = implementation(config.model_impl)
    shard = Shard() if here is None else here[0].shard
    sizes = limits.num_blocks, limits.block_size, limits.max_model_len
    target = network(part(loaded.config, shard), shared_out(backend, shard), *sizes, dtype)
    speculation, sampler = config.speculative_config, config.additional_config.rejection_sampler_config
    proposer = None
    if speculation is not None:
        drafting = beside(backend, shard)
        if draft is not None and config.draft_ranks > 1:
            draft, drafting = draft.part(shard), shared_out(backend, shard)
        site = Site(target, draft, *sizes, limits.max_num_seqs, dtype)
        proposer = build_proposer(speculation, drafting, site)
    num_drafts = limits.num_speculative_tokens
    method = speculation.rejection_sample_method if speculation else None
    longest = min(limits.prefill_chunk, backend.chunks[-1])
    chunks = sorted({min(chunk, longest) for chunk in backend.chunks})
    if here is not None:
        from ms_spec.parallel_runner import ParallelRunner

        make_runner = partial(ParallelRunner, *here)
    runner: ModelRunner = make_runner(
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
        proposer=proposer,
        rule_options={
            "method": "block" if config.block_verify else method or "standard",
            "entropy": sampler.enable_entropy_verify,
            "posterior_threshold": sampler.posterior_threshold,
            "posterior_alpha": sampler.posterior_alpha,
        },
        max_logprobs=limits.max_logprobs,
        eager=config.eager,
        carries=runs_ahead(config),
    )
    vocabulary = dict.fromkeys(("embed_tokens", "lm_head"), loaded.config.vocab_size)
    checkpoint = sharded(_Watched(loaded.checkpoint, progress), loaded.config, shard, vocabulary)
    load_weights(target.weights(), checkpoint, cache_key=backend.name)
    if proposer is not None and draft is not None:
        load_weights(proposer.weights(), _Watched(draft.checkpoint, progress), cache_key=backend.name)
    runner.meet()
    return runner
