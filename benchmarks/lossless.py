"""``python -m benchmarks.lossless``: greedy ids of speculative decoding against plain decoding's, token for token.

Drafts are always verified, however bad they are (the engine's habit of giving up on bad drafts is switched off, but in
the configuration that says "adaptive"), and the end of the text is ignored, so that every answer has its full length.
A configuration that drafted nothing, or did not preempt or plan ahead where it had to, proves nothing and counts as
failed. Drafts of EAGLE-3 come from random weights.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import prompts as files
from benchmarks.bench import Bench, greedy, ngram
from benchmarks.random_drafts import WRITERS, cache_in
from ms_spec import LLM

BATCH = 8


@dataclass(frozen=True)
class Setting:
    """drafts: K, 0 for plain. chunk: prompt tokens of a call. tight: so few KV blocks that some must be preempted.
    method: "ngram", or one whose drafts get random weights. ahead: with ``async_scheduling``."""

    drafts: int
    batch: int
    chunk: int
    tight: bool = False
    adaptive: bool = False
    method: str = "ngram"
    ahead: bool = False

    def __str__(self) -> str:
        method = f"{self.method} K={self.drafts}" if self.drafts else "plain"
        extra = (", preempted" if self.tight else "") + (", adaptive" if self.adaptive else "")
        extra += ", async_scheduling" if self.ahead else ""
        return f"{method}, batch {self.batch}, chunk {self.chunk}{extra}"


REFERENCE = Setting(0, 1, 64)
SETTINGS = (
    Setting(0, BATCH, 64),
    Setting(0, 1, 512),
    Setting(0, BATCH, 512),
    Setting(0, BATCH, 64, tight=True),
    *(Setting(drafts, batch, 64) for drafts in (1, 4, 15) for batch in (1, BATCH)),
    Setting(4, 1, 512),
    Setting(4, BATCH, 512),
    Setting(4, BATCH, 64, tight=True),
    Setting(4, BATCH, 64, adaptive=True),
    *(Setting(4, BATCH, 64, tight=tight, ahead=True) for tight in (False, True)),
    *(Setting(4, BATCH, 64, tight=True, method="eagle3", ahead=ahead) for ahead in (False, True)),
)


@dataclass
class Outcome:
    """ids of every prompt; drafts verified and accepted; preemptions; requests decoded in a step that was planned
    before the one ahead of it had ended; seconds."""

    ids: list[list[int]]
    drafted: int
    accepted: int
    preemptions: int
    ahead: int
    seconds: float

    def proves(self, setting: Setting) -> bool:
        """Whether that which the setting is about has happened at all."""
        drafted, preempted = self.drafted > 0 or not setting.drafts, self.preemptions > 0 or not setting.tight
        return drafted and preempted and (self.ahead > 0 or not setting.ahead)


def run(model: str, setting: Setting, prompts: Sequence[list[int]], tokens: int) -> Outcome:
    """All prompts through an engine of its own."""
    longest = max(map(len, prompts)) + tokens
    args: dict[str, Any] = {"max_num_seqs": setting.batch, "max_model_len": longest}
    args["long_prefill_token_threshold"] = setting.chunk
    with ExitStack() as stack:
        if setting.ahead:
            args["async_scheduling"] = True
        if setting.drafts and setting.method == "ngram":
            args["speculative_config"] = ngram(setting.drafts)
        elif setting.drafts:
            args["speculative_config"] = stack.enter_context(random_draft(setting.method, model, setting.drafts))
        llm = stack.enter_context(LLM(model, **args))
        llm._engine.scheduler._adaptive = setting.adaptive
        ahead = _count_ahead(llm)
        start = time.perf_counter()
        if setting.tight:
            outputs = _tight(llm, prompts, tokens, setting.batch)
        else:
            outputs = llm.generate([list(ids) for ids in prompts], greedy(tokens))
        seconds = time.perf_counter() - start
        failed = [one.error for one in outputs if one.error]
        if failed:
            raise RuntimeError(f"{setting}: {failed[0]}")
        total = llm.metrics()
        ids = [list(one.outputs[0].token_ids) for one in outputs]
        drafts = total.num_draft_tokens, total.num_accepted_tokens
        return Outcome(ids, *drafts, total.num_preemptions, sum(ahead), seconds)


@contextmanager
def random_draft(method: str, model: str, drafts: int) -> Iterator[dict[str, Any]]:
    """The speculative_config of a draft with random weights, which is there as long as the block runs."""
    from ms_spec.models.loading import load

    with tempfile.TemporaryDirectory(prefix="ms-spec-drafts-") as folder, cache_in(Path(folder) / "cache"):
        draft = Path(folder) / method
        WRITERS[method](draft, load(model).config, drafts)
        yield {"method": method, "model": str(draft), "num_speculative_tokens": drafts}


def _count_ahead(llm: LLM) -> list[int]:
    """For each decode step, its requests that were handed over before the host knew what they begin with."""
    runner: Any = llm._engine._runner
    decode, counts = runner.decode, []

    def counted(works: Sequence[Any]) -> Any:
        counts.append(sum(work.carried for work in works))
        return decode(works)

    runner.decode = counted
    return counts


def _tight(llm: LLM, prompts: Sequence[list[int]], tokens: int, batch: int) -> list[Any]:
    """Prompts of like length together, each batch with just the blocks to start with: as they grow, some must go."""
    blocks = llm._engine.scheduler.blocks
    hoard: list[int] = []
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs: list[Any] = [None] * len(prompts)
    for at in range(0, len(order), batch):
        group = order[at : at + batch]
        start = sum(blocks.needed(len(prompts[i])) for i in group) + len(group) - 1
        left = max(start, max(blocks.needed(len(prompts[i]) + tokens) for i in group))
        blocks.extend(hoard, max(0, blocks.num_free - left) * blocks.block_size)
        for i, output in zip(group, llm.generate([list(prompts[i]) for i in group], greedy(tokens), use_tqdm=False)):
            outputs[i] = output
        blocks.release(hoard)
    return outputs


def compare(wanted: Sequence[list[int]], got: Sequence[list[int]]) -> list[str]:
    """One line for each prompt whose ids differ: where, and what stands there."""
    lines = []
    for number, (a, b) in enumerate(zip(wanted, got)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            lines.append(f"prompt {number}, token {at}: {a[at : at + 3]} became {b[at : at + 3]}")
    return lines


def check(
    model: str,
    prompts: Sequence[list[int]],
    tokens: int,
    settings: Sequence[Setting] = SETTINGS,
    say: Callable[[str], None] = print,
) -> tuple[int, int]:
    """Runs the reference and all settings. Returns (prompts that differ, settings that proved nothing)."""
    start = time.perf_counter()
    wanted = run(model, REFERENCE, prompts, tokens)
    say(f"{REFERENCE}: the reference, {sum(map(len, wanted.ids))} tokens in {wanted.seconds:.0f} s")
    differences = hollow = 0
    for setting in settings:
        got = run(model, setting, prompts, tokens)
        lines = compare(wanted.ids, got.ids)
        differences += len(lines)
        facts = f"{got.seconds:.0f} s"
        if setting.drafts:
            facts += f", {got.accepted} of {got.drafted} drafts accepted"
        if setting.tight:
            facts += f", {got.preemptions} preemptions"
        if setting.ahead:
            facts += f", {got.ahead} rows planned ahead"
        say(f"{setting}: {len(lines)} differences ({facts})")
        for line in lines:
            say(f"  {line}")
        if not got.proves(setting):
            hollow += 1
            say("  this proves nothing: no draft was verified, nothing was preempted, or nothing was planned ahead")
    elapsed = time.perf_counter() - start
    say(f"{differences} differences in {len(settings)} configurations x {len(prompts)} prompts, {elapsed:.0f} s")
    return differences, hollow


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lossless", description=__doc__)
    parser.add_argument("--prompts", type=Path, default=files.OWN, help="in Spec-Bench's format (default: our own)")
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt (default: %(default)s)")
    parser.add_argument("--count", type=int, default=40, help="at most so many prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each answer (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="configurations that have this in their names")
    parser.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        chosen = files.read(options.prompts)[:: options.every][: options.count]
    except ValueError as error:
        print(f"lossless: error: {error}", file=sys.stderr)
        return 2
    bench = Bench(options.model, chosen)
    prompts = [bench.chat(prompt.text, options.tokens) for prompt in chosen]
    say = lambda text: print(text, flush=True)  # noqa: E731
    say(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens")
    settings = [setting for setting in SETTINGS if options.only in str(setting)]
    if not settings:
        print(f"lossless: error: --only {options.only!r}: none of {', '.join(map(str, SETTINGS))}", file=sys.stderr)
        return 2
    return 1 if any(check(options.model, prompts, options.tokens, settings, say=say)) else 0


if __name__ == "__main__":
    sys.exit(main())
