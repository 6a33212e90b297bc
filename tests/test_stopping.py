"""Where a request ends: exactly there, whatever else lies in the same step."""

from __future__ import annotations

import random

import pytest
from toy_runner import ToyDecoder, digest, greedy, reference, run, sampled, toy_engine

from ms_spec.sampling_params import SamplingParams
from ms_spec.stopping import Stopping

PROMPT = [digest("stop", i) % 64 for i in range(11)]


def plain(most=40, **fields):
    return reference(PROMPT, greedy(most, **fields))


def first_at(ids):
    """(position, id) of every id that occurs for the first time there."""
    return [(j, token) for j, token in enumerate(ids) if token not in ids[:j]]


def test_stop_inside_an_accepted_block():
    ids = plain()
    places = [(j, token) for j, token in first_at(ids) if 1 <= j <= 12]
    assert len(places) >= 5
    for j, token in places:
        for by_eos in (True, False):
            engine, _ = toy_engine("oracle", eos=(token,) if by_eos else (), text=True, num_speculative_tokens=5)
            params = greedy(40) if by_eos else greedy(40, stop_token_ids=[token])
            (output,) = run(engine, [(PROMPT, params)])
            out = output.outputs[0]
            assert out.token_ids == ids[: j + 1]
            assert out.finish_reason == "stop"
            assert out.stop_reason == (None if by_eos else token)
            assert out.text == "".join(map(ToyDecoder.text, ids[:j]))


@pytest.mark.parametrize(("place", "length", "reason"), [(3, 3, "stop"), (6, 5, "length"), (5, 5, "stop")])
def test_stop_before_length(place, length, reason):
    # Six tokens come in one step. The stop is number `place`, max_tokens is 5.
    stopping = Stopping(SamplingParams(max_tokens=5, stop_token_ids=[9]), (), None, 5)
    kept = []
    for number in range(1, 7):
        kept.append(9 if number == place else number + 20)
        _, why, what = stopping.push(kept[-1])
        if why is not None:
            break
    assert (len(kept), why, what) == (length, reason, 9 if reason == "stop" else None)


def test_ignore_eos_and_min_tokens():
    ids = plain()
    often = max(set(ids), key=ids.count)
    assert ids.count(often) > 1
    engine, _ = toy_engine("oracle", eos=(often,), num_speculative_tokens=5)
    (output,) = run(engine, [(PROMPT, greedy(40, ignore_eos=True))])
    assert output.outputs[0].token_ids == ids
    params = greedy(40, min_tokens=10)
    (output,) = run(engine, [(PROMPT, params)])
    assert output.outputs[0].token_ids == reference(PROMPT, params, eos=(often,))
    assert often not in output.outputs[0].token_ids[:10]


def test_eos_comes_before_stop_token_ids():
    ids = plain()
    for ignore, reason in ((False, None), (True, ids[4])):
        engine, _ = toy_engine("oracle", eos=(ids[4],))
        (output,) = run(engine, [(PROMPT, greedy(40, stop_token_ids=[ids[4]], ignore_eos=ignore))])
        assert output.outputs[0].stop_reason == reason
        assert output.outputs[0].finish_reason == "stop"


class Letters:
    """A token is a text."""

    def push(self, ids):
        return "".join(ids)

    def finish(self):
        return ""


def cut(pieces, stop, **fields):
    """Text, number of tokens, reason, stop string."""
    stopping = Stopping(SamplingParams(stop=stop, max_tokens=None, **fields), (), Letters(), 10**6)
    text, count = "", 0
    for piece in pieces:
        count += 1
        released, why, what = stopping.push(piece)
        text += released
        if why is not None:
            return text, count, why, what
    return text + stopping.close(), count, None, None


def test_stop_strings_are_cut_exactly():
    assert cut(["hello", " wo", "rld"], "o w") == ("hell", 2, "stop", "o w")
    assert cut(["hello", " wo", "rld"], "o w", include_stop_str_in_output=True) == ("hello w", 2, "stop", "o w")
    assert cut(["ab", "ab", "ac"], "abac") == ("ab", 3, "stop", "abac")
    assert cut(["ab", "ab"], "abac") == ("abab", 2, None, None)
    assert cut(["xabc"], ["abc", "b"]) == ("xa", 1, "stop", "b")
    assert cut(["x", "a", "b"], ["b", "ab"]) == ("x", 3, "stop", "ab")
    assert cut(["a", "", "b"], "ab") == ("", 3, "stop", "ab")
    assert cut(["END", "a", "END"], "END", min_tokens=2) == ("ENDa", 3, "stop", "END")
    assert cut(["a", "EN", "D", "b"], "END", min_tokens=2) == ("a", 3, "stop", "END")


def test_cutting_into_tokens_does_not_matter():
    rng = random.Random(4)
    for _ in range(300):
        text = "".join(rng.choice("aab") for _ in range(20))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        whole = cut(list(text), stops)
        marks = sorted({0, 20, *(rng.randrange(20) for _ in range(5))})
        pieces = [text[a:b] for a, b in zip(marks, marks[1:])]
        assert cut(pieces, stops)[0] == whole[0]
        assert cut(pieces, stops)[2:] == whole[2:]
        assert not any(stop in whole[0] for stop in stops)


def test_nothing_held_back_gets_lost():
    stopping = Stopping(SamplingParams(stop="abc", max_tokens=2), (), Letters(), 2)
    assert stopping.push("xa") == ("x", None, None)
    assert stopping.push("b") == ("ab", "length", None)


@pytest.mark.parametrize("drafter", ["none", "oracle", "ngram"])
def test_stop_strings_do_not_depend_on_drafts(drafter):
    text = "".join(map(ToyDecoder.text, plain(60)))
    for begin in range(3, 60, 4):
        stop = text[begin : begin + 5]
        engine, _ = toy_engine(drafter, text=True, num_speculative_tokens=6)
        (output,) = run(engine, [(PROMPT, greedy(60, stop=[stop]))])
        out = output.outputs[0]
        assert out.text == text[: text.index(stop)]
        assert out.stop_reason == stop
        assert output.metrics.num_accepted_tokens <= output.metrics.num_draft_tokens
        full = "".join(map(ToyDecoder.text, out.token_ids))
        assert stop in full


def test_text_of_an_aborted_request_is_whole():
    engine, _ = toy_engine("oracle", text=True)
    request = engine.add_request(PROMPT, sampled(1, 30, stop=["never "]))
    for _ in range(4):
        engine.step()
    engine.abort(request.output.request_id)
    out = request.output.outputs[0]
    assert out.text == "".join(map(ToyDecoder.text, out.token_ids))
