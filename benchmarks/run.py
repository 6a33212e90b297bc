"""``python -m benchmarks``: measures everything in its table and writes it down.

A missed target is a result like any other: the exit code is 0 unless something failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

from rich.console import Console
from rich.status import Status

from benchmarks import figures, prompts
from benchmarks.figures import TARGETS, Figure, load, markdown, setting, shown, table

OUTPUT = "bench.jsonl"
BUSY = 0.7
"""Programs that want to run, on average, besides this one: with more of them figures mean little."""


def groups() -> dict[str, tuple[Callable[[Any], Iterator[Figure]], tuple[str, ...], float]]:
    """Name -> what measures it, the figures that it gives, and about how many minutes it takes on two cores."""
    from benchmarks import compiling, draft_cost, drafting, host, oracle, processes, speed, steps, suffix

    ngram = ("ngram_repeat", "ngram_summarization", "ngram_nothing_repeats", "ngram_categories", "ngram_differences")
    again = ("suffix_ngram", "suffix_again", "suffix_nothing_repeats", "suffix_differences")
    costs = tuple(f"{method}_cost" for method in draft_cost.WRITERS)
    widths = tuple(f"width{w}_context{c}" for w in (5, 16) for c in steps.CONTEXTS)
    return {
        "transformers": (speed.plain_vs_transformers, ("plain_vs_transformers",), 1),
        "widths": (steps.widths, widths, 1),
        "ngram": (drafting.drafting, ngram, 5),
        "suffix": (suffix.suffix, again, 6.5),
        "oracle": (oracle.oracle, ("oracle",), 1),
        "draft_cost": (draft_cost.draft_cost, costs, 2),
        "host": (host.host_share, ("host_share",), 0.2),
        "verification": (steps.verification, ("verification_share",), 0.3),
        "batch": (speed.batch8, ("batch8",), 0.7),
        "graphs": (compiling.graphs_after_warmup, ("graphs_after_warmup",), 0.4),
        "start": (processes.first_token, ("first_token_warm", "first_token_cold"), 1.5),
        "memory": (processes.memory, ("peak_memory", "loading_memory"), 0.6),
    }


def choose(only: str | None) -> list[str]:
    """Groups that ``only`` (names of groups or figures, by comma) asks for. ValueError names one that there is not."""
    all_groups = groups()
    if only is None:
        return list(all_groups)
    asked = [name.strip() for name in only.split(",") if name.strip()]
    known = {*all_groups, *TARGETS}
    for name in asked:
        if name not in known:
            raise ValueError(
                f"--only: {name!r} is unknown; groups: {', '.join(all_groups)}; figures: {', '.join(TARGETS)}"
            )
    return [group for group, (_, names, _) in all_groups.items() if group in asked or set(names) & set(asked)]


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Clock:
    """How long it has taken, and how long it may still take by the estimates and the pace so far."""

    def __init__(self, estimates: dict[str, float]) -> None:
        self.left = dict(estimates)
        self.done = 0.0
        self.start = time.perf_counter()

    def finish(self, name: str) -> None:
        self.done += self.left.pop(name)

    def __str__(self) -> str:
        elapsed = time.perf_counter() - self.start
        pace = elapsed / self.done if self.done else 60.0
        return f"{minutes(elapsed)} elapsed, about {minutes(pace * sum(self.left.values()))} left"


def measure(bench: Any, chosen: list[str], output: Path, console: Console, call: dict[str, Any]) -> tuple[list, int]:
    """Runs groups, shows each figure as it comes and writes it. Returns the records and how many groups failed."""
    known = groups()
    clock = Clock({name: known[name][2] for name in chosen})
    machine = {**setting(), "call": call}
    if load() > BUSY:
        console.print(f"[yellow]the machine is busy (load {load():.1f}): figures will suffer[/yellow]")
    records: list[dict[str, Any]] = []
    failed = 0
    with output.open("w", encoding="utf-8") as stream, Status("", console=console) as status:

        def say(text: str) -> None:
            status.update(f"{text}  [dim]({clock})[/dim]")

        bench.say = say
        for name in chosen:
            console.print(f"[bold]{name}[/bold] [dim]({clock})[/dim]", highlight=False)
            before = load()
            try:
                for figure in known[name][0](bench):
                    record = figure.record({**machine, "load_before": before})
                    records.append(record)
                    stream.write(json.dumps(record, ensure_ascii=False) + "\n")
                    stream.flush()
                    verdict = "[green]ok[/green]" if figure.ok else "[red]miss[/red]"
                    seen = shown(figure.seen, figure.target.unit)
                    console.print(f"  {figure.target.what}: {seen} ({figure.target.reach}) {verdict}", highlight=False)
                    for key, value in figure.details.items():
                        if key != "categories":
                            console.print(f"    [dim]{key}: {json.dumps(value)}[/dim]", highlight=False)
            except Exception:
                failed += 1
                console.print(f"[red]{name} failed:[/red]")
                console.print(traceback.format_exc(), markup=False, highlight=False)
            clock.finish(name)
    return records, failed


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a bench.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    made.add_argument("--prompts", type=Path, help="prompts in Spec-Bench's format (default: a small set of our own)")
    made.add_argument("--only", help="names of groups or figures, separated by commas")
    made.add_argument(
        "--output", type=Path, default=Path(OUTPUT), help="where the JSON lines go (default: %(default)s)"
    )
    made.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    made.add_argument("--quick", action="store_true", help="try the benchmarks out; the figures mean nothing")
    made.add_argument(
        "--markdown", type=Path, metavar="FILE", help="print the documentation's table from FILE and stop"
    )
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    console = Console()
    try:
        if options.markdown:
            print(markdown(read_records(options.markdown)))
            return 0
        chosen = choose(options.only)
        asked = prompts.read(options.prompts or prompts.OWN)
    except (ValueError, OSError) as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return 2
    from benchmarks.bench import Bench

    call = {
        "command": "python -m benchmarks",
        "model": options.model,
        "prompts": options.prompts.name if options.prompts else prompts.OWN.name,
        "quick": options.quick,
    }
    bench = Bench(options.model, asked, options.quick)
    console.print(f"{figures.cpu_model()}, {figures.num_cores()} cores; {call['model']}; prompts: {call['prompts']}")
    try:
        records, failed = measure(bench, chosen, options.output, console, call)
    finally:
        bench.close()
    console.print(table(records))
    console.print(f"{sum(one['ok'] for one in records)} of {len(records)} reached; written to {options.output}")
    return 1 if failed else 0
