"""Text to token ids and back, over the ``tokenizers`` library alone.

transformers takes seconds to import and refuses directories whose tokenizer class it does not know; tokenizer.json
holds all that is needed. Files that have to be converted first (sentencepiece, GGUF metadata) are converted once and
kept in the user's cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ms_spec.models import chat_template
from ms_spec.models.stream_decoder import StreamDecoder
from ms_spec.models.text import check_unicode

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TEMPLATE_OPTIONS = (
    "continue_final_message",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_tensors",
    "tokenizer_kwargs",
    "truncation",
)
"""Options of transformers' apply_chat_template that are no variables of the template."""


class Encoded(dict):
    """Token ids and attention mask of a text, or of a list of texts: ``["input_ids"]`` or ``.input_ids``."""

    def __init__(self, ids: list[Any], several: bool) -> None:
        mask = [[1] * len(one) for one in ids] if several else [1] * len(ids)
        super().__init__(input_ids=ids, attention_mask=mask)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _only_defaults(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} = {value!r:.40}: not supported by this tokenizer; use as_transformers()")


class Tokenizer:
    """Encodes and decodes like transformers' fast tokenizer for the same files.

    One difference: ``clean_up_tokenization_spaces`` (which drops spaces before punctuation) is not applied, so that
    text and tokens correspond.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, Any],
        templates: Mapping[str, str],
        location: str,
        folder: Path | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.templates = dict(templates)
        self.location = location
        self._folder = folder
        self._transformers: Any = None
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included (a model's own may be larger: padding)."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens.get("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._id("pad_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. ``add_special_tokens``: with the begin-of-text token where the model wants one.

        ValueError (one line) for a text that is not valid Unicode.
        """
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:
            check_unicode(text)
            raise

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True, **options: Any) -> Encoded:
        """``encode`` of a text, or of each of several, as transformers returns it. No padding, no truncation."""
        _only_defaults(options)
        if isinstance(text, str):
            return Encoded(self.encode(text, add_special_tokens), False)
        return Encoded([self.encode(one, add_special_tokens) for one in text], True)

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of the ids. Ids that the tokenizer does not know (padding of the vocabulary) give nothing."""
        one = hasattr(ids, "__index__") and not getattr(ids, "shape", ())
        numbers = [int(i) for i in ([ids] if one else ids)]  # type: ignore[union-attr, list-item, arg-type]
        return str(self.backend.decode(numbers, skip_special_tokens=skip_special_tokens))

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """``decode`` of each."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def stream_decoder(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """A new incremental detokenizer."""
        return StreamDecoder(self.backend, skip_special_tokens)

    def token_text(self, token: int) -> str:
        """How the vocabulary writes a token, such as "<|im_end|>"; empty for unknown ids."""
        return self.backend.id_to_token(int(token)) or ""

    def token_id(self, text: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        return self.backend.token_to_id(text)

    def render_chat(
        self,
        messages: chat_template.Messages,
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """A conversation as text. Encode it with ``add_special_tokens=False``: the template writes them itself.

        ``template``: Jinja text, or the name of one of the model's templates. ``variables``: what it may name, such as
        ``tools``; a template ignores those that it does not know.
        """
        if template is not None and not isinstance(template, str):
            raise chat_template.NoTemplate(
                f"chat_template = {template!r:.60}: must be Jinja text, or the name of one of the model's templates"
            )
        if template is None and variables.get("tools") and "tool_use" in self.templates:
            template = "tool_use"
        if template is None or template in self.templates:
            template = chat_template.choose(self.templates, self.location, template)
        return chat_template.render(
            messages, template, {**self.special_tokens, **variables}, add_generation_prompt=add_generation_prompt
        )

    def encode_chat(self, messages: chat_template.Messages, **options: Any) -> list[int]:
        """``render_chat`` as token ids."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """A conversation, or each of a list, as token ids; as text with ``tokenize=False``. As transformers has it."""
        _only_defaults({name: variables.pop(name, None) for name in _TEMPLATE_OPTIONS})
        several = (
            bool(conversation) and isinstance(conversation, (list, tuple)) and not isinstance(conversation[0], Mapping)
        )
        variables.update(tools=tools, documents=documents, add_generation_prompt=add_generation_prompt)
        texts = [
            self.render_chat(one, template=chat_template, **variables)
            for one in (conversation if several else [conversation])
        ]
        if not tokenize:
            return texts if several else texts[0]
        encoded = self(texts if several else texts[0], add_special_tokens=False)
        return encoded if return_dict else encoded.input_ids

    def as_transformers(self) -> Any:
        """The same as transformers' PreTrainedTokenizerFast (imports transformers: seconds)."""
        if self._transformers is None:
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=self.backend, clean_up_tokenization_spaces=False, **self.special_tokens
            )
            if self.templates:
                only = len(self.templates) == 1 and "default" in self.templates
                tokenizer.chat_template = self.templates["default"] if only else dict(self.templates)
            tokenizer.name_or_path = str(self._folder or self.location)
            self._transformers = tokenizer
        return self._transformers

    def _id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def open_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or of a .gguf file. ValueError (one line) if there is none."""
    path = Path(path)
    if path.is_dir():
        from ms_spec.models.tokenizer_files import from_directory

        return from_directory(path)
    if path.suffix.lower() == ".gguf" and path.is_file():
        from ms_spec.models.tokenizer_gguf import from_gguf

        return from_gguf(path)
    raise ValueError(f"tokenizer: {str(path)!r} is neither a directory nor a .gguf file")


def from_json(text: str, where: str) -> tokenizers.Tokenizer:
    """The backend from the text of a tokenizer.json, without the truncation and padding of its training."""
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        raise ValueError(f"{where}: not a usable tokenizer.json ({str(error).splitlines()[0]})") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return content
