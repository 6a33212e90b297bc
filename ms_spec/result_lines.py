"""One result as a line of JSON."""

from __future__ import annotations

import json
from typing import Any

from ms_spec.prompts import Prompt


def result_of(prompt: Prompt, output: Any) -> dict[str, Any]:
    """What was asked and answered. With several samples, all of them are under ``outputs``."""
    samples = [
        {"text": one.text, "token_ids": [int(i) for i in one.token_ids], "finish_reason": one.finish_reason}
        for one in output.outputs
    ]
    record: dict[str, Any] = {"prompt": prompt.content, **samples[0]}
    if len(samples) > 1:
        record["outputs"] = samples
    if output.error is not None:
        record["error"] = output.error
    if output.kv_transfer_params is not None:
        record["kv_transfer_params"] = output.kv_transfer_params
    return record


def as_line(record: dict[str, Any], only_ascii: bool = False) -> str:
    """JSON without a line end."""
    line = json.dumps(record, ensure_ascii=only_ascii)
    try:
        line.encode()
    except UnicodeEncodeError:  # half a character, in a prompt that was refused for it, can only be an escape
        return json.dumps(record)
    return line
