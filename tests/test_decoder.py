"""Which states a decoder gives, and that it does not matter to them which others are wanted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from forward import BACKENDS
from mindspore import Tensor, nn, ops
from tiny import tiny_model

from ms_spec.models.decoder import Decoder
from ms_spec.models.loading import load
from ms_spec.models.weights import load_weights
from ms_spec.runtime import graph_thread, setup_mindspore

LAYERS = 4


class _States(nn.Cell):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def construct(self, tokens: Tensor, start: Tensor, tables: Tensor, bounds: Tensor) -> Tensor:
        return ops.stack(self.decoder(self.decoder.rows(tokens, start, tables, bounds)))


def states(backend: str, *wishes: Any) -> list[np.ndarray]:
    """Of two chunks of one context, one array [places, 24, hidden] for each wish; None: whatever a decoder keeps."""

    def run() -> list[np.ndarray]:
        setup_mindspore("cpu")
        loaded = load(tiny_model("qwen3", layers=LAYERS))
        decoder = Decoder(loaded.config, BACKENDS[backend](), 4, 16, 48, "float32")
        load_weights(decoder.weights(), loaded.checkpoint, cache_key=None)
        ids = np.random.default_rng(3).integers(3, 500, (1, 24)).astype(np.int32)
        seen = []
        for wish in wishes:
            if wish is not None:
                decoder.keep(wish)
            cell = _States(decoder)
            inputs = (np.array([[1, 2, 3]], np.int32), np.ones(1, np.int32))
            parts = [
                cell(*(Tensor(x) for x in (ids[:, at : at + 12], np.array([at], np.int32), *inputs))).asnumpy().copy()
                for at in (0, 12)
            ]
            seen.append(np.concatenate(parts, 1))
        return seen

    return graph_thread().run(run)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_states_do_not_depend_on_who_looks(backend: str) -> None:
    every, last, some, first = states(backend, None, (), (1, 3), [0])
    assert every.shape[0] == LAYERS + 1 and np.isfinite(every).all()
    assert np.abs(np.diff(every, axis=0)).max((1, 2)).min() > 1e-3  # each layer does something
    for kept, places in ((last, [LAYERS]), (some, [1, 3, LAYERS]), (first, [0, LAYERS])):
        np.testing.assert_array_equal(kept, every[places])
