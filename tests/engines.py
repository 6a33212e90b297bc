"""LLM objects that tests share: compiling takes a second a graph, so each configuration is made once a process."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tiny import copy_of, tiny_model

from ms_spec import LLM, RequestOutput, SamplingParams, job
from ms_spec.config import EngineConfig

_LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}


def llm(
    model: Any, *, k: int = 0, speculative: dict[str, Any] | None = None, adaptive: bool = False, **arguments: Any
) -> LLM:
    """The shared LLM of a configuration. ``k``: ngram with so many drafts, 0 for plain decoding.

    ``adaptive`` False: all drafts are verified, however bad they are.
    """
    if k:
        arguments["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": k,
            **_LOOKUP,
            **(speculative or {}),
        }
    arguments.setdefault("generation_config", "vllm")
    return _made(str(model), adaptive, json.dumps(arguments, sort_keys=True))


@functools.cache
def _made(model: str, adaptive: bool, arguments: str) -> LLM:
    made = LLM(model, **json.loads(arguments))
    made._engine.scheduler._adaptive = adaptive
    return made


@functools.cache
def copying_model() -> Path:
    """A model that tends to say again what it has just said, so that drafts are often right, also at temperature 0.8.

    Its output matrix is its embedding, which outweighs what the layers add.
    """
    path = copy_of(tiny_model("qwen3", tie=True, vocab=160, seed=2))
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 2
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@functools.cache
def counting_model() -> Path:
    """A model that says token 101 after token 100: its output matrix is its embedding, one row further down."""
    path = copy_of(tiny_model("llama", vocab=160, seed=2))
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 5
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0).contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def greedy(max_tokens: int | None = 24, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **fields})


def sampled(seed: int, max_tokens: int | None = 24, **fields: Any) -> SamplingParams:
    """Temperature 0.8, top-p 0.95, unless ``fields`` say otherwise."""
    fields = {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True, **fields}
    return SamplingParams(seed=seed, max_tokens=max_tokens, **fields)


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The ids of every sample of every request; none may have failed."""
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [sample.token_ids for output in outputs for sample in output.outputs]


def run(engine: LLM, prompts: Sequence[Any], params: Any) -> list[list[int]]:
    """Ids of every sample. Afterwards all blocks are free again."""
    outputs = engine.generate(list(prompts), params, use_tqdm=False)
    assert idle(engine)
    return token_ids(outputs)


def alone(engine: LLM, prompts: Sequence[Any], params: Any) -> list[list[int]]:
    """Like :func:`run`, one request after the other."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    return [ids for prompt, one in zip(prompts, each) for ids in run(engine, [prompt], [one])]


def idle(engine: LLM) -> bool:
    """Whether no request holds anything."""
    core = engine._engine
    return not core.has_unfinished() and core.num_free_blocks == engine.limits.num_blocks - 1


class Counted:
    """What an engine did inside a ``with``: a difference of its metrics."""

    def __init__(self, engine: LLM) -> None:
        self.engine = engine

    def __enter__(self) -> Counted:
        self._before = self.engine.metrics()
        return self

    def __exit__(self, *_: object) -> None:
        after = self.engine.metrics()
        for name in ("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_preemptions", "num_decode_tokens"):
            setattr(self, name.removeprefix("num_"), getattr(after, name) - getattr(self._before, name))


@contextmanager
def lent(engine: LLM, monkeypatch: Any) -> Iterator[None]:
    """The command line gets this LLM instead of a new one, if that would be the same; it cannot close it."""

    def made(arguments: dict[str, Any]) -> LLM:
        assert EngineConfig.parse(**arguments) == engine.config
        return engine

    with monkeypatch.context() as patch:
        patch.setattr(job, "make_llm", made)
        patch.setattr(engine, "close", lambda: None)
        yield
