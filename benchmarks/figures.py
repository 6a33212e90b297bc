"""What is measured, what it should reach, and how a measured figure is shown and stored."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

PACKAGES = ("ms-spec", "mindspore", "numpy", "torch", "transformers")


@dataclass(frozen=True)
class Target:
    """``sense`` is ">=" or "<=": what is right of it is reached. ``unit``: "x", "%", "s", "GB" or "" (a count)."""

    what: str
    sense: str
    limit: float
    unit: str

    @property
    def reach(self) -> str:
        return f"{self.sense} {shown(self.limit, self.unit)}"

    def reached(self, seen: float) -> bool:
        return seen >= self.limit if self.sense == ">=" else seen <= self.limit


NGRAM = "ngram / plain, decode phase, "
TARGETS = {
    "plain_vs_transformers": Target("plain decoding, batch 1 / transformers generate (bf16 or f32)", ">=", 3.0, "x"),
    "width5_context64": Target("step of width 5 / width 1, context 64", "<=", 1.35, "x"),
    "width16_context64": Target("step of width 16 / width 1, context 64", "<=", 3.2, "x"),
    "width5_context1024": Target("step of width 5 / width 1, context 1,024", "<=", 1.45, "x"),
    "width16_context1024": Target("step of width 16 / width 1, context 1,024", "<=", 3.6, "x"),
    "ngram_repeat": Target(NGRAM + '"repeat this text"', ">=", 2.5, "x"),
    "ngram_summarization": Target(NGRAM + "summarization (first 10)", ">=", 1.25, "x"),
    "ngram_categories": Target(NGRAM + "mean of the categories (4 prompts each)", ">=", 1.3, "x"),
    "ngram_nothing_repeats": Target(NGRAM + "nothing repeats (writing, roleplay)", ">=", 0.97, "x"),
    "ngram_differences": Target("answers of ngram that differ from plain decoding's", "<=", 0, ""),
    "suffix_ngram": Target(
        "suffix / ngram, decode phase, summarization and RAG (first 20 each, 64 tokens)", ">=", 1.0, "x"
    ),
    "suffix_again": Target("suffix / plain, decode phase, the same prompts once more", ">=", 2.5, "x"),
    "suffix_nothing_repeats": Target(
        "suffix / plain, decode phase, nothing repeats (writing, roleplay)", ">=", 0.97, "x"
    ),
    "suffix_differences": Target("answers of suffix that differ from plain decoding's", "<=", 0, ""),
    "oracle": Target("a drafter that is always right (K = 4) / plain, decode phase", ">=", 3.0, "x"),
    "eagle3_cost": Target("a further EAGLE-3 draft (8,192 output rows), share of a plain step", "<=", 10.0, "%"),
    "medusa_cost": Target("4 Medusa drafts, cost / share of the weights that a plain step reads", "<=", 1.5, "x"),
    "mtp_cost": Target("a further MTP draft, cost / share of the weights", "<=", 1.5, "x"),
    "dflash_cost": Target("a DFlash block of 4 drafts, cost / share of the weights", "<=", 1.5, "x"),
    "host_share": Target("host time outside graphs, batch 1, share of a step", "<=", 10.0, "%"),
    "verification_share": Target(
        "verification + sampling (T 0.8, top-p 0.95), share of a width-5 step", "<=", 12.0, "%"
    ),
    "batch8": Target("batch 8 throughput / batch 1, plain", ">=", 3.0, "x"),
    "first_token_warm": Target("process start to first token, warm", "<=", 15.0, "s"),
    "first_token_cold": Target("process start to first token, cold", "<=", 45.0, "s"),
    "graphs_after_warmup": Target("graphs compiled after warm-up", "<=", 0, ""),
    "peak_memory": Target("peak resident memory, max_model_len 2,048, 1 request", "<=", 1.6, "GB"),
    "loading_memory": Target("loading: peak above import mindspore / weights held", "<=", 1.6, "x"),
}
"""In the order of the table."""


@dataclass
class Figure:
    """One measured number of ``TARGETS`` and how it came about."""

    name: str
    seen: float
    details: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> Target:
        return TARGETS[self.name]

    @property
    def ok(self) -> bool:
        return self.target.reached(self.seen)

    def record(self, setting: dict[str, Any]) -> dict[str, Any]:
        """One line of bench.jsonl. ``setting``: what :func:`setting` gave, with what the whole run was called with."""
        target = self.target
        return {
            "name": self.name,
            "what": target.what,
            "reach": target.reach,
            "seen": round(self.seen, 4),
            "unit": target.unit,
            "ok": self.ok,
            "details": self.details,
            "config": self.config,
            **setting,
        }


def shown(value: float, unit: str) -> str:
    """A number with its unit, as short as it may be."""
    if unit == "":
        return f"{value:.0f}"
    text = f"{value:.2f}" if unit in ("x", "GB") else f"{value:.1f}"
    return f"{text}x" if unit == "x" else f"{text} {unit}"


def table(records: list[dict[str, Any]]) -> Table:
    """The records for a terminal."""
    made = Table("what", "reach", "seen", "", title="ms-spec: figures")
    made.columns[1].justify = made.columns[2].justify = "right"
    for one in records:
        verdict = "[green]ok[/green]" if one["ok"] else "[red]miss[/red]"
        made.add_row(one["what"].replace("[", r"\["), one["reach"], shown(one["seen"], one["unit"]), verdict)
    return made


def markdown(records: list[dict[str, Any]]) -> str:
    """The records as the table of the documentation; what was not measured stays open."""
    seen = {one["name"]: one for one in records}
    lines = ["| what | reach | seen |", "| --- | --- | --- |"]
    for name, target in TARGETS.items():
        one = seen.get(name)
        value = (
            "not measured yet" if one is None else shown(one["seen"], one["unit"]) + ("" if one["ok"] else " (missed)")
        )
        lines.append(f"| {target.what} | {target.reach} | {value} |")
    return "\n".join(lines)


def setting() -> dict[str, Any]:
    """Machine, versions and time, for every record."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"versions": versions, "cpu": cpu_model(), "cores": num_cores(), "date": date}


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def load() -> float:
    """How many programs wanted to run in the last minute, on average; 0 where nobody counts them."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
