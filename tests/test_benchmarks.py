"""The benchmarks themselves, on a toy scale: that they measure what they say and write it down well."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tiny import tiny_model  # noqa: E402

from benchmarks import (  # noqa: E402
    distribution,
    draft_cost,
    figures,
    lossless,
    oracle,
    prompts,
    random_drafts,
    run,
    suffix,
    timing,
)
from benchmarks.bench import Answer, Bench, answer  # noqa: E402
from benchmarks.figures import TARGETS, Figure  # noqa: E402
from benchmarks.sides import Sides, differences  # noqa: E402
from ms_spec.models.drafts import open_draft  # noqa: E402
from ms_spec.models.loading import load  # noqa: E402


def test_sides_alternate():
    calls = []

    def side(name, seconds):
        def call():
            calls.append(name)
            return seconds

        return call

    seen = timing.interleave({"a": side("a", 3.0), "b": side("b", 1.5)}, rounds=4, warm_up=1)
    assert seen == {"a": [3.0] * 4, "b": [1.5] * 4}
    assert calls == ["b", "a", "a", "b", "b", "a", "a", "b", "b", "a"]
    assert timing.ratio(seen["a"], seen["b"]) == 2
    assert timing.ratio([1, 2, 90], [1, 1, 1]) == 2  # one outlier moves nothing
    assert timing.spread([2, 4], [1, 1]) == [2, 4]
    assert timing.milliseconds([0.001, 0.002, 0.003])["median"] == 2


def test_targets_point_the_right_way():
    for name, target in TARGETS.items():
        assert target.reached(target.limit), name
        better = 0.1 if target.sense == ">=" else -0.1
        assert target.reached(target.limit + better) and not target.reached(target.limit - better), name
    assert TARGETS["host_share"].reach == "<= 10.0 %"
    assert TARGETS["ngram_repeat"].reach == ">= 2.50x"
    assert TARGETS["graphs_after_warmup"].reach == "<= 0"


@pytest.mark.parametrize("path", [prompts.OWN, prompts.REPEAT], ids=lambda path: path.name)
def test_own_prompts(path):
    read = prompts.read(path)
    assert len({one.question_id for one in read}) == len(read)
    assert len({one.text for one in read}) == len(read)
    if path == prompts.OWN:
        assert {one.category for one in read} == set(prompts.CATEGORIES)
        assert all(len(prompts.first_of(read, name, 9)) == 2 for name in prompts.CATEGORIES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no prompts"),
        ("{}", "line 1: expected an object"),
        ('\n{"question_id": 1, "category": "qa", "turns": []}', "line 2: turns has no text"),
        ("no JSON", "line 1: expected an object"),
    ],
)
def test_wrong_prompt_files(tmp_path, content, message, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert run.main(["--prompts", str(file)]) == 2
    assert message in capsys.readouterr().err
    assert run.main(["--prompts", str(tmp_path / "absent.jsonl")]) == 2


def test_choice_of_rows(capsys):
    assert run.choose(None) == list(run.groups())
    assert run.choose("ngram_repeat, host") == ["ngram", "host"]
    assert sorted(name for _, names, _ in run.groups().values() for name in names) == sorted(TARGETS)
    assert run.main(["--only", "hots"]) == 2
    assert "hots" in capsys.readouterr().err


def test_long_prompts_are_cut():
    bench = Bench(str(tiny_model(layers=1)), [])
    short, long = bench.chat("hello"), bench.chat("hello " * 2000)
    assert len(short) < 30
    room = bench.max_len - bench.new_tokens
    assert 0.9 * room < len(long) <= room
    assert long[-1] == short[-1]  # the template's end is still there


def test_a_run_on_a_tiny_model(tmp_path, capsys, monkeypatch):
    costs = [f"{method}_cost" for method in random_drafts.WRITERS if method != "eagle3"]
    # Every engine takes seconds to compile.
    monkeypatch.setattr(draft_cost, "WRITERS", {"eagle3": random_drafts.eagle3})
    monkeypatch.setattr(draft_cost, "DRAFTS", 2)
    monkeypatch.setattr(suffix, "SUFFIX", oracle.HOST)
    output, page = tmp_path / "bench.jsonl", tmp_path / "page.md"
    only = "plain_vs_transformers,widths,ngram,suffix,oracle,draft_cost,host,verification,batch8,graphs"
    assert run.main(["--quick", "--model", str(tiny_model(layers=1)), "--only", only, "--output", str(output)]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    expected = [name for name in TARGETS if name not in ("first_token_warm", "first_token_cold")]
    expected = [name for name in expected if not name.endswith("_memory") and name not in costs]
    assert sorted(one["name"] for one in records) == sorted(expected)
    for one in records:
        assert {"what", "reach", "seen", "unit", "ok", "details", "config", "versions", "cpu", "date"} <= set(one)
        assert np.isfinite(one["seen"])
        assert one["ok"] == TARGETS[one["name"]].reached(one["seen"]) or one["seen"] == pytest.approx(
            TARGETS[one["name"]].limit, abs=1e-4
        )
    by_name = {one["name"]: one for one in records}
    assert by_name["ngram_differences"]["seen"] == by_name["graphs_after_warmup"]["seen"] == 0
    assert by_name["suffix_differences"]["seen"] == 0 and by_name["suffix_again"]["details"]["accepted"] > 0
    assert by_name["suffix_again"]["details"]["prompts"] == by_name["suffix_ngram"]["details"]["prompts"] == 4
    right = by_name["oracle"]["details"]
    assert right["identical"] and right["accepted"] == right["drafted"] > 0 and right["tokens_per_step"] > 2
    assert set(by_name["eagle3_cost"]["details"]["step_ms"]) == {"plain", "0", "1", "2"}
    assert by_name["batch8"]["details"]["answers_that_differ"] == 0
    assert by_name["plain_vs_transformers"]["details"]["first_ids_equal_to_float32"] == 8
    assert set(by_name["ngram_categories"]["details"]["speedup"]) == set(prompts.CATEGORIES)
    capsys.readouterr()
    assert run.main(["--markdown", str(output)]) == 0
    page.write_text(capsys.readouterr().out)
    rows = page.read_text().splitlines()
    assert len(rows) == len(TARGETS) + 2
    assert sum("not measured yet" in row for row in rows) == 4 + len(costs)


def test_shares_of_the_weights():
    smollm2 = {"hidden_size": 576, "intermediate_size": 1536, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3}
    config = replace(load(tiny_model(layers=1)).config, **smollm2, head_dim=64, vocab_size=49152)
    seen = {method: round(100 * share, 1) for method, share in draft_cost.shares(config).items()}
    assert seen == {"eagle3": 6.6, "medusa": 85.2, "mtp": 24.2, "dflash": 35.4}


@pytest.mark.parametrize("layers", [1, 7])
def test_random_drafts_fit_their_target(tmp_path, layers):
    path = tiny_model(layers=layers)
    for method, write in random_drafts.WRITERS.items():
        target, folder = load(path), tmp_path / method
        write(folder, target.config, 4)
        if method == "mtp":
            target = load(folder, str(path))
            assert target.config.num_layers == layers and target.config.hidden_size == 64
        draft = open_draft(method, None if method == "mtp" else folder, target)
        assert (draft.method, draft.shape.hidden_size) == (method, 64)
        assert draft.suggested_tokens in (None, 4) or method == "mtp"
        assert {draft.checkpoint.dtype(name) for name in draft.checkpoint.names()} == {"bfloat16"}


def test_differences_are_counted_by_prompt():
    one, two, three = (prompts.Prompt(number, "qa", ("why?",)) for number in range(3))

    def sides(**ids):
        made = Sides.__new__(Sides)
        made.seen = {
            prompt: {name: [Answer(list(answer), 1, 0.1, 1.0, 0, 0)] for name, answer in ids.items()}
            for prompt in (one, two)
        }
        return made

    same, other = sides(plain=(1, 2), ngram=(1, 2)), sides(plain=(1, 3))
    assert differences([same]) == differences([other]) == 0
    assert differences([same, other]) == 2
    assert differences([same, other], [one]) == 1
    same.seen[three] = {"plain": [], "ngram": []}
    assert differences([same]) == 0
    assert differences([sides(plain=(1, 2), ngram=(1,))]) == 2


def test_replay_drafts_what_it_has_learnt():
    replay = oracle.Replay()
    replay.learn([1, 2], [3, 4, 5, 6])
    replay.start("a", [1, 2])
    replay.start("b", [2, 1])
    replay.extend("a", [3])
    replay.extend("b", [3])
    assert replay.draft("a", 2) == [4, 5] and replay.draft("b", 2) == []
    replay.extend("a", [4, 5])
    assert replay.draft("a", 4) == [6]
    replay.stop("a")
    replay.stop("a")


def test_a_failure_is_told(tmp_path, monkeypatch, capsys):
    def broken(bench):
        yield Figure("batch8", 3.5)
        raise RuntimeError("nothing works")

    monkeypatch.setattr(run, "groups", lambda: {"batch": (broken, ("batch8",), 1)})
    output = tmp_path / "bench.jsonl"
    assert run.main(["--quick", "--model", str(tiny_model(layers=1)), "--output", str(output)]) == 1
    assert "nothing works" in capsys.readouterr().out
    assert [json.loads(line)["seen"] for line in output.read_text().splitlines()] == [3.5]


def test_lossless_on_a_tiny_model(layers=1):
    said = []
    settings = [
        lossless.Setting(4, 2, 64),
        lossless.Setting(0, 2, 64, tight=True),
        lossless.Setting(4, 2, 64, tight=True),
        lossless.Setting(4, 2, 64, tight=True, ahead=True),
    ]
    ids = [[5 + i, 6, 7, 8] * 8 for i in range(4)]
    assert lossless.check(str(tiny_model(layers=1)), ids, 40, settings, said.append) == (0, 0)
    assert "0 differences in 4 configurations x 4 prompts" in said[-1]
    assert lossless.compare([[1, 2, 3]], [[1, 2, 4]]) == ["prompt 0, token 2: [3] became [4]"]
    nothing = lossless.Outcome([], 0, 0, 0, 0, 1.0)
    assert not nothing.proves(lossless.Setting(4, 1, 64))
    assert not nothing.proves(lossless.Setting(0, 1, 64, tight=True))
    assert not nothing.proves(lossless.Setting(0, 1, 64, ahead=True))
    assert nothing.proves(lossless.Setting(0, 1, 64))


def test_chi_square_sees_a_wrong_distribution():
    rng = np.random.default_rng(0)
    wanted = {0: 0.5, 1: 0.3, 2: 0.2}
    right = [int(x) for x in rng.choice(3, 2000, p=[0.5, 0.3, 0.2])]
    wrong = [int(x) for x in rng.choice(3, 2000, p=[0.4, 0.4, 0.2])]
    assert distribution.p_value(wanted, right) > 1e-3
    assert distribution.p_value(wanted, wrong) < 1e-6
    assert distribution.p_value(wanted, [*right, 3]) == 0
    p = distribution.transformed(rng.normal(size=300) * 2)
    assert p.sum() == pytest.approx(1) and 1 < np.count_nonzero(p) <= distribution.TOP_K
    q = distribution.bad_drafter(p)
    assert q.sum() == pytest.approx(1) and q[p == 0].sum() == pytest.approx(0.5)


def test_answers_are_timed_from_the_first_token():
    bench = Bench(str(tiny_model(layers=1)), [], quick=True)
    try:
        got = answer(bench.engine(), [5, 6, 7], 9, stops=False)
    finally:
        bench.close()
    assert len(got.ids) == 9 and got.tokens == 8 and got.seconds > 0


def test_setting_names_the_machine():
    setting = figures.setting()
    assert setting["cpu"] and setting["cores"] >= 1 and setting["versions"]["mindspore"] != "not installed"
