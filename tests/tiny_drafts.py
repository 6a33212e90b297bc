"""Tiny random draft checkpoints on disk, in the layouts in which real ones are published, and targets for them.

Every function writes one folder and returns its path; the same arguments give the same numbers. Linear layers have a
standard deviation of ``SCALE / sqrt(inner)``, so that no block is negligible and the best token changes from place to
place; norms are around 1 (a few around more), none is 1. Drafts have another epsilon and (by default)
another rotary base than targets, so that a drafter which borrows the target's is found out.

Random drafts agree with a random target about once in V times. To have some accepted, make the target ``loud``: the
rows of a few tokens in its output matrix are ``LOUD`` times larger, so that it, and every drafter that shares the
matrix, mostly says one of these few; heads with output matrices of their own get the same tokens as their ``loud``.

Layouts: SafeAILab/EAGLE (EAGLE, EAGLE-3), sgl-project/SpecForge, vllm-project/speculators, FasterDecoding/Medusa and
vLLM's Medusa, XiaomiMiMo/MiMo, z-lab/dflash.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny import new_folder, tiny_model

SCALE = 1.5
LOUD = 8.0
EPS = 1e-5
HIDDEN, VOCAB, LAYERS = 64, 128, 7
"""Of the target; seven layers are the fewest in which EAGLE-3's default states 2, N // 2, N - 3 are three."""


def target(
    family: str = "llama",
    *,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    layers: int = LAYERS,
    loud: Sequence[int] = (),
    **more: Any,
) -> Path:
    """A model to draft for, see ``tiny_model`` for ``more``. ``loud``: token ids whose output rows are enlarged."""
    more.setdefault("rope_theta", 5000.0)
    path = tiny_model(family, hidden=hidden, vocab=vocab, layers=layers, **more)
    return _louder(path, new_folder(), loud) if loud else path


def eagle(
    folder: Path | None = None,
    *,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    bias: bool = True,
    own_embedding: bool = True,
    qkv_bias: bool = False,
    layers: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 96,
    rope_theta: float | None = None,
    dtype: str = "float32",
    seed: int = 1,
    **config: Any,
) -> Path:
    """EAGLE 1 or 2: pytorch_model.bin. ``rope_theta`` None: not in the config, as in heads of Llama 2."""
    r = _Random(seed, dtype)
    if own_embedding:
        r.table("embed_tokens", vocab, hidden)
    r.linear("fc", hidden, 2 * hidden, bias)
    for i in range(layers):
        at = f"layers.{i}."
        r.attention(at, hidden, hidden, heads, kv_heads, hidden // heads, qkv_bias=qkv_bias)
        r.mlp(at, hidden, intermediate)
        if i:
            r.norm(f"{at}input_layernorm", hidden)
        r.norm(f"{at}post_attention_layernorm", hidden)
    fields = _llama(hidden, intermediate, heads, kv_heads, layers, vocab, dtype, rope_theta)
    fields["architectures"] = ["LlamaForCausalLM"]
    if not bias:
        fields["bias"] = False
    if qkv_bias:
        fields["qkv_bias"] = True
    return _written(folder, "pytorch_model.bin", r.tensors, {**fields, **config})


def eagle3(
    folder: Path | None = None,
    layout: str = "original",
    *,
    target_hidden: int = HIDDEN,
    vocab: int = VOCAB,
    hidden: int | None = None,
    draft_vocab: int | None = 48,
    draft_ids: Sequence[int] | None = None,
    aux: int = 3,
    aux_ids: Sequence[int] | None = None,
    use_aux: bool = True,
    qwen3: bool = False,
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
    own_embedding: bool | None = None,
    own_head: bool = True,
    attention_bias: bool = False,
    layers: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 96,
    rope_theta: float | None = None,
    tokens: int = 3,
    loud: Sequence[int] = (),
    dtype: str = "float32",
    seed: int = 2,
    **config: Any,
) -> Path:
    """EAGLE-3.

    Args:
        layout: "original" (SafeAILab: pytorch_model.bin with ``midlayer``), "specforge" (the same names in
            model.safetensors; what SGLang reads) or "speculators" (``layers.0`` and a nested config).
        hidden: of the draft, if not ``target_hidden``. It then stores its own embedding.
        draft_vocab: rows of its output matrix; None: the whole vocabulary, no d2t and t2d (and in the original layout
            no ``draft_vocab_size``).
        draft_ids: the target ids of these rows (then ``draft_vocab`` is their number); None: random ones.
        aux_ids: ids of the target's states as the layout's configs write them; None: none written, the default.
            "specforge" writes outputs of blocks (state minus 1) into ``eagle_config``, the others states.
        own_embedding: None: where the layout's public files have one (speculators).
        own_head: False leaves out lm_head.weight (and needs ``draft_vocab=None``).
        tokens: ``speculative_tokens`` of the speculators config.
        loud: target ids whose rows in the own output matrix are enlarged.
    """
    width, wide = hidden or target_hidden, hidden not in (None, target_hidden)
    ids = _draft_ids(draft_ids, draft_vocab, vocab, seed)
    rows = vocab if ids is None else len(ids)
    if not own_head and (ids is not None or wide):
        raise ValueError("own_head=False: the target's output matrix fits a draft of its vocabulary and width only")
    first = "layers.0." if layout == "speculators" else "midlayer."
    dim = head_dim or width // heads
    r = _Random(seed, dtype)
    if own_embedding or wide or (own_embedding is None and layout == "speculators"):
        r.table("embed_tokens", vocab, width)
    if use_aux:
        r.linear("fc", width, aux * target_hidden)
    if norm_before_fc:
        r.norm("input_norm", aux * target_hidden)
    for i in range(aux if fc_norm else 0):
        r.norm(f"fc_norm.{i}", target_hidden)
    for i in range(layers):
        at = first if i == 0 else f"layers.{i}."
        both = {"qkv_bias": attention_bias, "output_bias": attention_bias}
        r.attention(at, width, width if i else 2 * width, heads, kv_heads, dim, qk_norm=qwen3, **both)
        r.mlp(at, width, intermediate)
        r.norm(f"{at}input_layernorm", width, 1.0 if i else 4.0)  # 1 would drown the token in the recycled state
        for name in ("post_attention_layernorm", *([] if i else ["hidden_norm"])):
            r.norm(at + name, width)
    r.norm("norm", width)
    if own_head:
        places = range(rows) if ids is None else [ids.index(i) for i in loud if i in ids]
        r.linear("lm_head", rows, width)
        r.amplify("lm_head", loud if ids is None else places)
    if ids is not None:
        r.vocabulary(ids, vocab)
    fields = _llama(width, intermediate, heads, kv_heads, layers, vocab, dtype, rope_theta)
    fields["attention_bias"] = attention_bias
    if qwen3:
        fields["model_type"] = "qwen3"
    if head_dim or qwen3:
        fields["head_dim"] = dim
    flags: dict[str, Any] = {} if ids is None and layout == "original" else {"draft_vocab_size": rows}
    given = {
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_output": norm_output,
    }
    flags.update({name: value for name, value in given.items() if value or layout == "speculators"})
    if wide:
        flags["target_hidden_size"] = target_hidden
    if aux != 3:
        flags["num_aux_hidden_states"] = aux
    inner: dict[str, Any] = {} if use_aux else {"use_aux_hidden_state": False}
    if aux_ids is not None:
        (inner if layout == "specforge" else flags)["eagle_aux_hidden_state_layer_ids"] = list(aux_ids)
    if inner:
        flags["eagle_config"] = inner
    if layout == "speculators":
        fields = _speculators("eagle3", fields, tokens)
    else:
        fields["architectures"] = ["LlamaForCausalLM" if layout == "original" else "LlamaForCausalLMEagle3"]
    name = "pytorch_model.bin" if layout == "original" else "model.safetensors"
    return _written(folder, name, r.tensors, {**fields, **flags, **config})


def medusa(
    folder: Path | None = None,
    layout: str = "original",
    *,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    heads: int = 5,
    layers: int = 1,
    bias: bool | None = None,
    said_heads: int | None = None,
    loud: Sequence[int] = (),
    dtype: str = "float32",
    seed: int = 3,
    **config: Any,
) -> Path:
    """Medusa heads. ``layout`` "original" (FasterDecoding: medusa_lm_head.pt) or "vllm" (model.safetensors).

    ``bias`` None: as published, yes in the original and no in vLLM's. ``said_heads``: what the config says; None: 2 in
    the original, whose public configs are wrong, else ``heads``.
    """
    original = layout == "original"
    bias = original if bias is None else bias
    r = _Random(seed, dtype)
    for h in range(heads):
        for i in range(layers):
            r.linear(f"{h}.{i}.linear" if original else f"blocks.{h}.layers.{i}", hidden, hidden, bias)
        out = f"{h}.{layers}" if original else f"lm_heads.{h}"
        r.linear(out, vocab, hidden)
        r.amplify(out, loud)
    fields: dict[str, Any]
    if original:
        said = 2 if said_heads is None else said_heads
        fields = {"base_model_name_or_path": "tiny", "medusa_num_heads": said, "medusa_num_layers": layers}
        return _written(folder, "medusa_lm_head.pt", r.tensors, {**fields, **config})
    fields = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "truncated_vocab_size": vocab,
        "num_heads": said_heads or heads,
        "num_hidden_layers": layers,
        "max_paths": 64,
        "topk": 10,
        "torch_dtype": dtype,
    }
    if bias:
        fields["medusa_fc_bias"] = True
    return _written(folder, "model.safetensors", r.tensors, {**fields, **config})


def mtp(
    folder: Path | None = None,
    *,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    layers: int = LAYERS,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 96,
    rope_theta: float = 5000.0,
    modules: int = 1,
    loud: Sequence[int] = (),
    dtype: str = "float32",
    seed: int = 4,
) -> Path:
    """A whole MiMo: a dense Qwen2 target and, in the same file, ``modules`` blocks of multi-token prediction."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "intermediate": intermediate, "rope_theta": rope_theta}
    base = target("qwen2", hidden=hidden, vocab=vocab, layers=layers, dtype=dtype, loud=loud, seed=seed, **sizes)
    r = _Random(seed, dtype)
    for i in range(modules):
        at = f"model.mtp_layers.{i}."
        for name in ("token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm"):
            r.norm(at + name, hidden)
        r.linear(f"{at}input_proj", hidden, 2 * hidden)
        r.attention(at, hidden, hidden, heads, kv_heads, hidden // heads, qkv_bias=True)
        r.mlp(at, hidden, intermediate)
        r.norm(f"{at}final_layernorm", hidden)
    fields = json.loads((base / "config.json").read_text())
    fields.update(
        architectures=["MiMoForCausalLM"],
        model_type="mimo",
        attention_bias=True,
        head_dim=hidden // heads,
        num_nextn_predict_layers=modules,
    )
    folder = _copied(base, folder)
    return _written(folder, "model.safetensors", {**_read(base), **r.tensors}, fields)


def dflash(
    folder: Path | None = None,
    *,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    target_layers: int = LAYERS,
    layers: int = 3,
    target_layer_ids: Sequence[int] | None = (1, 3, 5),
    block_size: int = 4,
    mask_token_id: int = 5,
    nested_block_size: bool = False,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 96,
    attention_bias: bool = False,
    layer_types: Sequence[str] | None = None,
    sliding_window: int | None = None,
    rope_theta: float = 100.0,
    dtype: str = "float32",
    seed: int = 5,
    **config: Any,
) -> Path:
    """DFlash as z-lab publishes it: model.safetensors without embedding and output matrix.

    ``target_layer_ids``: outputs of the target's blocks (0: the first); None: not in the config, as many as
    ``layers`` by the default rule.
    """
    count = layers if target_layer_ids is None else len(target_layer_ids)
    r = _Random(seed, dtype)
    r.linear("fc", hidden, count * hidden)
    r.norm("hidden_norm", hidden)
    r.norm("norm", hidden)
    for i in range(layers):
        at = f"layers.{i}."
        both = {"qkv_bias": attention_bias, "output_bias": attention_bias}
        r.attention(at, hidden, hidden, heads, kv_heads, head_dim, qk_norm=True, **both)
        r.mlp(at, hidden, intermediate)
        r.norm(f"{at}input_layernorm", hidden)
        r.norm(f"{at}post_attention_layernorm", hidden)
    inner: dict[str, Any] = {"mask_token_id": mask_token_id}
    if target_layer_ids is not None:
        inner["target_layer_ids"] = list(target_layer_ids)
    fields = _llama(hidden, intermediate, heads, kv_heads, layers, vocab, dtype, rope_theta)
    fields.update(
        architectures=["DFlashDraftModel"],
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        model_type="qwen3",
        attention_bias=attention_bias,
        dflash_config=inner,
        head_dim=head_dim,
        layer_types=list(layer_types or ["full_attention"] * layers),
        num_target_layers=target_layers,
        sliding_window=sliding_window,
        use_sliding_window=sliding_window is not None,
    )
    (inner if nested_block_size else fields)["block_size"] = block_size
    return _written(folder, "model.safetensors", r.tensors, {**fields, **config})


def draft_model(family: str = "llama", *, vocab: int = VOCAB, layers: int = 2, seed: int = 6, **more: Any) -> Path:
    """Any small causal language model of the target's vocabulary; ``more``: see ``target``."""
    more.setdefault("rope_theta", 20000.0)
    return target(family, vocab=vocab, layers=layers, seed=seed, **more)


class _Random:
    """Random tensors under their names."""

    def __init__(self, seed: int, dtype: str) -> None:
        import torch

        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = getattr(torch, dtype)
        self.tensors: dict[str, Any] = {}

    def table(self, name: str, rows: int, width: int) -> None:
        self._add(f"{name}.weight", (rows, width), 1.0)

    def linear(self, name: str, out: int, inner: int, bias: bool = False) -> None:
        self._add(f"{name}.weight", (out, inner), SCALE / math.sqrt(inner))
        if bias:
            self._add(f"{name}.bias", (out,), 0.5)

    def norm(self, name: str, size: int, middle: float = 1.0) -> None:
        self._add(f"{name}.weight", (size,), 0.3, middle)

    def attention(
        self,
        at: str,
        hidden: int,
        inner: int,
        heads: int,
        kv_heads: int,
        dim: int,
        *,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        output_bias: bool = False,
    ) -> None:
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            self.linear(f"{at}self_attn.{name}_proj", count * dim, inner, qkv_bias)
        self.linear(f"{at}self_attn.o_proj", hidden, heads * dim, output_bias)
        for name in "qk" if qk_norm else "":
            self.norm(f"{at}self_attn.{name}_norm", dim, 2.0)  # 1 would attend to everything alike

    def mlp(self, at: str, hidden: int, intermediate: int) -> None:
        self.linear(f"{at}mlp.gate_proj", intermediate, hidden)
        self.linear(f"{at}mlp.up_proj", intermediate, hidden)
        self.linear(f"{at}mlp.down_proj", hidden, intermediate)

    def vocabulary(self, ids: Sequence[int], vocab: int) -> None:
        """d2t int64 [Vd]: target id minus draft id; t2d bool [V]: whether the target id has a draft id."""
        import torch

        there = torch.zeros(vocab, dtype=torch.bool)
        there[list(ids)] = True
        self.tensors["d2t"] = torch.tensor(ids, dtype=torch.int64) - torch.arange(len(ids))
        self.tensors["t2d"] = there

    def amplify(self, name: str, rows: Iterable[int]) -> None:
        self.tensors[f"{name}.weight"][list(rows)] *= LOUD

    def _add(self, name: str, shape: tuple[int, ...], scale: float, middle: float = 0.0) -> None:
        import torch

        self.tensors[name] = (torch.randn(shape, generator=self.generator) * scale + middle).to(self.dtype)


def _draft_ids(ids: Sequence[int] | None, count: int | None, vocab: int, seed: int) -> list[int] | None:
    import torch

    if ids is not None:
        return sorted(set(ids))
    if count is None:
        return None
    return sorted(torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:count].tolist())


def _llama(
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    layers: int,
    vocab: int,
    dtype: str,
    rope_theta: float | None,
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 2048,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "rms_norm_eps": EPS,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": vocab,
    }
    return fields if rope_theta is None else {**fields, "rope_theta": rope_theta}


def _speculators(method: str, layer: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "has_no_defaults_at_init": False,
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny"},
        },
        "speculators_model_type": method,
        "speculators_version": "0.3.0",
        "target_hidden_size": None,
        "torch_dtype": layer["torch_dtype"],
        "transformer_layer_config": dict(layer),
    }


def _written(folder: Path | None, file: str, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Path:
    folder = folder or new_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if file.endswith(".safetensors"):
        from safetensors.torch import save_file

        save_file(dict(tensors), folder / file, metadata={"format": "pt"})
    else:
        import torch

        torch.save(dict(tensors), folder / file)
    return folder


def _louder(path: Path, folder: Path, loud: Sequence[int]) -> Path:
    tensors = _read(path)
    if "lm_head.weight" not in tensors:
        raise ValueError("loud: the output matrix is the embedding; make the target with tie=False")
    tensors["lm_head.weight"][list(loud)] *= LOUD
    return _written(_copied(path, folder), "model.safetensors", tensors, json.loads((path / "config.json").read_text()))


def _copied(path: Path, folder: Path | None) -> Path:
    return Path(shutil.copytree(path, folder or new_folder(), dirs_exist_ok=True))


def _read(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")
