"""What callers of the Python API give: prompts, conversations and sampling parameters. Checked without a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Number
from typing import Any, Optional, Union

from ms_spec.errors import RequestError, unknown_name
from ms_spec.models.chat_template import NoTemplate, check_messages
from ms_spec.models.text import check_unicode
from ms_spec.sampling_params import SamplingParams
from ms_spec.values import integer

Prompt = Union[str, Sequence[int], Mapping[str, Any]]
Params = Optional[Union[SamplingParams, Sequence[SamplingParams]]]
Drafts = Optional[Union[int, Sequence[Optional[int]]]]
PROMPT_FIELDS = ("prompt", "prompt_token_ids")
CHAT_ARGUMENTS = {
    "messages": "messages",
    "template": "chat_template",
    "chat_template": "chat_template",
    "add_generation_prompt": "add_generation_prompt",
}
"""Names that are no variables of a template, and the argument of ``LLM.chat`` that is meant."""


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or many, as a list of prompts. They themselves are not looked at: see :func:`read_prompt`."""
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise RequestError(
            f"prompts must be a text, token ids, a dict or a list of those, not {type(prompts).__name__}"
        )
    if prompts and all(isinstance(item, Number) for item in prompts):
        return [list(prompts)]
    return list(prompts)


def read_prompt(item: Any) -> tuple[str | None, list[int] | None]:
    """Text and token ids of a prompt; without ids the text has to be encoded.

    Raises:
        RequestError: it is no prompt, it is empty, or it is itself the RequestError that making it ended with.
    """
    if isinstance(item, RequestError):
        raise RequestError(str(item))
    text, ids = item if isinstance(item, str) else None, None
    if isinstance(item, Mapping):
        for name in item:
            if name not in PROMPT_FIELDS:
                raise RequestError(unknown_name("prompt dict field", name, PROMPT_FIELDS))
        text, ids = item.get("prompt"), item.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"prompt = {text!r:.60}: must be a text")
        if text is None and ids is None:
            raise RequestError("a prompt dict needs 'prompt' (a text) or 'prompt_token_ids' (a list of ids)")
    elif text is None:
        if not isinstance(item, (list, tuple)) and not hasattr(item, "tolist"):
            raise RequestError(f"a prompt must be a text, a list of token ids or a dict, not {type(item).__name__}")
        ids = item
    if ids is not None:
        ids = token_ids(ids)
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        return text, ids
    if not text:
        raise RequestError("the prompt is empty; give at least one character")
    try:
        check_unicode(text, "the prompt")
    except ValueError as error:
        raise RequestError(str(error)) from None
    return text, None


def encode_text(tokenizer: Any, text: str, vocab_size: int | None = None, special: bool = True) -> list[int]:
    """Token ids of a text, with the tokenizer's special tokens or without.

    Raises:
        RequestError: the tokenizer makes no token of it, or one that is not among the model's ``vocab_size``.
    """
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
    if not ids:
        raise RequestError(f"the prompt {text!r:.60}: the tokenizer makes no token of it; give another text")
    if vocab_size is not None and max(ids) >= vocab_size:
        raise RequestError(
            f"the prompt: the tokenizer makes token {max(ids)} of it, but the model knows 0 to {vocab_size - 1} only; "
            "use the model's own tokenizer"
        )
    return ids


def token_ids(values: Any, name: str = "prompt_token_ids") -> list[int]:
    """Integers of any kind as a list of int. Raises RequestError that names the place of what is none."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list of token ids, not {type(values).__name__}")
    ids = list(values)
    for place, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise RequestError(f"{name}[{place}] = {value!r:.60}: must be a token id, an integer >= 0")
    return [int(value) for value in ids]


def shown_prompt(item: Any) -> tuple[str | None, list[int]]:
    """Text and ids of a prompt that was refused, as far as there are any, for its output."""
    text = item if isinstance(item, str) else None
    if isinstance(item, Mapping):
        text, item = item.get("prompt"), item.get("prompt_token_ids")
    try:
        return text if isinstance(text, str) else None, token_ids(() if item is None else item)
    except RequestError:
        return text if isinstance(text, str) else None, []


def checked_params(given: Any, count: int) -> list[SamplingParams]:
    """The parameters of each of ``count`` prompts: copies, checked as they are now.

    Raises:
        ValueError: they are none, one has a value that is not allowed, or there are more or fewer than prompts.
    """
    if isinstance(given, SamplingParams):
        return [given.clone()] * count
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"sampling_params must be SamplingParams or a list of them, not {type(given).__name__}")
    if len(given) != count:
        raise ValueError(
            f"sampling_params has {len(given)} entries for {count} prompts; give one for all, or one for each"
        )
    params = []
    for place, one in enumerate(given):
        if not isinstance(one, SamplingParams):
            raise ValueError(f"sampling_params[{place}] is a {type(one).__name__}; all must be SamplingParams")
        try:
            params.append(one.clone())
        except ValueError as error:
            raise ValueError(f"sampling_params[{place}]: {error}") from None
    return params


def checked_drafts(given: Any, count: int, most: int) -> list[int]:
    """The most drafts of each of ``count`` prompts. ``given``: a number or a list of them; None: ``most``.

    Raises:
        ValueError: one is negative or beyond ``most``, or there are more or fewer than prompts.
    """
    several = isinstance(given, (list, tuple))
    if several and len(given) != count:
        raise ValueError(
            f"num_speculative_tokens has {len(given)} entries for {count} prompts; give one for all, or one for each"
        )
    allowed = f"an integer from 0 (no speculation) to {most}, the engine's"
    found = []
    for place, one in enumerate(given if several else [given] * count):
        name = f"num_speculative_tokens[{place}]" if several else "num_speculative_tokens"
        found.append(most if one is None else integer(name, one, 0, allowed, most))
    return found


def check_call(prompts: Any, sampling_params: Params) -> None:
    """Raises what ``LLM.generate`` would raise for these arguments, whatever the model."""
    items = as_prompts(prompts)
    if sampling_params is not None:
        checked_params(sampling_params, len(items))
    if len(items) == 1:
        read_prompt(items[0])


def as_conversations(messages: Any) -> tuple[list[Any], bool]:
    """Conversations, and whether they were given as a list of several."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a list of {'role', 'content'} dicts, or a list of such lists")
    if any(isinstance(item, (list, tuple)) for item in messages):
        return list(messages), True
    return [messages], False


def chat_options(template: Any, given: Any, more: Mapping[str, Any], add_generation_prompt: Any) -> dict[str, Any]:
    """The options of ``render_chat`` from those of ``LLM.chat``. Raises ValueError."""
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"chat_template_kwargs = {given!r:.60}: must be a dict of variables of the template")
    if not isinstance(add_generation_prompt, bool):
        raise ValueError(f"add_generation_prompt = {add_generation_prompt!r:.60}: must be True or False")
    variables = {**more, **(given or {})}
    for name in variables:
        if not isinstance(name, str):
            raise ValueError(f"chat_template_kwargs has the name {name!r:.60}: must be a text")
        if name in CHAT_ARGUMENTS:
            raise ValueError(f"chat_template_kwargs.{name}: give it as chat's own argument {CHAT_ARGUMENTS[name]}")
    options = {**variables, "add_generation_prompt": add_generation_prompt}
    return options if template is None else {**options, "template": template}


def chat_prompt(
    tokenizer: Any, conversation: Any, options: Mapping[str, Any], where: str = ""
) -> dict[str, Any] | RequestError:
    """The prompt that the chat template makes of a conversation, or the RequestError that it fails with.

    options: for ``render_chat``. where: begins the error.

    Raises:
        NoTemplate: the model has no template that could be used, whatever the conversation.
    """
    try:
        text = tokenizer.render_chat(check_messages(conversation), **options)
        check_unicode(text, "the conversation")
        return {"prompt_token_ids": encode_text(tokenizer, text, special=False), "prompt": text}
    except NoTemplate:
        raise
    except ValueError as error:
        return RequestError(where + str(error))
