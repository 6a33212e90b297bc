"""Tokenizers of Hugging Face directories: tokenizer.json, or sentencepiece and BPE files that are converted once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from ms_spec.models.chat_template import read_templates
from ms_spec.models.checkpoint.identity import file_identity
from ms_spec.models.tokenizer import SPECIAL_NAMES, Tokenizer, from_json, read_json
from ms_spec.models.user_cache import cache_root, write_atomically

_CONVERTIBLE = ("tokenizer.model", "vocab.json", "merges.txt")
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
# Classes of transformers that put bos and eos around a text by their own switches, whatever tokenizer.json says.
_SWITCHED = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
_CLASS_DEFAULTS = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "CodeLlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "Qwen2Tokenizer": {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
}


def from_directory(folder: Path) -> Tokenizer:
    """What AutoTokenizer gives for the directory; a class that transformers does not know is no obstacle."""
    config = read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        backend = from_json(text, str(folder / "tokenizer.json"))
        special = _special_tokens(folder, config)
        _finish(backend, config, special)
    elif any((folder / name).is_file() for name in _CONVERTIBLE[:2]):
        backend, special = _converted(folder)
    else:
        raise ValueError(f"tokenizer: {str(folder)!r} has no tokenizer.json and no tokenizer.model; give --tokenizer")
    return Tokenizer(backend, special, read_templates(folder, config), str(folder), folder)


def _content(token: Any) -> str | None:
    """Special tokens are written as strings or as objects."""
    return token.get("content") if isinstance(token, Mapping) else token


def _class_name(config: Mapping[str, Any]) -> str:
    return str(config.get("tokenizer_class") or "").removesuffix("Fast")


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(config)
    if "added_tokens_decoder" not in config:
        given.update(read_json(folder / "special_tokens_map.json"))  # the older way
    defaults = _CLASS_DEFAULTS.get(_class_name(config), {})
    found: dict[str, Any] = {}
    for name in SPECIAL_NAMES:
        token = _content(given[name]) if name in given else defaults.get(name)
        if token is not None:
            found[name] = token
    extra = [_content(t) for t in given.get("additional_special_tokens") or []]
    if extra:
        found["additional_special_tokens"] = extra
    return found


def _finish(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, Any]) -> None:
    """What transformers does to a tokenizer.json after reading it."""
    known = {t.content for t in backend.get_added_tokens_decoder().values()}
    entries = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda e: int(e[0]))
    named = [v for k, v in special.items() if k != "additional_special_tokens"]
    named += special.get("additional_special_tokens", [])
    for _, entry in entries:
        if entry["content"] not in known:
            flags = {k: entry[k] for k in ("single_word", "lstrip", "rstrip", "normalized") if k in entry}
            token = tokenizers.AddedToken(entry["content"], special=entry.get("special", False), **flags)
            token.special = token.special or entry["content"] in named
            backend.add_tokens([token])
            known.add(entry["content"])
    for text in named:
        if text not in known:
            backend.add_tokens([tokenizers.AddedToken(text, special=True)])
            known.add(text)
    # Its base class forces this switch of byte-level tokenizers to what the config says, false by default.
    with contextlib.suppress(Exception):
        state = json.loads(backend.pre_tokenizer.__getstate__())
        prefix = bool(config.get("add_prefix_space") or False)
        if state.get("type") == "ByteLevel" and state["add_prefix_space"] != prefix:
            backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
                add_prefix_space=prefix, trim_offsets=state["trim_offsets"], use_regex=state.get("use_regex", True)
            )
    if _class_name(config) in _SWITCHED:
        bos = special["bos_token"] if config.get("add_bos_token", True) else None
        eos = special["eos_token"] if config.get("add_eos_token", False) else None
        surround(backend, bos, eos)


def surround(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes encode put these tokens around a text."""
    single = [bos] * bool(bos) + ["$A"] + [eos] * bool(eos)
    tokens = [(t, backend.token_to_id(t)) for t in dict.fromkeys((bos, eos)) if t]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)


def _converted(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Through transformers' converters; the result is cached under a hash of all files that it depends on."""
    files = [folder / name for name in (*_CONVERTIBLE, *_COMPANIONS) if (folder / name).is_file()]
    key = hashlib.sha256(json.dumps([1, [f.name for f in files], file_identity(files)]).encode()).hexdigest()[:32]
    cached = cache_root() / "tokenizers" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(cached.read_text(encoding="utf-8"))
        return from_json(content["tokenizer"], str(cached)), content["special_tokens"]
    # It imports protobuf, which MindSpore can use only in this form, and asks for itself too late then.
    os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
    from transformers import AutoTokenizer, LlamaTokenizerFast

    try:
        try:
            converted = AutoTokenizer.from_pretrained(str(folder), use_fast=True)
        except ValueError:
            if not (folder / "tokenizer.model").is_file():
                raise
            converted = LlamaTokenizerFast.from_pretrained(str(folder))
        text = converted.backend_tokenizer.to_str()
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"tokenizer: the files in {str(folder)!r} cannot be converted ({reason})") from None
    special = dict(converted.special_tokens_map)
    with contextlib.suppress(OSError):
        write_atomically(cached, json.dumps({"tokenizer": text, "special_tokens": special}).encode())
    return from_json(text, str(folder)), special
