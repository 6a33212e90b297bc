"""SmolLM2 answers a few prompts twice, with plain and with n-gram decoding: same texts, fewer steps.

Exits with 1 if a single token differs.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ms_spec import LLM, SamplingParams

MODEL = "smollm2-135m"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
PROMPTS = [
    "What is the capital of France?",
    "Fix the spelling: The lighthouse keeper climed the stairs every evening, and every evening he lit the lamp.",
    "Summarise in one sentence: The lighthouse keeper climbed the stairs every evening. Every evening he lit the lamp, "
    "and every morning he put the lamp out. One morning he left the lamp burning, and nobody noticed but the gulls.",
    "Write a Python function that adds two numbers, and one that subtracts two numbers.",
]


def load(speculative_config: dict[str, Any] | None) -> LLM:
    """The model for one user at a time, with its caches warm."""
    llm = LLM(model=MODEL, max_num_seqs=1, max_model_len=512, speculative_config=speculative_config)
    ask(llm, "Hello", max_tokens=4)
    return llm


def ask(llm: LLM, prompt: str, max_tokens: int = 80) -> Any:
    messages = [{"role": "user", "content": prompt}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    return output


def main() -> int:
    console = Console()
    console.print(f"{MODEL}, greedy, {NGRAM['num_speculative_tokens']} drafts a step\n")
    with console.status("loading the model for plain and for n-gram decoding"):
        plain, ngram = load(None), load(NGRAM)
    table = Table(
        *("#", "tokens", "drafts accepted", "tokens a step", "plain, tokens/s", "ngram, tokens/s", "speed-up"),
    )
    for column in table.columns:
        column.justify = "right"
    same = []
    for number, prompt in enumerate(PROMPTS, 1):
        a, b = ask(plain, prompt), ask(ngram, prompt)  # one after the other, so that both meet the same machine
        same.append(a.outputs[0].token_ids == b.outputs[0].token_ids)
        text = a.outputs[0].text.strip()
        verdict = "[green]plain and ngram: identical[/green]"
        if not same[-1]:
            verdict = "[red]plain and ngram DIFFER[/red]"
            text += f"\n--- ngram:\n{b.outputs[0].text.strip()}"
        console.print(Panel(Text(text), title=Text(f"{number}. {prompt[:64]}"), title_align="left", subtitle=verdict))
        before, after = a.metrics.tokens_per_second, b.metrics.tokens_per_second
        table.add_row(
            str(number),
            str(len(b.outputs[0].token_ids)),
            f"{b.metrics.num_accepted_tokens} of {b.metrics.num_draft_tokens}",
            f"{b.metrics.mean_acceptance_length:.2f}",
            f"{before:.1f}",
            f"{after:.1f}",
            f"{after / before:.2f}x" if before else "-",
        )
    console.print(table)
    console.print(f"[bold]{sum(same)} of {len(same)} answers identical, token for token[/bold]")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
