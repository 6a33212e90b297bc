"""Options that several commands have in common."""

# No "from __future__ import annotations": typer reads the annotations at run time.
import json
from typing import Annotated, Any, Optional

import typer

from ms_spec.errors import ConfigError
from ms_spec.job import DEFAULT_SAMPLING

Model = Annotated[
    str, typer.Option("--model", "-m", metavar="MODEL", help="Folder, .gguf file, Hugging Face name, or smollm2-135m.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Each prompt is a user's message: apply the chat template.")]
MaxTokens = Annotated[
    Optional[int],
    typer.Option(
        "--max-tokens", metavar="N", help=f"Most tokens to generate [default: {DEFAULT_SAMPLING['max_tokens']}]."
    ),
]
Temperature = Annotated[
    Optional[float], typer.Option("--temperature", "-t", metavar="T", help="0 takes the likeliest token [default: 0].")
]
TopP = Annotated[
    Optional[float], typer.Option("--top-p", metavar="P", help="Smallest set with this much mass, in (0, 1].")
]
TopK = Annotated[Optional[int], typer.Option("--top-k", metavar="N", help="The k likeliest tokens; 0 is off.")]
MaxModelLen = Annotated[
    Optional[int], typer.Option("--max-model-len", metavar="N", help="Longest prompt plus answer, in tokens.")
]
Dtype = Annotated[
    Optional[str],
    typer.Option("--dtype", metavar="DTYPE", help="Of the weights: auto, bfloat16, float16 or float32."),
]
AdditionalConfig = Annotated[Optional[str], typer.Option("--additional-config", metavar="JSON", help="How to verify.")]

JSON_EXAMPLES = {
    "--speculative-config": '{"method": "ngram", "num_speculative_tokens": 4}',
    "--additional-config": '{"rejection_sampler_config": {"enable_block_verify": true}}',
    "--compilation-config": '{"cudagraph_capture_sizes": [5, 10]}',
}


def parse_json(option: str, text: Optional[str]) -> Optional[dict[str, Any]]:
    """The object in a JSON option.

    Raises:
        ConfigError: it is not JSON, or not an object.
    """
    if text is None:
        return None
    example = JSON_EXAMPLES[option]
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{option}: not valid JSON ({error.msg} at column {error.colno}); for example '{example}'"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: expected a JSON object, got {text!r:.40}; for example '{example}'")
    return value


def given(**values: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in values.items() if value is not None and value != []}
