"""Feeds a target that is mindformers' network: graph inputs under the names that its kernels look for."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, nn

from ms_spec.models.mindformers_limits import METHODS
from ms_spec.runner import Inputs, ModelRunner
from ms_spec.work import Work


class NamedLengths(nn.Cell):
    """A step of which two inputs, int32 [n] each, are called as PagedAttention's kernels want them called."""

    def __init__(self, step: nn.Cell) -> None:
        super().__init__()
        self.step = step

    def construct(
        self,
        bias,
        bad_words,
        slot,
        tokens,
        start,
        block_tables,
        batch_valid_length,
        q_seq_lens,
        sampling,
        banned,
        banned_until,
        penalties,
        asked,
        limit,
        next_token,
        uniforms,
    ):
        # Each by name: with "*others" MindSpore forgets the names of all inputs.
        lengths = (batch_valid_length, q_seq_lens)
        return self.step(
            *(bias, bad_words, slot, tokens, start, block_tables, lengths, sampling, banned, banned_until),
            *(penalties, asked, limit, next_token, uniforms),
        )


class LengthInputs(Inputs):
    """``bounds`` is batch_valid_length, and q_seq_lens follows it: all columns of each request."""

    def arrays(self) -> list[np.ndarray]:
        n, w = self.tokens.shape
        arrays = super().arrays()
        at = 1 + next(i for i, array in enumerate(arrays) if array is self.bounds)
        return [*arrays[:at], np.full(n, w, np.int32), *arrays[at:]]


class MindformersRunner(ModelRunner):
    """See :class:`ms_spec.models.mindformers_qwen3.MindformersQwen3` for what its lengths and block tables are."""

    inputs_type = LengthInputs

    def __init__(self, *parts: Any, proposer: Any, **options: Any) -> None:
        if proposer is not None and (proposer.grids(1) or proposer.taps):
            raise ValueError(
                f"model_impl = 'mindformers': {type(proposer).__name__} runs a network of its own or looks at the "
                f"target's states; beside mindformers' network only {' and '.join(METHODS)} draft"
            )
        super().__init__(*parts, proposer=proposer, **options)

    def _step(self, bucket: tuple[str, int, int], *parts: Any) -> nn.Cell:
        return NamedLengths(super()._step(bucket, *parts))

    def _new_inputs(self, bucket: tuple[str, int, int]) -> Inputs:
        inputs = super()._new_inputs(bucket)
        _, n, w = bucket
        inputs.block_tables = np.zeros((n, -(-(self.max_len + w) // self.block_size)), np.int32)
        inputs.bounds = np.full(n, w, np.int32)
        inputs.tensors = tuple(Tensor.from_numpy(array) for array in inputs.arrays())
        return inputs

    def _fill_bounds(self, inputs: Inputs, i: int, work: Work) -> None:
        inputs.bounds[i] = work.start + inputs.tokens.shape[1]
