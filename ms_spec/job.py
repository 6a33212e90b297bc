"""What the command line and the run files have in common: a job is checked, then run, then printed.

Everything that can be found wrong without MindSpore is found here before MindSpore is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from ms_spec.prompts import Prompt

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_SAMPLING = {"temperature": 0.0, "max_tokens": 128}
"""What a command samples with unless told: greedy, and long enough for an answer."""


class UserError(ValueError):
    """A mistake of the user, told in one line."""


@dataclass
class Job:
    """Prompts and all that is needed to answer them."""

    prompts: list[Prompt]
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``ms_spec.LLM``."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of ``SamplingParams`` for all prompts; a prompt's own come first."""
    chat: bool = False
    batch: int | None = None
    """How many requests run together; None: as many as the engine takes."""


class Printer(Protocol):
    """Shows a job's results as they come."""

    def start(self, tokenizer: Any) -> None: ...

    def update(self, index: int, prompt: Prompt, output: Any) -> None:
        """``output`` is all there is of request ``index`` so far."""

    def close(self) -> None: ...


def one_line(error: BaseException) -> str:
    """An exception's message on one line; pydantic's, which is a paragraph, is rewritten."""
    if hasattr(error, "errors") and callable(error.errors):
        parts = []
        for item in error.errors():
            name = ".".join(str(part) for part in item.get("loc", ()))
            parts.append(f"{name}: {item.get('msg', '')}".strip(": ").replace("Value error, ", ""))
        return "; ".join(parts)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def unknown_name(name: str, known: Iterable[str], what: str) -> UserError:
    """An error that names the nearest known name."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return UserError(f"unknown {what} {name!r}; {hint}")


def sampling_names() -> list[str]:
    """The fields of SamplingParams."""
    from ms_spec.sampling_params import SamplingParams

    if dataclasses.is_dataclass(SamplingParams):
        return [item.name for item in dataclasses.fields(SamplingParams)]
    return list(SamplingParams.model_fields)


def engine_names() -> list[str]:
    """The arguments of LLM."""
    from ms_spec.config import EngineConfig

    return list(EngineConfig.model_fields)


def check_sampling(fields: dict[str, Any]) -> Any:
    """SamplingParams of these fields.

    Raises:
        ValueError: an unknown field or a value that is not allowed.
    """
    from ms_spec.sampling_params import SamplingParams

    known = sampling_names()
    for name in fields:
        if name not in known:
            raise unknown_name(name, known, "sampling parameter")
    return SamplingParams(**fields)


def check_engine(arguments: dict[str, Any]) -> None:
    """Refuses engine arguments that cannot work, without importing MindSpore.

    Raises:
        ValueError: an unknown argument or a value that is not allowed.
    """
    from ms_spec.config import EngineConfig

    known = engine_names()
    for name in arguments:
        if name not in known:
            raise unknown_name(name, known, "engine argument")
    EngineConfig(**arguments)


def make_llm(arguments: dict[str, Any]) -> Any:
    """The engine. A function of its own so that tests can put another in its place."""
    import ms_spec

    return ms_spec.LLM(**arguments)


def _waves(items: list[Any], size: int | None) -> Iterator[list[Any]]:
    step = size or len(items)
    for start in range(0, len(items), step):
        yield items[start : start + step]


def _encode(prompt: Prompt, tokenizer: Any, chat: bool) -> Any:
    """A prompt as the engine takes it."""
    if isinstance(prompt.content, str):
        if not chat:
            return prompt.content
        messages = [{"role": "user", "content": prompt.content}]
        return {"prompt_token_ids": list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))}
    return {"prompt_token_ids": prompt.content}


def prepare(job: Job) -> list[Any]:
    """Checks a job and fills in what it leaves open. Returns the SamplingParams of each prompt.

    Raises:
        ValueError: something in it cannot work.
    """
    if not job.prompts:
        raise UserError("no prompts: give --prompt TEXT or --prompts FILE")
    if job.batch is not None and (not isinstance(job.batch, int) or isinstance(job.batch, bool) or job.batch < 1):
        raise UserError(f"batch: must be an integer >= 1, got {job.batch!r}")
    limit = job.engine.get("max_num_seqs")
    if job.batch is not None and isinstance(limit, int) and job.batch > limit:
        raise UserError(f"batch: {job.batch} is above max_num_seqs ({limit}); raise max_num_seqs or lower the batch")
    if limit is None:
        # Graphs for requests that will never come would cost time at every start.
        requests = sum(int(p.sampling.get("n", job.sampling.get("n", 1)) or 1) for p in job.prompts)
        job.engine["max_num_seqs"] = job.batch or max(1, min(8, requests))
    job.engine.setdefault("model", DEFAULT_MODEL)
    defaults = {**DEFAULT_SAMPLING, **job.sampling}
    params = [check_sampling({**defaults, **prompt.sampling}) for prompt in job.prompts]
    if len(job.prompts) == 1 and not job.prompts[0].content:
        raise UserError("prompt: is empty; give at least one character")
    check_engine(job.engine)
    return params


def execute(job: Job, printer: Printer) -> int:
    """Runs a job. Returns the exit code: 0, or 2 when a request of it was refused.

    Raises:
        ValueError: the job cannot run (see :func:`prepare`) or the engine refuses it.
    """
    params = prepare(job)
    llm = make_llm(job.engine)
    tokenizer = llm.get_tokenizer()
    printer.start(tokenizer)
    failed = False
    requests = list(zip(range(len(job.prompts)), job.prompts, params))
    try:
        for wave in _waves(requests, job.batch):
            contents = [_encode(prompt, tokenizer, job.chat) for _, prompt, _ in wave]
            for position, output in llm.stream(contents, [one for _, _, one in wave]):
                index, prompt, _ = wave[position]
                failed |= output.finished and any(one.finish_reason == "error" for one in output.outputs)
                printer.update(index, prompt, output)
    finally:
        printer.close()
    return 2 if failed else 0
