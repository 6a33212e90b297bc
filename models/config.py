"""What a language model looks like, read from a Hugging Face ``config.json`` or from GGUF metadata.

Importing this file is cheap (no MindSpore), so that a command line can refuse a model before it loads anything.
Every error is a ValueError of one line: the field, its value, and what would be right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MiMoForCausalLM")
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MODEL_TYPES = {"mistral": "MistralForCausalLM", "mimo": "MiMoForCausalLM", **GGUF_ARCHITECTURES}
_DTYPES = {"float32": "float32", "float": "float32", "float64": "float32", "float16": "float16", "half": "float16"}
_DTYPES["bfloat16"] = "bfloat16"


class FieldError(ValueError):
    """A field of a config that is missing or wrong. ``field``: its name, with dots where it is inside another."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base, and how long contexts are squeezed into the trained ones.

    ``kind`` is one of ROPE_KINDS, or "factors": frequency i is divided by ``frequency_factors[i]`` (how GGUF files
    carry the llama3 rule). ``original_max_position`` is the context length the model was trained at.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerShape:
    """Shape of decoder layers with RMS norm, rotary positions and a gated SiLU MLP."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def kv_numbers(self) -> int:
        """Numbers that one position takes in the caches: keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class ModelConfig(LayerShape):
    """Shape of a decoder-only transformer."""

    architecture: str
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """From the content of config.json and, where there is one, of generation_config.json (its ids win)."""
        architecture = _architecture(config)
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "unknown")
            raise ValueError(
                f"quantization_config: {method!r} is not supported; use an unquantised model or a GGUF file"
            )
        # MiMo is a Qwen2 with blocks of multi-token prediction beside it.
        qwen2 = architecture in ("Qwen2ForCausalLM", "MiMoForCausalLM")
        qwen3 = architecture == "Qwen3ForCausalLM"
        hidden = integer(config, "hidden_size")
        heads = integer(config, "num_attention_heads")
        layers = integer(config, "num_hidden_layers")
        vocab = integer(config, "vocab_size")
        max_position = integer(config, "max_position_embeddings", 32768 if qwen2 or qwen3 else 2048)
        check_activation(config)
        _refuse_sliding_window(config, architecture, layers, max_position)
        default_head_dim = 128 if qwen3 and "head_dim" not in config else None
        attention_bias = boolean(config, "attention_bias", False) and not (qwen2 or architecture.startswith("Mistral"))
        generation = generation or {}
        eos = generation.get("eos_token_id")
        bos = generation.get("bos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=integer(config, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=integer(config, "num_key_value_heads", heads),
            head_dim=_head_dim(config.get("head_dim") or default_head_dim, hidden, heads),
            rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
            rope=rope_from_hf(config, max_position),
            qkv_bias=qwen2 or attention_bias,
            output_bias=attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and boolean(config, "mlp_bias", False),
            qk_norm=qwen3,
            tie_word_embeddings=boolean(config, "tie_word_embeddings", False),
            max_position_embeddings=max_position,
            dtype=_dtype(config.get("dtype") or config.get("torch_dtype") or "float32"),
            bos_token_id=_bos_id(bos if bos is not None else config.get("bos_token_id")),
            eos_token_ids=_eos_ids(eos if eos is not None else config.get("eos_token_id"), vocab),
        )._checked()

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, Sequence[int]] | None = None,
        *,
        dtype: str = "bfloat16",
        rope_factors: Sequence[float] = (),
    ) -> ModelConfig:
        """From GGUF metadata.

        ``shapes`` maps Hugging Face tensor names to shapes: what metadata does not say (biases, tied output, padded
        vocabulary) is read off the tensors. ``rope_factors``: the content of the tensor ``rope_freqs.weight``.
        """
        arch = metadata.get("general.architecture")
        if arch not in GGUF_ARCHITECTURES:
            raise ValueError(
                f"general.architecture: {arch!r} is not supported; supported in GGUF: {', '.join(GGUF_ARCHITECTURES)}"
            )
        shapes = shapes or {}

        def key(name: str) -> str:
            return f"{arch}.{name}"

        hidden = integer(metadata, key("embedding_length"))
        heads = integer(metadata, key("attention.head_count"))
        max_position = integer(metadata, key("context_length"))
        head_dim = _head_dim(metadata.get(key("attention.key_length")), hidden, heads)
        value_dim = metadata.get(key("attention.value_length"), head_dim)
        if value_dim != head_dim:
            raise ValueError(f"{key('attention.value_length')}: {value_dim}, but must equal the key length {head_dim}")
        rotated = metadata.get(key("rope.dimension_count"), head_dim)
        if rotated != head_dim:
            raise ValueError(
                f"{key('rope.dimension_count')}: {rotated} of {head_dim}: partial rotation is not supported"
            )
        if "model.embed_tokens.weight" in shapes:
            vocab = int(shapes["model.embed_tokens.weight"][0])
        elif key("vocab_size") in metadata:
            vocab = integer(metadata, key("vocab_size"))
        else:
            vocab = len(metadata.get("tokenizer.ggml.tokens", ()))
        first = "model.layers.0."
        eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return cls(
            architecture=GGUF_ARCHITECTURES[arch],
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=integer(metadata, key("feed_forward_length")),
            num_layers=integer(metadata, key("block_count")),
            num_heads=heads,
            num_kv_heads=integer(metadata, key("attention.head_count_kv"), heads),
            head_dim=head_dim,
            rms_norm_eps=number(metadata, key("attention.layer_norm_rms_epsilon"), 1e-5),
            rope=_rope_from_gguf(metadata, arch, max_position, rope_factors),
            qkv_bias=arch == "qwen2" or first + "self_attn.q_proj.bias" in shapes,
            output_bias=first + "self_attn.o_proj.bias" in shapes,
            mlp_bias=first + "mlp.down_proj.bias" in shapes,
            qk_norm=arch == "qwen3",
            tie_word_embeddings="lm_head.weight" not in shapes,
            max_position_embeddings=max_position,
            dtype=_dtype(dtype),
            bos_token_id=_bos_id(metadata.get("tokenizer.ggml.bos_token_id")),
            eos_token_ids=_eos_ids([i for i in dict.fromkeys(eos) if i is not None], vocab),
        )._checked()

    def _checked(self) -> ModelConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads: {self.num_kv_heads} does not divide num_attention_heads ({self.num_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is odd; rotary embeddings need an even one")
        factors = self.rope.frequency_factors
        if factors and len(factors) != self.head_dim // 2:
            raise ValueError(f"rope_freqs.weight: has {len(factors)} values, but head_dim / 2 is {self.head_dim // 2}")
        return self


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or []
    if isinstance(named, str):
        named = [named]
    for name in named:
        if name in HF_ARCHITECTURES:
            return str(name)
    if not named and config.get("model_type") in _MODEL_TYPES:
        return _MODEL_TYPES[config["model_type"]]
    seen = ", ".join(map(str, named)) or f"none (model_type {config.get('model_type')!r})"
    raise ValueError(f"architectures: {seen} is not supported; supported: {', '.join(HF_ARCHITECTURES)}")


_REQUIRED = object()


def check_activation(config: Mapping[str, Any]) -> None:
    """ValueError unless the feed-forward network is gated by SiLU."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act: {activation!r} is not supported; supported: 'silu'")


def integer(source: Mapping[str, Any], field: str, default: Any = _REQUIRED) -> int:
    """A field's integer >= 1; without ``default`` it has to be there. ValueError names the field."""
    value = source.get(field)
    if value is None:
        if default is _REQUIRED:
            raise FieldError(field, "missing from the model's config; expected an integer >= 1")
        value = default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise FieldError(field, f"{value!r:.60}; expected an integer >= 1")
    return value


def number(source: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """A field's number > 0; without ``default`` it has to be there. ValueError names the field."""
    value = source.get(field)
    if value is None:
        if default is None:
            raise FieldError(field, "missing from the model's config; expected a number > 0")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise FieldError(field, f"{value!r:.60}; expected a number > 0")
    return float(value)


def boolean(source: Mapping[str, Any], field: str, default: bool) -> bool:
    """A field's truth value. ValueError names the field."""
    value = source.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise FieldError(field, f"{value!r:.60}; expected true or false")
    return value


def _head_dim(value: Any, hidden: int, heads: int) -> int:
    if value is not None:
        return integer({"head_dim": value}, "head_dim")
    if hidden % heads:
        raise ValueError(f"num_attention_heads: {heads} does not divide hidden_size {hidden}; set head_dim")
    return hidden // heads


def _dtype(value: Any) -> str:
    name = str(value).replace("torch.", "")
    if name not in _DTYPES:
        raise ValueError(
            f"dtype: {value!r} in the model's config is not supported; supported: float32, float16, bfloat16"
        )
    return _DTYPES[name]


def _bos_id(value: Any) -> int | None:
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _eos_ids(value: Any, vocab: int) -> tuple[int, ...]:
    """One id, a list of them or nothing -> a tuple without repetitions."""
    ids = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab:
            raise ValueError(f"eos_token_id: {i!r} is not a token id of this model; allowed: 0 to {vocab - 1}")
    return tuple(dict.fromkeys(ids))


def _refuse_sliding_window(config: Mapping[str, Any], architecture: str, layers: int, max_position: int) -> None:
    """Windows are not implemented. They are harmless where no layer has one or no context can outgrow it."""
    window = config.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None or window >= max_position:
        return
    if architecture != "MistralForCausalLM":
        if not config.get("use_sliding_window", False):
            return
        types = config.get("layer_types")
        windowed = "sliding_attention" in types if types else config.get("max_window_layers", 28) < layers
        if not windowed:
            return
    raise ValueError(
        f"sliding_window: {window} is below max_position_embeddings ({max_position}) and sliding windows are not "
        f"supported; set max_position_embeddings to {window} in config.json to use the model up to that length"
    )


def rope_from_hf(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """``rope_theta`` and ``rope_scaling`` (transformers 4), or ``rope_parameters`` that hold both (transformers 5).

    ``max_position``: the context length that kinds without one of their own scale from.
    """
    field = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    scaling = config.get(field) or {}
    if not isinstance(scaling, Mapping):
        raise FieldError(field, f"{scaling!r:.60}; expected an object with rope_type")
    if any(isinstance(v, Mapping) for v in scaling.values()):
        raise FieldError(field, f"different ones per layer type ({', '.join(scaling)}) are not supported")
    inner = f"{field}.rope_theta"
    theta = number({inner: scaling.get("rope_theta")}, inner, number(config, "rope_theta", 10000.0))
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor: {partial} is not supported; only 1.0 is")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise FieldError(f"{field}.rope_type", f"{kind!r:.60} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if kind == "default":
        return RopeConfig(theta=theta, original_max_position=max_position)

    def named(names: Sequence[str]) -> dict[str, Any]:
        return {n: scaling[n] for n in names if scaling.get(n) is not None}

    try:
        factor = number(scaling, "factor")
        original = max_position
        if kind in ("yarn", "llama3"):
            original = integer(scaling, "original_max_position_embeddings", None if kind == "llama3" else max_position)
        extra: dict[str, Any] = {}
        if kind == "llama3":
            extra = {n: number(scaling, n) for n in ("low_freq_factor", "high_freq_factor")}
            if extra["low_freq_factor"] >= extra["high_freq_factor"]:
                raise FieldError("low_freq_factor", f"{extra['low_freq_factor']} must be below high_freq_factor")
        elif kind == "yarn":
            numbers = named(("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"))
            # transformers reads 0 in these fields as "not given".
            numbers = {n: v for n, v in numbers.items() if v != 0 or n == "attention_factor"}
            extra = {n: number(numbers, n) for n in numbers}
            extra["truncate"] = boolean(scaling, "truncate", True)
    except FieldError as error:
        raise FieldError(f"{field}.{error.field}", error.problem) from None
    return RopeConfig(theta=theta, kind=kind, factor=factor, original_max_position=original, **extra)


def _rope_from_gguf(meta: Mapping[str, Any], arch: str, max_position: int, factors: Sequence[float]) -> RopeConfig:
    theta = number(meta, f"{arch}.rope.freq_base", 10000.0)
    if len(factors):
        if any(f <= 0 for f in factors):
            raise ValueError("rope_freqs.weight: holds a value <= 0; expected positive factors")
        frequency_factors = tuple(float(f) for f in factors)
        return RopeConfig(
            theta=theta, kind="factors", original_max_position=max_position, frequency_factors=frequency_factors
        )
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    factor = meta.get(f"{arch}.rope.scaling.factor")
    if factor is None and meta.get(f"{arch}.rope.scale_linear"):
        kind, factor = "linear", meta[f"{arch}.rope.scale_linear"]
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):
        return RopeConfig(theta=theta, original_max_position=max_position)
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{arch}.rope.scaling.type: {kind!r} is not supported; supported in GGUF: none, linear, yarn")
    factor = number({"f": factor}, "f", 1.0)
    original = integer(meta, f"{arch}.rope.scaling.original_context_length", max_position)
    attention = meta.get(f"{arch}.rope.scaling.attn_factor")
    if kind == "yarn" and attention is not None:
        # llama.cpp multiplies its own factor; transformers' attention_factor replaces it.
        attention = float(attention) * (1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        attention_factor=attention if kind == "yarn" else None,
        beta_fast=number(meta, f"{arch}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=number(meta, f"{arch}.rope.scaling.yarn_beta_slow", 1.0),
    )
