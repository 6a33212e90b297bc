"""One result as a line of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from ms_spec.prompts import Prompt


def result_of(prompt: Prompt, output: Any) -> dict[str, Any]:
    """What was asked and answered. With several samples, all of them are under ``outputs``."""
    samples = [_sample(one) for one in output.outputs]
    record: dict[str, Any] = {"prompt": prompt.content, **samples[0]}
    if len(samples) > 1:
        record["outputs"] = samples
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = _places(output.prompt_logprobs)
    if output.error is not None:
        record["error"] = output.error
    if output.kv_transfer_params is not None:
        record["kv_transfer_params"] = output.kv_transfer_params
    return record


def _finite(value: float) -> float | None:
    """A number as JSON has it: null where it is not finite."""
    return value if math.isfinite(value) else None


def _places(logprobs: Iterable[Any]) -> list[Any]:
    """Log-probabilities, place by place, with the ids as keys."""
    return [
        entry
        and {
            str(token): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for token, one in entry.items()
        }
        for entry in logprobs
    ]


def _sample(one: Any) -> dict[str, Any]:
    """One sample, ready for JSON."""
    ids = [int(i) for i in one.token_ids]
    sample: dict[str, Any] = {"text": one.text, "token_ids": ids, "finish_reason": one.finish_reason}
    if one.logprobs is not None:
        sample["cumulative_logprob"] = _finite(one.cumulative_logprob)
        sample["logprobs"] = _places(one.logprobs)
    return sample


def as_line(record: dict[str, Any], only_ascii: bool = False) -> str:
    """JSON without a line end."""
    line = json.dumps(record, ensure_ascii=only_ascii)
    try:
        line.encode()
    except UnicodeEncodeError:  # half a character, in a prompt that was refused for it, can only be an escape
        return json.dumps(record)
    return line
