"""Methods side by side: what runs, what is counted, what is shown, and what is refused before anything runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_drafts
from fake_llm import FakeLLM

from ms_spec import cli, job
from ms_spec.compare_methods import Method
from ms_spec.comparison import Answers, Figures, figures_of
from ms_spec.errors import EngineError
from ms_spec.metrics import Metrics

PROMPTS = '{"question_id": 1, "category": "qa", "turns": ["one", "more"]}\n{"prompt": "two"}\n"three"\n'
STEPS = 4


class Racer(FakeLLM):
    """Takes 1 s for 8 tokens without drafts. With K of them: half of it, and the text's end may differ."""

    alive = 0
    differs: set[str] = set()
    broken: dict[int, BaseException] = {}

    def __init__(self, **arguments: Any):
        assert Racer.alive == 0, "two models at a time"
        Racer.alive += 1
        super().__init__(**arguments)
        self.drafts = (arguments.get("speculative_config") or {}).get("num_speculative_tokens", 0)

    def close(self) -> None:
        Racer.alive -= 1
        super().close()

    def stream(self, prompts: list[Any], params: list[Any]) -> Any:
        if self.drafts in self.broken:
            raise self.broken[self.drafts]
        for position, output in super().stream(prompts, params):
            if self.drafts and str(prompts[0]) in self.differs and output.finished and output.error is None:
                output.outputs[0].token_ids[-1] += 1
            yield position, output

    def _metrics(self) -> Metrics:
        if not self.drafts:
            return Metrics(num_steps=8, num_decode_tokens=8, decode_seconds=1.0)
        return Metrics(
            num_steps=STEPS,
            num_drafts=3,
            num_draft_tokens=3 * self.drafts,
            num_accepted_tokens=4,
            num_decode_tokens=8,
            acceptance_per_position=[3, 1, *[0] * (self.drafts - 2)],
            decode_seconds=0.5,
            draft_seconds=0.125,
            verify_seconds=0.25,
        )


@pytest.fixture(autouse=True)
def racer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "make_llm", lambda arguments: Racer(**arguments))
    monkeypatch.setattr(FakeLLM, "made", [])
    for name, value in {"alive": 0, "differs": set(), "broken": {}}.items():
        monkeypatch.setattr(Racer, name, value)
    monkeypatch.delenv("MS_SPEC_DEBUG", raising=False)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    (tmp_path / "p.jsonl").write_text(PROMPTS)
    return str(tmp_path / "p.jsonl")


def call(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = cli.run_app(["compare", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def rows(out: str) -> dict[str, list[str]]:
    """The table's cells by method."""
    lines = out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("---")) + 1
    return {line.split()[0]: line.split()[1:] for line in lines[first : lines.index("", first)]}


def test_the_table(prompts: str, capsys: Any) -> None:
    code, out, err = call(capsys, "--prompts", prompts)
    assert (code, err) == (0, "[none: method 1 of 2]\n[ngram: method 2 of 2]\n")
    assert out.startswith("smollm2-135m, K = 4: 3 prompts one at a time, greedy, up to 128 tokens\n")
    assert rows(out) == {
        "none": ["-", "8.0", "1.00x", "1.00", "-", "100.0%", "-"],
        "ngram": ["4", "16.0", "2.00x", "2.00", "33.3%", "25.0%", "all"],
    }
    assert "against none;" in out and max(map(len, out.splitlines())) <= 79


def test_all_methods_get_the_same_in_the_same_order(prompts: str, capsys: Any) -> None:
    configs = ['fast={"method": "ngram", "num_speculative_tokens": 2}', '{"method": "ngram", "prompt_lookup_max": 3}']
    options = [part for config in configs for part in ("-sc", config)]
    line = "--methods none,fast,ngram --model me/M --dtype float32 --max-model-len 99 --limit 2 --chat"
    sampling = "--max-tokens 9 --temperature 0.5 --top-p 0.9 --top-k 3 --seed 11 --num-speculative-tokens 6"
    code, out, _ = call(capsys, "--prompts", prompts, *line.split(), *sampling.split(), *options)
    assert code == 0 and list(rows(out)) == ["none", "fast", "ngram"] and "K = 2, 6" in out
    assert "temperature 0.5, seed 11" in out
    shared = {"model": "me/M", "dtype": "float32", "max_model_len": 99, "max_num_seqs": 1}
    assert [engine.arguments for engine in FakeLLM.made] == [
        shared,
        {**shared, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {**shared, "speculative_config": {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3}},
    ]
    assert all(engine.closed for engine in FakeLLM.made)
    said = [[(call[0], call[1]) for call in engine.calls] for engine in FakeLLM.made]
    assert said[0] == said[1] == said[2]
    (warm_up, (one, (params,)), (two, _)) = said[0]
    assert warm_up[0][0].startswith("One, two") and warm_up[1][0].max_tokens <= 16
    assert [prompt[0]["prompt"] for prompt in (one, two)] == ["user: one?", "user: two?"]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (9, 0.5, 0.9, 3, 11)


def test_answers_that_differ(prompts: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Racer, "differs", {"two"})
    code, out, _ = call(capsys, "--prompts", prompts, "--methods", "none,ngram")
    assert code == 0 and out.splitlines()[6].endswith("2 of 3")


def test_without_plain_decoding_the_first_is_the_measure(prompts: str, capsys: Any) -> None:
    config = 'slow={"method": "ngram", "num_speculative_tokens": 2}'
    _, out, _ = call(capsys, "--prompts", prompts, "--methods", "ngram,slow", "-sc", config)
    assert [cells[2] for cells in rows(out).values()] == ["1.00x", "1.00x"] and "against ngram;" in out


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_figures_in_a_file(prompts: str, capsys: Any, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"figures.{suffix}"
    assert call(capsys, "--prompts", prompts, "--output", str(target))[0] == 0
    text = target.read_text()
    plain, ngram = json.loads(text) if suffix == "json" else map(json.loads, text.splitlines())
    assert (plain["method"], plain["speculative_config"], plain["speedup"], plain["identical"]) == (
        "none",
        None,
        1,
        None,
    )
    assert plain["acceptance_rate"] is None and "draft_seconds" not in plain
    assert ngram == {
        "method": "ngram",
        "model": "smollm2-135m",
        "speculative_config": {"num_speculative_tokens": 4, "method": "ngram"},
        "sampling_params": {"temperature": 0.0, "max_tokens": 128, "seed": 0},
        "chat": False,
        "num_prompts": 3,
        "num_refused": 0,
        "num_tokens": 18,
        "decode_seconds": 1.5,
        "tokens_per_second": 16.0,
        "baseline": "none",
        "speedup": 2.0,
        "acceptance_rate": 0.3333,
        "acceptance_rate_per_position": [1.0, 0.3333, 0.0, 0.0],
        "undrafted_steps": 0.25,
        "identical": True,
        "num_identical": 3,
        "num_steps": 12,
        "num_drafts": 9,
        "num_draft_tokens": 36,
        "num_accepted_tokens": 12,
        "mean_acceptance_length": 2.0,
        "acceptance_per_position": [9, 3, 0, 0],
        "draft_seconds": 0.375,
        "verify_seconds": 0.75,
    }
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["p.jsonl", target.name])


def test_a_refused_prompt_counts_for_nobody(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\na bad one\n")
    code, out, err = call(capsys, "--prompts", str(tmp_path / "p.txt"), "--output", str(tmp_path / "f.jsonl"))
    assert code == 2 and err.count("ms-spec: error: prompt 2: prompt is bad; use a good one\n") == 1
    assert "1 prompt one" in out and "only prompts that all methods answered count" in out
    records = [json.loads(line) for line in (tmp_path / "f.jsonl").read_text().splitlines()]
    assert [(one["num_prompts"], one["num_refused"]) for one in records] == [(1, 1), (1, 1)]
    (tmp_path / "p.txt").write_text("bad\n")
    code, out, err = call(capsys, "--prompts", str(tmp_path / "p.txt"))
    assert (code, out) == (2, "") and err.splitlines()[-1] == "ms-spec: error: none: no prompt could be answered"


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (EngineError("the model failed"), 1, "error: the model failed"),
    ],
)
def test_what_had_finished_is_told(
    prompts: str, capsys: Any, tmp_path: Path, monkeypatch: Any, fault: BaseException, code: int, words: str
) -> None:
    monkeypatch.setattr(Racer, "broken", {4: fault})
    files = [str(tmp_path / name) for name in ("f.jsonl", "f.png")]
    got, out, err = call(capsys, "--prompts", prompts, "--output", files[0], "--plot", files[1])
    assert got == code and words in err and "[without ngram]" in err and "Traceback" not in err
    assert list(rows(out)) == ["none"] and Racer.alive == 0
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["f.jsonl.part", "p.jsonl"]


def test_a_method_that_cannot_be_loaded_is_named(prompts: str, capsys: Any, monkeypatch: Any) -> None:
    def make(arguments: dict[str, Any]) -> Racer:
        if "speculative_config" in arguments:
            raise ValueError("the draft does not fit the model")
        return Racer(**arguments)

    monkeypatch.setattr(job, "make_llm", make)
    code, out, err = call(capsys, "--prompts", prompts)
    assert code == 2 and list(rows(out)) == ["none"]
    assert err.splitlines()[-1] == "ms-spec: error: ngram: the draft does not fit the model"


NGRAM = '{"method": "ngram"}'


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "none,ngarm"], ["method 'ngarm' is unknown", "did you mean 'ngram'"]),
        (["--methods", "none,,ngram"], ["a name is empty"]),
        (["--methods", "ngram,ngram"], ["'ngram' is there twice"]),
        (["--methods", "none", "-sc", NGRAM], ["'ngram' is not among --methods"]),
        (["-sc", NGRAM, "-sc", f"ngram={NGRAM}"], ["two for 'ngram'"]),
        (["-sc", f"none={NGRAM}"], ["'none' is plain decoding"]),
        (["-sc", f"a b={NGRAM}"], ["'a b' is no name"]),
        (["-sc", "{}"], ["which method"]),
        (["-sc", "ngram"], ["NAME=JSON"]),
        (["-sc", "ngram={method}"], ["not valid JSON", "column 2"]),
        (["-sc", "ngram=[]"], ["JSON object"]),
        (
            ["-sc", 'x={"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 2}'],
            ["x: ", "prompt_lookup_min"],
        ),
        (["-sc", 'x={"method": "draft_model", "model": "/nowhere/draft"}'], ["x: ", "model: '/nowhere/draft' is"]),
        (["--model", "/nowhere/model"], ["error: model: '/nowhere/model' is no directory"]),
        (["--num-speculative-tokens", "0"], ["--num-speculative-tokens"]),
        (["--limit", "0"], ["--limit"]),
        (["--max-tokens", "0"], ["max_tokens = 0"]),
        (["--dtype", "int3"], ["dtype", "int3"]),
        (["--plot", "/nowhere/x.png"], ["--plot: no such folder: /nowhere"]),
        (["--plot", ".png"], ["--plot", "'.png' is an ending only", "figures.png"]),
        (["--plot", "x.gif"], ["--plot", "must end in .png"]),
        (["--plot", "{tmp}"], ["--plot", "must end in .png"]),
        (["--plot", "{tmp}/folder.png"], ["--plot", "is a folder"]),
        (["--plot", "{tmp}/taken.png"], ["--plot", "cannot be written"]),
        (["--output", "x.csv"], ["--output", "must end in .jsonl or .json"]),
        (["--output", "/nowhere/x.json"], ["--output: no such folder"]),
    ],
)
def test_mistakes_get_one_line(
    prompts: str, capsys: Any, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "taken.png.part").mkdir()
    before = sorted(tmp_path.iterdir())
    code, out, err = call(capsys, "--prompts", prompts, *(one.replace("{tmp}", str(tmp_path)) for one in arguments))
    assert (code, out) == (2, "") and err.startswith("ms-spec: error: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err
    assert not FakeLLM.made and sorted(tmp_path.iterdir()) == before


def test_no_method_runs_before_all_are_sound(prompts: str, capsys: Any) -> None:
    wide = json.dumps({"model": str(tiny_drafts.eagle(hidden=128))})
    for options, words in (
        (["--methods", "none,medusa"], "medusa: speculative_config.model: "),
        (["-sc", f"eagle={wide}"], "eagle: speculative_config.model: "),
    ):
        code, out, err = call(capsys, "--prompts", prompts, "--model", str(tiny_drafts.target()), *options)
        assert (code, out) == (2, "") and err.startswith(f"ms-spec: error: {words}") and err.count("\n") == 1, err
    assert not FakeLLM.made


def test_prompts_are_needed(capsys: Any) -> None:
    assert "--prompts" in call(capsys)[2]
    assert "no such file" in call(capsys, "--prompts", "/nowhere/p.jsonl")[2]
    assert not FakeLLM.made


def test_no_matplotlib_is_one_line(prompts: str, capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    code, out, err = call(capsys, "--prompts", prompts, "--plot", str(tmp_path / "x.png"))
    assert (code, out) == (2, "") and "pip install 'matplotlib" in err and err.count("\n") == 1
    assert not FakeLLM.made and not list(tmp_path.glob("x*"))


# The picture


def figures(count: int, drafts: int = 4, name: str = "method-number") -> list[Figures]:
    made = [Answers(Method("none", None), {0: [[1, 2]]}, {0: Metrics(8, num_decode_tokens=8, decode_seconds=1.0)})]
    for number in range(1, count):
        accepted = [max(0, 20 - number - 3 * place) for place in range(drafts)]
        metrics = Metrics(30, 20 * drafts, sum(accepted), 40, 20, accepted, decode_seconds=5 / (0.5 + number / 3))
        method = Method(f"{name}-{number}", {"method": "ngram", "num_speculative_tokens": drafts})
        made.append(Answers(method, {0: [[1, 2]]}, {0: metrics}))
    return figures_of(made)


def test_the_picture_is_a_png_of_its_size(prompts: str, capsys: Any, tmp_path: Path) -> None:
    from PIL import Image

    from ms_spec.compare_picture import size

    target = tmp_path / "x.png"
    assert call(capsys, "--prompts", prompts, "--plot", str(target))[0] == 0
    with Image.open(target) as image:
        image.load()
        assert (image.format, image.size) == ("PNG", size(2)) and size(2) == (1800, 675)
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    assert {(0x00, 0x72, 0xB2), (0x8C, 0x8C, 0x8C), (255, 255, 255)} <= colours
    assert sorted(file.name for file in tmp_path.iterdir()) == ["p.jsonl", "x.png"]


@pytest.mark.parametrize(("count", "drafts"), [(1, 4), (2, 1), (5, 4), (10, 15)])
def test_nothing_in_the_picture_overlaps(count: int, drafts: int) -> None:
    from matplotlib.text import Text

    from ms_spec.compare_picture import draw

    title = "a-model-with-$a-rather_long^name$-of-sixty-letters-or-so-in-it, K = 4"
    figure = draw(title, "480 prompts one at a time, greedy, up to 128 tokens", figures(count, drafts, "m" * 20))
    figure.canvas.draw()
    page = figure.bbox
    unseen = set()  # ticks beyond the ends of an axis are there, but not drawn
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        unseen |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text() and text not in unseen
    ]
    assert any(title in text for text, _ in boxes)
    for number, (text, box) in enumerate(boxes):
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, text
        for other, place in boxes[number + 1 :]:
            assert not box.overlaps(place), (text, other)
    left, right = figure.axes
    for text in left.texts:
        assert text.get_window_extent().x1 <= left.bbox.x1 + 1, text.get_text()
    assert len(right.lines) == count - 1
