"""``ms-spec compare``."""

# No "from __future__ import annotations": typer reads the annotations at run time.
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, TextIO

import typer

from ms_spec import cli_options as options
from ms_spec.cli_options import given, parse_json
from ms_spec.errors import ClosedPipe, ConfigError, RequestError
from ms_spec.job import DEFAULT_MODEL, Job
from ms_spec.prompts import read_prompts
from ms_spec.result_streams import result_file, result_stream
from ms_spec.terminal import note

if TYPE_CHECKING:
    from ms_spec.comparison import Answers, Comparison, Figures

SEED = 0


def compare(
    prompts: Annotated[
        str,
        typer.Option(
            "--prompts", metavar="FILE", help="JSON lines (Spec-Bench's too), or one prompt a line; - is stdin."
        ),
    ],
    methods: Annotated[
        Optional[str],
        typer.Option(
            "--methods",
            metavar="NAME,NAME",
            help="Methods, and names that --speculative-config explains; none is plain decoding [default: none,ngram].",
        ),
    ] = None,
    speculative_config: Annotated[
        Optional[list[str]],
        typer.Option(
            "--speculative-config",
            "-sc",
            metavar="[NAME=]JSON",
            help='How a method drafts, such as eagle3={"model": "DIR"}; repeat for several.',
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int,
        typer.Option("--num-speculative-tokens", "-K", metavar="K", min=1, help="Drafts a step [default: 4]."),
    ] = 4,
    model: options.Model = DEFAULT_MODEL,
    chat: options.Chat = False,
    limit: Annotated[
        Optional[int], typer.Option("--limit", metavar="N", min=1, help="Only the first N prompts.")
    ] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help=f"Of sampling, the same for all methods [default: {SEED}].")
    ] = SEED,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = None,
    additional_config: options.AdditionalConfig = None,
    output: Annotated[
        Optional[str],
        typer.Option("--output", "-o", metavar="FILE", help="Write the figures too, to FILE.jsonl or FILE.json."),
    ] = None,
    plot: Annotated[
        Optional[str], typer.Option("--plot", metavar="FILE.png", help="Draw a picture of the figures.")
    ] = None,
) -> int:
    """Run methods side by side on the same prompts and tell how fast each is. One model is loaded at a time."""
    from ms_spec.compare_methods import choose_methods, read_config
    from ms_spec.comparison import Comparison

    configs = [read_config(*_named_json(text)) for text in speculative_config or []]
    names = None if methods is None else [name.strip() for name in methods.split(",")]
    chosen = choose_methods(names, configs, num_speculative_tokens)
    figures_path = _target("--output", output, (".jsonl", ".json"))
    picture_path = _target("--plot", plot, (".png",))
    engine = given(
        model=model,
        max_model_len=max_model_len,
        dtype=dtype,
        additional_config=parse_json("--additional-config", additional_config),
    )
    sampling = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    comparison = Comparison(chosen, Job(read_prompts(prompts)[:limit], engine, sampling, chat))
    if picture_path is not None:
        from ms_spec.compare_picture import require_matplotlib

        require_matplotlib()
    with result_stream() as out:
        try:
            return _compare(comparison, out, figures_path, picture_path)
        except BrokenPipeError:
            raise ClosedPipe from None


def _named_json(text: str) -> tuple[str, dict[str, Any]]:
    """NAME={...} or {...}: the name ("" without one) and the object."""
    name, sign, value = text.partition("=")
    if text.lstrip().startswith("{"):
        name, sign, value = "", "=", text
    if not sign:
        raise ConfigError(
            f"--speculative-config: expected NAME=JSON or JSON, got {text!r:.60}; for example "
            """'ngram={"prompt_lookup_max": 4}'"""
        )
    return name.strip(), parse_json("--speculative-config", value) or {}


def _target(option: str, name: Optional[str], suffixes: Sequence[str]) -> Optional[Path]:
    """The file that an option names. Raises ConfigError where no such file could be written."""
    if name is None:
        return None
    path = Path(name).expanduser()
    if path.name.lower() in suffixes:
        raise ConfigError(
            f"{option}: {name!r:.60} is an ending only; give the name of a file, such as figures{path.name}"
        )
    if path.suffix.lower() not in suffixes:
        raise ConfigError(f"{option}: {name!r} must end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option}: no such folder: {path.parent}")
    return path


def _compare(comparison: "Comparison", out: TextIO, figures_path: Optional[Path], picture_path: Optional[Path]) -> int:
    """Runs it. What had finished when something breaks, or at Ctrl-C, is told all the same."""
    from ms_spec.compare_report import report
    from ms_spec.comparison import figures_of

    runs: list[Answers] = []
    figures: Sequence[Figures] = []
    try:
        with redirect_stdout(sys.stderr), ExitStack() as stack:
            # Opened first: a place that cannot be written is found before a model is loaded.
            figures_file = stack.enter_context(result_file(figures_path, "--output")) if figures_path else None
            picture_file = stack.enter_context(result_file(picture_path, "--plot")) if picture_path else None
            try:
                for run in comparison.run():
                    runs.append(run)
            finally:
                figures = figures_of(runs)
                if figures_path and figures_file and figures:
                    figures_file.write(_as_json(comparison.job, figures, figures_path.suffix.lower() == ".jsonl"))
            if not figures:
                raise RequestError("no prompt was answered by all methods")
            if picture_file:
                picture_file.write_bytes(_picture(comparison.job, figures))
    except BaseException:
        if figures:
            out.write(report(comparison.job, figures))
            left = [method.name for method in comparison.methods[len(runs) :]]
            note(f"[without {', '.join(left)}]" if left else "[all methods had finished]")
        raise
    out.write(report(comparison.job, figures))
    out.flush()
    return 2 if any(run.errors for run in runs) else 0


def _as_json(job: Job, figures: "Sequence[Figures]", lines: bool) -> str:
    from ms_spec.compare_report import records

    made = records(job, figures)
    return "".join(json.dumps(record) + "\n" for record in made) if lines else json.dumps(made, indent=2) + "\n"


def _picture(job: Job, figures: "Sequence[Figures]") -> bytes:
    from ms_spec.compare_picture import png
    from ms_spec.compare_report import conditions, heading

    return png(heading(job, figures), conditions(job, figures), figures)
