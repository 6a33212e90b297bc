"""What the command line and the run files have in common: a job is checked, then run, then printed.

Everything that can be found wrong without MindSpore is found here before MindSpore is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from ms_spec.errors import ConfigError, RequestError
from ms_spec.inputs import chat_prompt
from ms_spec.prompts import Prompt
from ms_spec.sampling_params import SamplingParams
from ms_spec.seeds import request_seed

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_SAMPLING = {"temperature": 0.0, "max_tokens": 128}
"""What a command samples with unless told: greedy, and long enough for an answer."""


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

    def start(self, tokenizer: Any) -> None:
        """Called once, before anything comes."""

    def update(self, index: int, prompt: Prompt, output: Any) -> None:
        """``output`` is all there is of request ``index`` so far, a RequestOutput."""

    def close(self) -> None:
        """Nothing comes any more, because all is there or because something broke."""


def one_line(error: BaseException) -> str:
    """An exception's message on one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def engine_names() -> list[str]:
    """The arguments of LLM."""
    from ms_spec.config import EngineConfig

    return list(EngineConfig.model_fields)


def check_engine(arguments: dict[str, Any]) -> None:
    """Raises ConfigError for engine arguments that cannot work, without importing MindSpore."""
    from ms_spec.config import EngineConfig

    EngineConfig.parse(**arguments)


def make_llm(arguments: dict[str, Any]) -> Any:
    """The engine. A function of its own so that tests can put another in its place."""
    import ms_spec

    try:
        return ms_spec.LLM(**arguments)
    except ModuleNotFoundError as error:
        if error.name != "mindspore":
            raise
        python = ".".join(map(str, sys.version_info[:2]))
        raise ConfigError(
            f"MindSpore is not installed for this Python ({python}); for Python 3.9 to 3.12: "
            "pip install 'mindspore>=2.9,<2.11'"
        ) from None


def _waves(items: list[Any], size: int | None) -> Iterator[list[Any]]:
    step = size or len(items)
    for start in range(0, len(items), step):
        yield items[start : start + step]


def encode_prompt(prompt: Prompt, tokenizer: Any, chat: bool) -> Any:
    """A prompt as the engine takes it."""
    if isinstance(prompt.content, str):
        if not chat:
            return prompt.content
        messages = [{"role": "user", "content": prompt.content}]
        return chat_prompt(tokenizer, messages, {"add_generation_prompt": True})
    return {"prompt_token_ids": prompt.content}


def prepare(job: Job) -> list[SamplingParams]:
    """Checks a job and fills in what it leaves open. Returns the SamplingParams of each prompt.

    Raises:
        ValueError: something in it cannot work.
    """
    if not job.prompts:
        raise ConfigError("no prompts: give --prompt TEXT or --prompts FILE")
    batch, limit = job.batch, job.engine.get("max_num_seqs")
    if batch is not None and (not isinstance(batch, int) or isinstance(batch, bool) or batch < 1):
        raise ConfigError(f"batch = {batch!r}: must be an integer >= 1")
    if batch is not None and isinstance(limit, int) and batch > limit:
        raise ConfigError(f"batch = {batch}: must be at most max_num_seqs = {limit}; use {limit}")
    defaults = {**DEFAULT_SAMPLING, **job.sampling}
    params = []
    for number, prompt in enumerate(job.prompts, 1):
        try:
            params.append(SamplingParams(**{**defaults, **prompt.sampling}))
        except ValueError as error:
            raise ConfigError(f"prompt {number}: {error}" if prompt.sampling else str(error)) from None
    if len(job.prompts) == 1 and not job.prompts[0].content:
        raise ConfigError("prompt is empty; give at least one character")
    job.engine.setdefault("model", DEFAULT_MODEL)
    if limit is None:
        # Graphs for requests that will never come would cost time at every start.
        job.engine["max_num_seqs"] = min(batch or 8, sum(one.n for one in params))
    check_engine(job.engine)
    seed = job.engine.get("seed")
    if seed is not None:
        # What the engine would give them, but by their place in the job, whatever has been answered before.
        for number, one in enumerate(params):
            one.seed = request_seed(seed, number) if one.seed is None else one.seed
    return params


def answer(job: Job, params: list[SamplingParams], printer: Printer, done: Collection[int] = ()) -> int:
    """Runs a job that has been prepared. Returns the exit code: 0, or 2 when a request of it was refused.

    params: what :func:`prepare` gave. done: indices of prompts that need no answer any more.

    Raises:
        ValueError: the engine refuses the job.
    """
    left = [index for index in range(len(job.prompts)) if index not in done]
    if not left:
        return 0
    llm = make_llm(job.engine)
    failed = False
    try:
        tokenizer = llm.get_tokenizer()
        printer.start(tokenizer)
        for wave in _waves(left, job.batch):
            contents = [encode_prompt(job.prompts[index], tokenizer, job.chat) for index in wave]
            sampling = [params[index] for index in wave]
            for position, output in stream_prompts(llm, contents, sampling, len(job.prompts) == 1):
                index = wave[position]
                failed |= output.finished and output.error is not None
                printer.update(index, job.prompts[index], output)
    finally:
        try:
            printer.close()
        finally:
            llm.close()
    return 2 if failed else 0


def stream_prompts(
    llm: Any, contents: list[Any], params: list[SamplingParams], alone: bool
) -> Iterator[tuple[int, Any]]:
    """``llm.stream``, but a bad request that is alone only in its wave does not end the job."""
    try:
        yield from llm.stream(contents, params)
    except RequestError as error:
        if alone:
            raise
        from ms_spec.outputs import RequestOutput

        yield 0, RequestOutput.failed("0", None, [], str(error))
