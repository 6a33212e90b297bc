"""The documentation: its links lead somewhere, its commands parse, its snippets run."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ms_spec import cli, job
from ms_spec.speculative_config import METHODS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands(page: Path) -> list[str]:
    """Shell commands in a page's bash blocks, continued lines joined."""
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def snippet(page: Path, name: str) -> str:
    (found,) = re.findall(
        rf"<!-- snippet: {name} -->\n```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
    )
    return found


def test_the_pages_are_there() -> None:
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    topics = ("getting-started", "configuration", "verification", "architecture", "performance", "ascend", "methods")
    assert names >= {"README.md", "README.zh-CN.md", "CONTRIBUTING.md", *(f"docs/{topic}.md" for topic in topics)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            path, _, anchor = target.partition("#")
            assert not path.startswith("/") and (page.parent / path).exists(), target
            if anchor:
                titles = re.findall(r"^#+ (.*)$", (page.parent / path).read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                assert anchor in slugs, target


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    try:
        listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    except (OSError, subprocess.CalledProcessError):
        listed = [str(page.relative_to(ROOT)) for page in PAGES]
    words = [f"/{top}/" for top in ("work", "root", "home")]
    for name in listed:
        file = ROOT / name
        if file.suffix in {".md", ".py", ".yaml", ".cfg", ".toml", ".cpp", ".h", ""} and file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            assert not [word for word in words if re.search(rf"(?<![\w.]){word}", text)], name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_accepted(page: Path, monkeypatch: Any, capsys: Any) -> None:
    """Every ``ms-spec`` line passes all checks that come before the model is loaded."""

    class Reached(Exception):
        pass

    def stop(*_: Any) -> Any:
        raise Reached

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(job, "make_llm", stop)
    monkeypatch.setattr("ms_spec.info.describe", stop)
    monkeypatch.setattr("ms_spec.models.user_cache.clear_cache", lambda kinds: 0)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(page):
        words = shlex.split(command)
        if words[0] == "make":
            assert words[1] in targets, command
        if words[0] != "ms-spec":
            continue
        try:
            code = cli.run_app(words[1:])
        except Reached:
            code = 0
        assert code == 0, f"{command}: {capsys.readouterr().err}"


def test_both_readmes_say_the_same() -> None:
    english, chinese = READMES
    assert commands(english) == commands(chinese)
    assert snippet(english, "ngram") == snippet(chinese, "ngram") == snippet(ROOT / "docs/getting-started.md", "ngram")
    rows = [re.findall(r"^\| `", page.read_text(encoding="utf-8"), re.MULTILINE) for page in READMES]
    assert len(rows[0]) == len(rows[1])


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("README.md", "ngram"),
        ("README.md", "generate"),
        ("docs/getting-started.md", "chat"),
        ("docs/configuration.md", "logprobs"),
    ],
)
def test_snippets_run(page: str, name: str, capsys: Any) -> None:
    """As they stand, but for the model: a tiny one."""
    from tiny import tiny_model

    code = snippet(ROOT / page, name)
    assert '"smollm2-135m"' in code
    exec(compile(code.replace('"smollm2-135m"', repr(str(tiny_model()))), page, "exec"), {"__name__": "snippet"})
    assert capsys.readouterr().out.strip()


def checkpoints(method: str) -> dict[str, Path]:
    """Tiny ones to put in the place of those that the snippets of ``docs/methods.md`` name."""
    import tiny_drafts as td
    from tiny import tiny_model

    if method == "mtp":
        return {"XiaomiMiMo/MiMo-7B-RL": td.mtp()}
    if method == "extract_hidden_states":
        return {"Qwen/Qwen3-8B": tiny_model("qwen3", layers=36, hidden=32, intermediate=32, vocab=300)}
    models = dict.fromkeys(
        ("smollm2-135m", "meta-llama/Meta-Llama-3.1-8B-Instruct", "lmsys/vicuna-7b-v1.3", "Qwen/Qwen3-8B"), td.target()
    )
    drafts = {
        "eagle": ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", td.eagle),
        "eagle3": ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", td.eagle3),
        "medusa": ("FasterDecoding/medusa-vicuna-7b-v1.3", td.medusa),
        "dflash": ("z-lab/Qwen3-8B-DFlash-b16", td.dflash),
    }
    if method in drafts:
        name, write = drafts[method]
        models[name] = write()
    return models


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_snippet_that_runs(method: str, capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """As it stands, but for checkpoints and graphs: tiny ones and none, which takes a second or two."""
    monkeypatch.chdir(tmp_path)
    code = snippet(ROOT / "docs/methods.md", method)
    for name, path in checkpoints(method).items():
        code = code.replace(f'"{name}"', repr(str(path)))
    code = code.replace("max_num_seqs=1,", "max_num_seqs=1, enforce_eager=True,")
    assert f'"{method}"' in code and "enforce_eager" in code
    exec(compile(code, method, "exec"), {"__name__": "snippet"})
    assert capsys.readouterr().out.strip()


def test_code_that_is_quoted_stands_in_the_file() -> None:
    page = (ROOT / "docs/add-a-method.md").read_text(encoding="utf-8")
    quoted = re.findall(r"<!-- from: (.+?) -->\n```python\n(.*?)```", page, re.DOTALL)
    assert len(quoted) == page.count("```python") > 3
    for file, code in quoted:
        assert code in (ROOT / file).read_text(encoding="utf-8"), file


def test_every_field_is_documented() -> None:
    from dataclasses import fields

    from ms_spec.config import CompilationConfig, EngineConfig, RejectionSamplerConfig, SpeculativeConfig
    from ms_spec.runfile import OWN_KEYS
    from ms_spec.sampling_params import SamplingParams

    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    models = (EngineConfig, SpeculativeConfig, RejectionSamplerConfig, CompilationConfig)
    names = [name for model in models for name in model.model_fields]
    names += [field.name for field in fields(SamplingParams)] + list(OWN_KEYS)
    assert [name for name in names if f"`{name}`" not in text] == []
