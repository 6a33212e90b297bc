"""An engine without a model: it answers every prompt with words of its own, in the shape of the real one."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

from ms_spec.errors import RequestError
from ms_spec.metrics import Metrics
from ms_spec.outputs import CompletionOutput, RequestOutput

TOKENS = [b"He", b"llo", b" w\xc3", b"\xb6r", b"ld", b"!"]
"""The answer, one token an entry; the third and fourth share a letter."""


class FakeTokenizer:
    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
        return "".join(f"{message['role']}: {message['content']}" for message in messages) + "?" * add_generation_prompt

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def stream_decoder(self, skip_special_tokens: bool = True) -> FakeTokenizer:
        made = FakeTokenizer()
        made._decoder = codecs.getincrementaldecoder("utf-8")()
        return made

    def push(self, ids: list[int]) -> str:
        return "".join(self._decoder.decode(TOKENS[i]) for i in ids)


class FakeLLM:
    """Emits TOKENS in three steps, the last prompt first. A prompt that holds "bad" is refused."""

    drafted = [False, True, True, True, False, False]
    made: list[FakeLLM] = []
    fail: BaseException | None = None

    def __init__(self, **arguments: Any):
        self.arguments = arguments
        self.calls: list[tuple[list[Any], list[Any]]] = []
        self.closed = False
        FakeLLM.made.append(self)

    def get_tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    def close(self) -> None:
        self.closed = True

    def stream(self, prompts: list[Any], params: list[Any]) -> Iterator[tuple[int, RequestOutput]]:
        self.calls.append((prompts, params))
        if len(prompts) == 1 and "bad" in str(prompts[0]):
            raise RequestError("prompt is bad; use a good one")
        for index in reversed(range(len(prompts))):
            if "bad" in str(prompts[index]):
                yield index, RequestOutput.failed(str(index), None, [], "prompt is bad; use a good one")
                continue
            samples = [CompletionOutput(number) for number in range(params[index].n)]
            output = RequestOutput(str(index), str(prompts[index]), [7], samples, False, self._metrics())
            for count in (1, 5, 6):
                if self.fail is not None and count == 5:
                    raise self.fail
                for sample in samples:
                    sample.token_ids = list(range(count))
                    sample.from_draft = self.drafted[:count]
                    sample.text = b"".join(TOKENS[:count]).decode(errors="ignore")
                    sample.finish_reason = "stop" if count == 6 else None
                output.finished = count == 6
                yield index, output

    def _metrics(self) -> Metrics:
        return Metrics(
            num_steps=2,
            num_drafts=2,
            num_draft_tokens=4,
            num_accepted_tokens=2,
            num_decode_tokens=4,
            acceptance_per_position=[1, 1],
            decode_seconds=0.5,
            time_to_first_token_s=0.25,
        )
