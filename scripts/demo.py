"""SmolLM2 answers a few prompts twice, with plain and with n-gram decoding: same texts, fewer steps.

Exits with 1 if a single token differs.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from ms_spec import LLM, SamplingParams

MODEL = "smollm2-135m"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
PROMPTS = [
    "Repeat this text exactly: 'Speculative decoding drafts a few tokens, scores them all at once, and keeps the ones "
    "that the model would have said itself.'",
    "Summarise in one sentence: The lighthouse keeper climbed the stairs every evening. Every evening he lit the lamp, "
    "and every morning he put the lamp out. One morning he left the lamp burning, and nobody noticed but the gulls.",
    "What is the capital of France?",
    "Write a Python function that adds two numbers, and one that subtracts two numbers.",
]


def answer(speculative_config: dict[str, Any] | None) -> list[Any]:
    """All prompts, one after the other, so that the speeds are those of a single user."""
    llm = LLM(model=MODEL, max_num_seqs=1, max_model_len=512, speculative_config=speculative_config)
    params = SamplingParams(temperature=0.0, max_tokens=80)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    llm.chat(chats[0], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)  # warm caches, for both
    return [llm.chat(chat, params, use_tqdm=False)[0] for chat in chats]


def main() -> int:
    console = Console()
    console.print(f"[bold]ms-spec[/bold]: {MODEL}, greedy, plain and with {NGRAM}\n")
    with console.status("plain decoding"):
        plain = answer(None)
    with console.status("n-gram decoding"):
        ngram = answer(NGRAM)
    same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(plain, ngram)]
    for prompt, a, b, equal in zip(PROMPTS, plain, ngram, same):
        verdict = "[green]plain and ngram: identical[/green]" if equal else "[red]plain and ngram DIFFER[/red]"
        text = a.outputs[0].text.strip()
        if not equal:
            text += f"\n--- ngram:\n{b.outputs[0].text.strip()}"
        console.print(Panel(text, title=prompt[:70], title_align="left", subtitle=verdict, subtitle_align="left"))
    table = Table("prompt", "tokens", "drafts accepted", "tokens a step", "plain", "ngram", "speed-up")
    for column in table.columns[1:]:
        column.justify = "right"
    for prompt, a, b in zip(PROMPTS, plain, ngram):
        figures = b.metrics
        before, after = a.metrics.tokens_per_second, figures.tokens_per_second
        table.add_row(
            prompt[:32],
            str(len(b.outputs[0].token_ids)),
            f"{figures.num_accepted_tokens} of {figures.num_draft_tokens}",
            f"{figures.mean_acceptance_length:.2f}",
            f"{before:.1f} tokens/s",
            f"{after:.1f} tokens/s",
            f"{after / before:.2f}x" if before else "-",
        )
    console.print(table)
    console.print(f"[bold]{sum(same)} of {len(same)} answers identical, token for token[/bold]")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
