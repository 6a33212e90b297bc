"""Tokenizers out of GGUF metadata: byte-level BPE ("gpt2") and sentencepiece BPE ("llama")."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from ms_spec.models.checkpoint.gguf_header import read_header
from ms_spec.models.checkpoint.identity import file_identity
from ms_spec.models.tokenizer import Tokenizer, from_json
from ms_spec.models.tokenizer_files import surround
from ms_spec.models.user_cache import cache_root, write_atomically

_FORMAT = 1
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut into words before merges, by the name that llama.cpp's converter gives to it.
_PRE = {
    **dict.fromkeys(("gpt-2", "gpt2", "default", "phi-2", "olmo", "mpt"), "gpt2"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "qwen35", "stablelm2", "megrez"), "qwen2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), "digits"),
    "tekken": "tekken",
}


def from_gguf(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file. ValueError (one line) for kinds that are not known here."""
    metadata, _ = read_header(path)
    if "tokenizer.ggml.model" not in metadata:
        raise ValueError(f"tokenizer: {path} carries none; give the directory of one as tokenizer")
    backend, special = _cached(path, metadata)
    templates = {"default": metadata["tokenizer.chat_template"]} if "tokenizer.chat_template" in metadata else {}
    prefix = "tokenizer.chat_template."
    templates.update({k[len(prefix) :]: v for k, v in metadata.items() if k.startswith(prefix) and isinstance(v, str)})
    return Tokenizer(backend, special, templates, str(path))


def _cached(path: Path, metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    if metadata["tokenizer.ggml.model"] != "llama":
        return build(metadata, str(path))  # as fast as reading a copy
    key = hashlib.sha256(json.dumps([_FORMAT, file_identity([path])]).encode()).hexdigest()[:32]
    cached = cache_root() / "tokenizers" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(cached.read_text(encoding="utf-8"))
        return from_json(content["tokenizer"], str(cached)), content["special_tokens"]
    backend, special = build(metadata, str(path))
    with contextlib.suppress(OSError):
        text = json.dumps({"tokenizer": backend.to_str(), "special_tokens": special})
        write_atomically(cached, text.encode())
    return backend, special


def build(metadata: Mapping[str, Any], where: str) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """(backend, special tokens) from ``tokenizer.ggml.*``."""
    kind = metadata["tokenizer.ggml.model"]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError(f"tokenizer: {where}: tokenizer.ggml.tokens is missing or empty")
    if kind == "gpt2":
        backend, bos_by_default = _byte_level(metadata, tokens, where)
    elif kind == "llama":
        backend, bos_by_default = _sentencepiece(metadata, tokens), True
    else:
        raise ValueError(f"tokenizer: {where}: tokenizer.ggml.model: {kind!r} is not supported; supported: gpt2, llama")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    added = [
        tokenizers.AddedToken(text, normalized=False, special=t == _CONTROL)
        for text, t in zip(tokens, types)
        if t in (_CONTROL, _USER_DEFINED)
    ]
    if added:
        backend.add_tokens(added)
    special = {}
    for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        i = metadata.get(f"tokenizer.ggml.{field}_token_id")
        if i is not None and 0 <= i < len(tokens):
            special[f"{name}_token"] = tokens[i]
    bos = special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", bos_by_default) else None
    eos = special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if bos or eos:
        surround(backend, bos, eos)
    return backend, special


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], where: str) -> tuple[tokenizers.Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE:
        raise ValueError(
            f"tokenizer: {where}: tokenizer.ggml.pre: {pre!r} is not supported; supported: {', '.join(_PRE)}; or give "
            "the directory of the model's Hugging Face tokenizer"
        )
    cut = _PRE[pre]
    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges", ())]
    whole = cut in ("llama3", "tekken")  # a word that is a token is never built from merges
    vocab = {text: i for i, text in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, fuse_unk=False, byte_fallback=False, ignore_merges=whole))
    if cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    plain = pre_tokenizers.ByteLevel(add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)))
    if cut == "gpt2":
        backend.pre_tokenizer = plain
    elif cut == "digits":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    else:
        pattern = {"llama3": _WORDS % "{1,3}", "qwen2": _WORDS % "", "tekken": _TEKKEN}[cut]
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    backend.decoder = decoders.ByteLevel()
    return backend, whole


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """Llama's sentencepiece BPE: any two pieces whose join is a piece merge, the highest score first."""
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocab = {text: i for i, text in enumerate(tokens)}
    merges = []
    for text, score in zip(tokens, scores):
        pairs = [(text[:i], text[i:]) for i in range(1, len(text)) if text[:i] in vocab and text[i:] in vocab]
        merges += [(-score, *sorted_pair) for sorted_pair in sorted(pairs, key=lambda p: (vocab[p[0]], vocab[p[1]]))]
    merges.sort(key=lambda m: m[0])
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is None and _UNKNOWN in types:
        unknown = types.index(_UNKNOWN)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab,
            [(a, b) for _, a, b in merges],
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tail = [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    return backend
