"""Sampling parameters: vLLM's names, every value checked."""

from __future__ import annotations

import dataclasses
import math
from copy import deepcopy

import numpy as np
import pytest

from ms_spec.parts import sampling_defaults
from ms_spec.sampling_params import HOTTEST, NEUTRAL, SamplingParams


def test_defaults():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.n) == (1.0, 1.0, 0, 0.0, 1)
    assert (params.max_tokens, params.min_tokens, params.seed, params.stop, params.stop_token_ids) == (
        16,
        0,
        None,
        [],
        [],
    )
    assert not params.greedy
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(top_k=4) == SamplingParams(top_k=4) != SamplingParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-1, math.nan, math.inf, "x", True)],
        *[("top_p", value) for value in (0, 0.0, 1.1, -1, math.nan, "1")],
        *[("top_k", value) for value in (-2, 1.5, "3", True)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
        *[("max_tokens", value) for value in (0, -1, 1.5, "5", True)],
        *[("min_tokens", value) for value in (-1, 1.5)],
        *[("seed", value) for value in ("a", 1.5, -1, 2**64, True)],
        *[("n", value) for value in (0, -1, 1.0, "2", 10**9)],
        *[("temperature", value) for value in (10**400, [1])],
        *[("stop", value) for value in ("", ["a", ""], [1], 3)],
        *[("stop_token_ids", value) for value in (5, ["a"], [-1], [1.5], {1, "a"}, [True], np.array([1.5]), "12")],
        *[("ignore_eos", value) for value in (1, "yes")],
        *[("presence_penalty", value) for value in (2.1, -2.1, True, "1", math.nan)],
        *[("frequency_penalty", value) for value in (2.1, -2.1, math.inf, [1])],
        *[("repetition_penalty", value) for value in (0, 0.0, -1, math.inf, math.nan, True)],
        *[
            ("logit_bias", value)
            for value in ([3], {-1: 1.0}, {3: "x"}, {3: math.nan}, {3: math.inf}, {"a": 1}, {1.5: 1})
        ],
        *[("allowed_token_ids", value) for value in ([], 5, ["a"], [-1], [True])],
        *[("bad_words", value) for value in ("", ["a", ""], [1], 3)],
        *[("logprobs", value) for value in (-1, 1.5, "5")],
        *[("prompt_logprobs", value) for value in (-1, 1.5, "5")],
        ("best_of", 2),
    ],
)
def test_wrong_values(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


def test_other_faults():
    with pytest.raises(ValueError, match="'temprature' is unknown; did you mean 'temperature'"):
        SamplingParams(temprature=1)
    with pytest.raises(ValueError, match="min_tokens = 5: must be <= max_tokens = 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(ValueError, match="n = 2: must be 1 with temperature = 0"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(ValueError, match="stop needs text"):
        SamplingParams(stop="x", detokenize=False)


def test_neutral_and_convenient_values():
    for name, values in NEUTRAL.items():
        for value in values:
            assert SamplingParams(**{name: value}) == SamplingParams()
    assert SamplingParams(stop="a").stop == SamplingParams(stop=["a"]).stop == SamplingParams(stop=("a",)).stop
    assert SamplingParams(stop_token_ids={3, 1}).stop_token_ids == [1, 3]
    assert SamplingParams(top_k=-1).top_k == -1
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(seed=0).seed == 0
    assert SamplingParams(seed=2**64 - 1).seed == 2**64 - 1
    assert SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5)).max_tokens == 3
    for field in dataclasses.fields(SamplingParams):
        if field.name != "max_tokens":
            assert SamplingParams(**{field.name: None}) == SamplingParams()
    assert SamplingParams(logit_bias={"3": 1, np.int64(4): 2}).logit_bias == {3: 1.0, 4: 2.0}
    assert SamplingParams(logit_bias={}, bad_words=[], logprobs=False) == SamplingParams()
    assert SamplingParams(allowed_token_ids={3, 1}).allowed_token_ids == [1, 3]
    assert SamplingParams(bad_words="a").bad_words == ["a"]
    assert SamplingParams(logprobs=0).logprobs == 0 and SamplingParams(logprobs=True).logprobs == 1


def test_integers_of_numpy():
    params = SamplingParams(
        stop_token_ids=np.array([3, 1]), seed=np.uint64(7), max_tokens=np.int32(3), top_k=np.int64(2), n=np.int64(2)
    )
    assert params == SamplingParams(stop_token_ids=[3, 1], seed=7, max_tokens=3, top_k=2, n=2)
    values = [*params.stop_token_ids, params.seed, params.max_tokens, params.top_k, params.n]
    assert all(type(value) is int for value in values)
    assert SamplingParams(stop_token_ids=[np.int64(5)]).stop_token_ids == [5]


def test_clone_and_assignment():
    params = SamplingParams(stop=["a"], stop_token_ids=[1], seed=3)
    copy = params.clone()
    assert copy == params and copy is not params
    copy.stop.append("b")
    copy.temperature = 0.5
    assert (params.stop, params.temperature) == (["a"], 1.0)
    params.stop = "ab"
    assert params.clone().stop == ["ab"]
    for name, value in (("temperature", -5), ("max_tokens", 0), ("seed", "x")):
        changed = SamplingParams()
        setattr(changed, name, value)
        with pytest.raises(ValueError, match=f"^{name} = "):
            changed.clone()
    params.best_of = None
    with pytest.raises(ValueError, match="best_of = 5: not supported yet"):
        params.best_of = 5
    with pytest.raises(ValueError, match="'temprature' is unknown; did you mean 'temperature'"):
        params.temprature = 1
    assert deepcopy(params).clone() == params.clone()


def test_the_hottest_temperature():
    assert SamplingParams(temperature=1e300).temperature == HOTTEST
    assert SamplingParams(temperature=10**30).temperature == HOTTEST
    with np.errstate(all="raise"):
        np.zeros(1, np.float32)[0] = HOTTEST


def test_defaults_of_a_checkpoint(caplog):
    caplog.set_level("INFO", logger="ms_spec")
    taken = sampling_defaults(
        {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True, "top_p": 7}
    )
    assert taken == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert "temperature = 0.6, top_k = 20, repetition_penalty = 1.1" in caplog.text
    assert sampling_defaults({"max_new_tokens": 9}) == {"max_tokens": 9}
    assert sampling_defaults({}) == {}
