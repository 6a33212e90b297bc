"""The command line. Nothing here imports MindSpore or transformers before a request has been found sound."""

# No "from __future__ import annotations": typer reads the annotations at run time.
import json
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional, TextIO

import typer

from ms_spec import __version__
from ms_spec import cli_options as options
from ms_spec.cli_compare import compare
from ms_spec.cli_options import given, parse_json
from ms_spec.errors import ClosedPipe, ConfigError, EngineError, OutputError, unknown_name
from ms_spec.job import DEFAULT_MODEL, Job, Printer, answer, one_line, prepare
from ms_spec.prompts import from_option, read_prompts
from ms_spec.result_streams import result_file, result_stream
from ms_spec.sampling_params import SamplingParams
from ms_spec.terminal import JsonPrinter, TextPrinter, note
from ms_spec.world import leads

if TYPE_CHECKING:
    from ms_spec.runfile import Run

EXIT_FAILURE, EXIT_MISTAKE, EXIT_INTERRUPT, EXIT_PIPE = 1, 2, 130, 141
# What a person can cause.
MISTAKES = (ValueError, FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
# typer checks numbers with pydantic, which says "Input should be a valid integer, unable to parse ...".
PYDANTIC = re.compile(r"Input should be ([^,]*).*")

app = typer.Typer(
    name="ms-spec",
    help="Speculative decoding for large language models, native to MindSpore.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"ms-spec {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Speculative decoding for large language models, native to MindSpore."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def generate(
    model: options.Model = DEFAULT_MODEL,
    prompt: Annotated[
        Optional[list[str]],
        typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt; repeat for several; - reads stdin."),
    ] = None,
    prompts: Annotated[
        Optional[str],
        typer.Option("--prompts", metavar="FILE", help="JSON lines, or one prompt a line; - reads stdin."),
    ] = None,
    chat: options.Chat = False,
    batch: Annotated[
        Optional[int],
        typer.Option("--batch", metavar="N", min=1, help="How many requests run together [default: all that fit]."),
    ] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: Annotated[
        Optional[float],
        typer.Option("--min-p", metavar="P", help="Least probability, as a share of the likeliest token's."),
    ] = None,
    seed: Annotated[Optional[int], typer.Option("--seed", metavar="N", help="Makes sampling repeatable.")] = None,
    stop: Annotated[
        Optional[list[str]],
        typer.Option("--stop", metavar="TEXT", help="End at this text and leave it out; repeat for several."),
    ] = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[
        Optional[int],
        typer.Option(
            "--max-num-seqs",
            metavar="N",
            help="Most requests the engine is built for [default: the prompts, at most 8].",
        ),
    ] = None,
    dtype: options.Dtype = None,
    speculative_config: Annotated[
        Optional[str], typer.Option("--speculative-config", "-sc", metavar="JSON", help="How to draft.")
    ] = None,
    additional_config: options.AdditionalConfig = None,
    compilation_config: Annotated[
        Optional[str], typer.Option("--compilation-config", metavar="JSON", help="Which graphs to compile.")
    ] = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour accepted draft tokens against the model's own.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per request and nothing else.")
    ] = False,
) -> int:
    """Answer prompts. Text goes to stdout as it comes; notes go to stderr."""
    if as_json and show_drafts:
        raise ConfigError("--show-drafts colours text, --json prints none: give one of them")
    engine = given(
        model=model,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        dtype=dtype,
        speculative_config=parse_json("--speculative-config", speculative_config),
        additional_config=parse_json("--additional-config", additional_config),
        compilation_config=parse_json("--compilation-config", compilation_config),
    )
    sampling = given(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop
    )
    asked = [from_option(text) for text in prompt or []]
    if prompts is not None:
        asked += read_prompts(prompts)
    job = Job(asked, engine, sampling, chat, batch)
    params = prepare(job)
    with result_stream() as out:
        return _execute(job, params, out, as_json, show_drafts)


def _execute(job: Job, params: list[SamplingParams], out: TextIO, as_json: bool, show_drafts: bool) -> int:
    printer: Printer = JsonPrinter(out)
    if not as_json:
        single = len(job.prompts) == 1 and {**job.sampling, **job.prompts[0].sampling}.get("n", 1) == 1
        printer = TextPrinter(out, len(job.prompts), single, show_drafts)
    try:
        with redirect_stdout(sys.stderr):
            return answer(job, params, printer)
    except BrokenPipeError:
        raise ClosedPipe from None


@app.command(name="run")
def run_file(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="The run file, or a mindformers predict file.")],
    changes: Annotated[
        Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as sampling_params.seed=1.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Find what is wrong with it, loading no weights, and stop.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the results that its output file has and answer the rest.")
    ] = False,
) -> int:
    """Run a YAML file: the same options as `generate`, written down."""
    from ms_spec.runfile import load_run

    run = load_run(config, changes)
    if resume and run.output is None:
        raise ConfigError("--resume goes on with a file of results: add output: FILE")
    params = prepare(run.job)
    if check:
        return _check(config, run, params, resume)
    if run.no_effect:
        note(f"[no effect here: {', '.join(run.no_effect)}]")
    if run.output is None:
        with result_stream() as out:
            return _execute(run.job, params, out, run.json, run.show_drafts)
    if run.output.exists() and not run.output.is_file():
        if resume:
            raise ConfigError(f"output: {run.output} is a device; --resume goes on with a file")
        with result_file(run.output) as out:
            return _execute(run.job, params, out, True, False)
    return _fill(run.job, params, run.output, resume)


def _check(config: str, run: "Run", params: list[SamplingParams], resume: bool) -> int:
    from ms_spec.check import check
    from ms_spec.results_file import answered, result_keys

    there = len(answered(run.output, result_keys(run.job, params))) if resume and run.output else 0
    lines = check(run, params)
    print("\n".join([f"{config} is sound", *lines] + [f"resume    {there} results are there"] * resume))
    return 0


def _fill(job: Job, params: list[SamplingParams], output: Path, resume: bool) -> int:
    """Runs a job into a file of results."""
    from ms_spec.results_file import complete, result_keys, results_file

    keys = result_keys(job, params)
    if resume and complete(output, keys):
        note(f"[all {len(keys)} results are in {output} already]")
        return 0
    with results_file(output, keys, resume) as results, redirect_stdout(sys.stderr):
        if results.lines:
            note(f"[{len(results.lines)} of {len(keys)} results are there]")
        code = answer(job, params, results, set(results.lines))
    note(f"[{len(keys)} results in {output}]")
    return code


app.command()(compare)


@app.command()
def info(
    model: options.Model = DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Tell what a model is and what it would take, without loading it."""
    from ms_spec.info import describe, show

    facts = describe(model)
    if as_json:
        print(json.dumps(facts))
    else:
        show(facts)
    return 0


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove what is there (of KIND, or everything).")] = False,
    kind: Annotated[Optional[str], typer.Argument(metavar="[KIND]", help="One kind of entry.")] = None,
) -> int:
    """Show what ms-spec keeps in the user's cache folder, or clear it. Everything in it can be made again."""
    from ms_spec.models.user_cache import KINDS, cache_entries, cache_root, clear_cache

    if kind is not None and kind not in KINDS:
        raise ConfigError(unknown_name("cache kind", kind, KINDS))
    if clear:
        freed = clear_cache(None if kind is None else [kind])
        print(f"removed {freed / 1e6:.1f} MB from {cache_root()}")
        return 0
    entries = [entry for entry in cache_entries() if kind in (None, entry.kind)]
    print(cache_root())
    for entry in entries:
        print(f"  {entry.kind:<12} {entry.bytes / 1e6:>9.1f} MB  {entry.files:>5} files")
    if kind is None:
        total, files = sum(entry.bytes for entry in entries), sum(entry.files for entry in entries)
        print(f"  {'total':<12} {total / 1e6:>9.1f} MB  {files:>5} files")
    return 0


def _is_usage_error(error: BaseException) -> bool:
    """Whether it is a ClickException, of whichever click typer carries."""
    return any(base.__name__ == "ClickException" for base in type(error).__mro__)


def run_app(arguments: Optional[list[str]] = None) -> int:
    """Runs the command line.

    Returns the exit code: 0, 1 if the model or the machine failed, 2 for a mistake, 130 for Ctrl-C, 141 for a closed
    pipe.
    """
    try:
        code = app(args=arguments, prog_name="ms-spec", standalone_mode=False)
        _flush()
        if code == EXIT_INTERRUPT:  # newer versions of typer turn Ctrl-C into this code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except (BrokenPipeError, ClosedPipe):
        _give_up_stdout()
        return EXIT_PIPE
    except (KeyboardInterrupt, typer.Abort):
        note("\nms-spec: interrupted")
        return EXIT_INTERRUPT
    except MISTAKES as error:
        # Our messages have one line. What has more comes from below, is a fault of ours and keeps its trace.
        if os.environ.get("MS_SPEC_DEBUG") or "\n" in str(error).strip():
            raise
        note(f"ms-spec: error: {one_line(error)}")
        return EXIT_MISTAKE
    except EngineError as error:
        note(f"ms-spec: error: {one_line(error)}")
        return EXIT_FAILURE
    except (OSError, OutputError) as error:
        if os.environ.get("MS_SPEC_DEBUG"):
            raise
        note(f"ms-spec: error: {one_line(error)}")
        _give_up_stdout()  # it may be what failed
        return EXIT_FAILURE
    except Exception as error:
        if not _is_usage_error(error):
            raise
        message = one_line(error) if not hasattr(error, "format_message") else " ".join(error.format_message().split())
        message = PYDANTIC.sub(r"must be \1", message)
        if message:  # a bare `ms-spec` has shown its help
            note(f"ms-spec: error: {message}")
        return EXIT_MISTAKE


def _flush() -> None:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"stdout cannot be written: {error.strerror}") from None


def _give_up_stdout() -> None:
    """Nobody gets what is written there; at exit Python would flush into it and complain."""
    if sys.stdout is not None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115


def _fill_standard_descriptors() -> None:
    """A descriptor that the caller closed would go to the next file opened, and prints would land in that file."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


def main() -> None:
    """The command. In an msrun job rank 0's process runs it, and the others serve."""
    _fill_standard_descriptors()
    if not leads():
        from ms_spec.worker import main as serve

        serve()
    sys.exit(run_app())
