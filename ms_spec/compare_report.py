"""A comparison as people and programs read it: a headline, a table, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from ms_spec.comparison import Figures, baseline_of
from ms_spec.job import DEFAULT_SAMPLING, Job

COLUMNS = (
    ("", "method"),
    ("", "K"),
    ("", "tokens/s"),
    ("", "speed-up"),
    ("acceptance", "length"),
    ("acceptance", "rate"),
    ("steps with-", "out drafts"),
    ("same", "answers"),
)


def _model_title(model: str, most: int = 60) -> str:
    """A model's name, short enough for a heading: of a path the last part."""
    path = PurePath(model)
    name = path.name if path.is_absolute() or len(path.parts) > 2 or model.startswith((".", "~")) else model
    return name if len(name) <= most else f"{name[: most // 2 - 1]}...{name[-(most // 2 - 2) :]}"


def heading(job: Job, figures: Sequence[Figures]) -> str:
    """Model and K, such as "smollm2-135m, K = 4". Several Ks are listed; without drafts there is none."""
    lengths = sorted({one.method.num_speculative_tokens for one in figures} - {0})
    title = _model_title(job.engine["model"])
    return f"{title}, K = {', '.join(map(str, lengths))}" if lengths else title


def conditions(job: Job, figures: Sequence[Figures]) -> str:
    """How it was run: prompts, sampling, most tokens."""
    sampling = {**DEFAULT_SAMPLING, **job.sampling}
    heat = sampling["temperature"]
    how = f"temperature {heat:g}, seed {sampling.get('seed')}" if heat else "greedy"
    count = figures[0].num_prompts
    return f"{count} prompt{'s' * (count != 1)} one at a time, {how}, up to {sampling['max_tokens']} tokens"


def _number(value: float | None, text: str) -> str:
    return "-" if value is None else format(value, text)


def _cells(one: Figures) -> list[str]:
    metrics = one.metrics
    rate = one.acceptance_rate
    same = "-"
    if one.num_identical is not None:
        same = "all" if one.identical else f"{one.num_identical} of {one.num_prompts}"
    return [
        one.method.name,
        str(one.method.num_speculative_tokens or "-"),
        _number(one.tokens_per_second, ".1f"),
        _number(one.speedup, ".2f") + "x" * (one.speedup is not None),
        _number(metrics.mean_acceptance_length or None, ".2f"),
        "-" if rate is None else f"{rate:.1%}",
        f"{metrics.undrafted_steps:.1%}" if metrics.num_steps else "-",
        same,
    ]


def table(figures: Sequence[Figures]) -> str:
    """A line a method, below the names of the columns. No line is longer than a terminal unless a name is."""
    rows = [[column[0] for column in COLUMNS], [column[1] for column in COLUMNS], *map(_cells, figures)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:]))]
        lines.append("  ".join(cells))
    lines.insert(2, "-" * len(lines[0]))
    return "\n".join(line.rstrip() for line in lines)


def report(job: Job, figures: Sequence[Figures]) -> str:
    """What is printed."""
    base = baseline_of([one.method for one in figures]).name
    lines = [f"{heading(job, figures)}: {conditions(job, figures)}", "", table(figures), ""]
    lines.append(f"speed-up and same answers: against {base}; tokens/s: from the first token on")
    lines.append("acceptance length: tokens a step, the model's own included")
    if figures[0].num_refused:
        lines.append("only prompts that all methods answered count")
    return "\n".join(lines) + "\n"


def records(job: Job, figures: Sequence[Figures]) -> list[dict[str, Any]]:
    """The same figures, one object a method, ready for JSON. Shares and rates go from 0 to 1."""
    base = baseline_of([one.method for one in figures]).name
    return [_record(job, one, base) for one in figures]


def _record(job: Job, one: Figures, base: str) -> dict[str, Any]:
    metrics = one.metrics.as_dict()
    for name in ("time_to_first_token_s", "num_preemptions", "tokens_per_second"):
        del metrics[name]
    return {
        "method": one.method.name,
        "model": job.engine["model"],
        "speculative_config": None if one.method.config is None else dict(one.method.config),
        "sampling_params": {**DEFAULT_SAMPLING, **job.sampling},
        "chat": job.chat,
        "num_prompts": one.num_prompts,
        "num_refused": one.num_refused,
        "num_tokens": one.num_tokens,
        "decode_seconds": round(one.metrics.decode_seconds, 6),
        "tokens_per_second": _rounded(one.tokens_per_second),
        "baseline": base,
        "speedup": _rounded(one.speedup),
        "acceptance_rate": _rounded(one.acceptance_rate),
        "acceptance_rate_per_position": [_rounded(rate) for rate in one.metrics.acceptance_rate_per_position],
        "undrafted_steps": _rounded(one.metrics.undrafted_steps),
        "identical": one.identical,
        "num_identical": one.num_identical,
        **metrics,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
