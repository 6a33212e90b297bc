"""The Python API: ``LLM`` and ``generate``."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

from ms_spec.config import EngineConfig
from ms_spec.engine import Engine
from ms_spec.errors import EngineError, RequestError
from ms_spec.inputs import (
    Drafts,
    Params,
    Prompt,
    as_conversations,
    as_prompts,
    chat_options,
    chat_prompt,
    check_call,
    checked_drafts,
    checked_params,
    encode_text,
    read_prompt,
    shown_prompt,
)
from ms_spec.interrupt import HeldInterrupts
from ms_spec.limits import device_of
from ms_spec.metrics import EngineMetrics
from ms_spec.outputs import RequestOutput
from ms_spec.overlap import OverlappedEngine
from ms_spec.parts import Parts, sampling_defaults
from ms_spec.request import Request
from ms_spec.runtime import WorkThread, graph_thread, plan_thread
from ms_spec.sampling_params import SamplingParams
from ms_spec.world import check_world, leads

_log = logging.getLogger("ms_spec")


class LLM:
    """A model with everything that it takes to generate text.

    Args:
        model: a directory, a .gguf file, a Hugging Face name or an alias. Default: ``smollm2-135m``.
        engine_args: see :class:`ms_spec.config.EngineConfig`. Wrong ones are a ValueError of one line, raised before
            anything is loaded.

    With ``tensor_parallel_size`` N the program runs in an msrun job of N workers (see ``docs/parallel.md``), in rank
    0's process. In the others this call serves rank 0, and ends the process when rank 0 ends.

    Several threads may use one LLM; their requests share its steps. Ctrl-C raises KeyboardInterrupt in the main thread
    when the running step has ended; what that thread has asked for is aborted, and the LLM can be used on.
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        config = EngineConfig.parse(model, **engine_args)
        check_world(config.tensor_parallel_size)
        if not leads():
            from ms_spec.worker import serve

            serve(device_of(config))
        from ms_spec.assembly import assemble

        self._start(config, assemble(config))

    @classmethod
    def of_parts(cls, config: EngineConfig, parts: Parts) -> LLM:
        """An LLM around a model that is already there."""
        llm = cls.__new__(cls)
        llm._start(config, parts)
        return llm

    def _start(self, config: EngineConfig, parts: Parts) -> None:
        self.config = config
        self.limits = parts.limits
        self._parts: Parts | None = parts
        self._lock = threading.RLock()
        self._asking: deque[None] = deque()
        self._left: deque[Request] = deque()
        self._turns = 0
        if config.distributed_executor_backend is not None:
            _log.info("distributed_executor_backend = %s has no effect here", config.distributed_executor_backend)
        drafts = 0 if config.speculative_config is None else parts.limits.num_speculative_tokens
        budget, seqs = config.token_budget, config.max_num_seqs
        if drafts and budget < 2 * seqs:
            _log.warning(
                "max_num_batched_tokens = %d leaves no room for a draft of each of max_num_seqs = %d requests; use %d",
                budget,
                seqs,
                seqs * (drafts + 1),
            )
        inherit = config.generation_config == "auto"
        self._defaults = sampling_defaults(parts.generation_config) if inherit else {}
        make_engine: Callable[..., Engine] = Engine
        graphs, asking, left = graph_thread(), self._asking, self._left
        thread: WorkThread = graphs
        if parts.carries:
            make_engine, thread = partial(OverlappedEngine, submit=graphs.submit), plan_thread()
        self._engine = make_engine(
            parts.runner,
            parts.limits,
            parts.vocab_size,
            parts.eos_token_ids,
            parts.make_decoder,
            seed=config.seed,
            on_thread=thread.run,
            may_go_on=lambda: thread.may_go_on() and not asking and not left,
            lone_history=config.additional_config.rejection_sampler_config.enable_entropy_verify,
            drafter=parts.drafter,
            sink=parts.sink,
            tokenizer=parts.tokenizer,
        )

    # Use

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        num_speculative_tokens: Drafts = None,
    ) -> list[RequestOutput]:
        """Completes prompts; results in their order.

        Args:
            prompts: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}; or a list of those.
            sampling_params: for all prompts, or one for each. None: :meth:`get_default_sampling_params`.
            use_tqdm: a progress bar, shown when it takes longer than two seconds.
            num_speculative_tokens: the most drafts at a time, for all prompts or one for each; 0 switches speculation
                off, None is the engine's number.

        Raises:
            ValueError: a single prompt that cannot be served, or a list of parameters of the wrong length. Of several
                prompts only those that cannot be served have finish_reason "error" and say why in ``error``.
            EngineError: the model failed on a single prompt.
        """
        items, params, drafts = self._checked(prompts, sampling_params, num_speculative_tokens)
        outputs: list[RequestOutput | None] = [None] * len(items)
        if not items:
            return []
        from tqdm import tqdm

        tokens = 0
        bar = tqdm(total=len(items), desc="prompts", delay=2, disable=not use_tqdm, dynamic_ncols=True)
        with bar, closing(self._run(items, params, drafts, only_finished=True)) as results:
            for position, output in results:
                outputs[position] = output
                tokens += sum(len(one.token_ids) for one in output.outputs)
                bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                bar.update()
        return [output for output in outputs if output is not None]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        num_speculative_tokens: Drafts = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Like :meth:`generate`, but yields (position of the prompt, its output so far) whenever an output has grown.

        It is the same RequestOutput each time, with more in it: copy what has to stay as it is. The last one of each
        prompt has ``finished`` set. Leaving the loop early aborts what is still running.
        """
        return self._run(*self._checked(prompts, sampling_params, num_speculative_tokens), only_finished=False)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        num_speculative_tokens: Drafts = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers conversations: a list of {"role", "content"} messages, or a list of such lists.

        Content is a text, or a list of {"type": "text", "text": ...} parts, which are joined with line ends. Otherwise
        like :meth:`generate`: of several conversations only those that are wrong fail.

        Args:
            chat_template: Jinja text, or the name of one of the model's templates, instead of its default.
            chat_template_kwargs, template_options: variables of the template, such as ``tools`` or
                ``enable_thinking``. A template ignores those that it does not know.
        """
        conversations, several = as_conversations(messages)
        options = chat_options(chat_template, chat_template_kwargs, template_options, add_generation_prompt)
        tokenizer = self.get_tokenizer()
        prompts: list[Any] = [
            chat_prompt(tokenizer, conversation, options, f"conversation {number}: " if several else "")
            for number, conversation in enumerate(conversations)
        ]
        return self.generate(prompts, sampling_params, use_tqdm, num_speculative_tokens=num_speculative_tokens)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._open().tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: vLLM's defaults, and what the checkpoint's generation_config sets."""
        return SamplingParams(**self._defaults)

    def metrics(self) -> EngineMetrics:
        """Counts over all requests since the start."""
        with HeldInterrupts(), self._turn():
            return self._engine.metrics()

    def close(self) -> None:
        """Aborts what is running and lets the model go. Using the LLM afterwards is an error."""
        with HeldInterrupts(), self._turn():
            if self._parts is not None:
                self._engine.abort_all()
                if self._parts.sink is not None:
                    self._parts.sink.close()
                self._parts.close()
                self._parts = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an LLM cannot be pickled or copied: it holds a model; make one in the process that uses it")

    # The loop

    def _open(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("this LLM is closed")
        return self._parts

    def _run(
        self, items: list[Any], params: list[SamplingParams], drafts: list[int], only_finished: bool
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        inbox: deque[Request] = deque()
        places: dict[int, int] = {}
        requests: list[Request] = []
        try:
            for place, (item, one, most) in enumerate(zip(items, params, drafts)):
                try:
                    with HeldInterrupts():
                        request = self._add(item, one, most)
                        request.inbox = inbox
                        places[id(request)] = place
                        requests.append(request)
                except RequestError as error:
                    if len(items) == 1:
                        raise
                    yield place, RequestOutput.failed(str(place), *shown_prompt(item), str(error))
                    continue
            left = len(requests)
            while left:
                for request, finished in self._advance(inbox, only_finished):
                    output = request.output
                    left -= finished
                    if finished and len(items) == 1 and request.failed:
                        raise EngineError(output.error)
                    # Another thread may have finished it since: then it comes once more.
                    if finished or not (only_finished or output.finished):
                        yield places[id(request)], output
        finally:
            # A garbage collection may be what ends this, on any thread and in the middle of a step: wait for nobody.
            with HeldInterrupts():
                self._left.extend(request for request in requests if not request.output.finished)
                self._abort_left()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The engine is this thread's. An engine that runs on and on sees that somebody asks for it."""
        self._asking.append(None)
        try:
            self._lock.acquire()
        finally:
            self._asking.pop()
        try:
            self._abort_left()
            self._turns += 1
            try:
                yield
            finally:
                self._turns -= 1
        finally:
            self._lock.release()
            self._abort_left()

    def _abort_left(self) -> None:
        """Aborts what nobody waits for any more. If the engine is somebody's, he does it when his turn ends."""
        while self._left and self._lock.acquire(blocking=False):
            try:
                if self._turns:  # this thread's own
                    return
                with suppress(IndexError):
                    while True:
                        self._engine.abort(self._left.popleft().output.request_id)
            finally:
                self._lock.release()

    def _advance(self, inbox: deque[Request], only_finished: bool) -> list[tuple[Request, bool]]:
        """Requests of this caller that have grown, and whether they are finished. Computes steps if none has."""

        def enough() -> bool:
            return any(request.output.finished or not only_finished for request in inbox)

        with HeldInterrupts(), self._turn():
            if not inbox:
                self._engine.advance(enough)
            grown = [(request, request.output.finished) for request in inbox]
            for request in inbox:
                request.changed = False
            inbox.clear()
        return grown

    def _add(self, item: Any, params: SamplingParams, num_drafts: int) -> Request:
        parts = self._open()
        text, ids = read_prompt(item)
        if ids is None:
            ids = encode_text(parts.tokenizer, text or "", parts.vocab_size)
        with self._turn():
            return self._engine.add_request(ids, params, prompt=text, num_drafts=num_drafts)

    def _checked(
        self, prompts: Any, sampling_params: Params, num_speculative_tokens: Drafts
    ) -> tuple[list[Any], list[SamplingParams], list[int]]:
        """The prompts as a list, and the parameters and the most drafts of each."""
        self._open()
        items = as_prompts(prompts)
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        drafts = checked_drafts(num_speculative_tokens, len(items), self.limits.num_speculative_tokens)
        return items, checked_params(given, len(items)), drafts


def generate(
    prompts: Prompt | Sequence[Prompt],
    model: str | None = None,
    sampling_params: Params = None,
    speculative_config: Mapping[str, Any] | None = None,
    use_tqdm: bool = True,
    **engine_args: Any,
) -> list[RequestOutput]:
    """Loads a model, completes prompts, and lets the model go. See :class:`LLM` and :meth:`LLM.generate`."""
    if speculative_config is not None:
        engine_args["speculative_config"] = speculative_config
    EngineConfig.parse(model, **engine_args)
    check_call(prompts, sampling_params)
    with LLM(model, **engine_args) as llm:
        return llm.generate(prompts, sampling_params, use_tqdm)
