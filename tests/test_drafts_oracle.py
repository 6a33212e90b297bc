"""The NumPy drafters and the checkpoints they read, against torch and the modules of transformers.

The torch side works as real drafters do, with a cache: one pass over the text, then one row for each draft. So it also
checks that the references, which start again for every draft, say the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_drafts
import torch
from drafts_oracle import Dflash, Drafted, DraftModel, Eagle, Eagle3, Medusa, Mtp, Reference, Target, read_tensors
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, apply_rotary_pos_emb

H, V, N = tiny_drafts.HIDDEN, tiny_drafts.VOCAB, tiny_drafts.LAYERS
IDS = np.random.default_rng(3).integers(5, V, 13).tolist()
K = 3
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
LOUD = (17, 40, 90)
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, DynamicCache], tuple]
"""(tokens [1, T], features [1, T, H], positions [1, T], cache) -> (what is fed back [1, T, H], logits [1, T, V])."""


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_drafts.target())


@pytest.mark.parametrize("family, options", [("llama", {}), ("qwen2", {}), ("qwen3", {"tie": True, "head_dim": 32})])
def test_target_states_and_logits(family: str, options: dict[str, Any]) -> None:
    path = tiny_drafts.target(family, **options)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        hf = model(torch.tensor([IDS]), output_hidden_states=True)
    ours = Target(path).run(IDS)
    np.testing.assert_allclose(ours.logits, hf.logits[0], **CLOSE)
    assert ours.states.shape == (N + 1, len(IDS), H)
    for boundary in range(N):
        np.testing.assert_allclose(ours.states[boundary], hf.hidden_states[boundary][0], **CLOSE)
    np.testing.assert_allclose(ours.normed, hf.hidden_states[N][0], **CLOSE)  # transformers norms the last one


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False, "own_embedding": False, "rope_theta": 300.0, "dtype": "float16"}, {"qkv_bias": True}],
)
def test_eagle_is_a_llama_block_without_input_norm(options: dict[str, Any], target: Target) -> None:
    path = tiny_drafts.eagle(**options)
    w, config = tensors(path), layer_config(path)
    layer, rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)
    layer.input_layernorm = nn.Identity()
    layer.self_attn.o_proj = nn.Linear(H, H, bias=False)
    layer.load_state_dict(below(w, "layers.0."))
    embedding = w.get("embed_tokens.weight", torch.tensor(target.embedding).float())

    def step(tokens: torch.Tensor, features: torch.Tensor, at: torch.Tensor, cache: DynamicCache) -> tuple:
        x = F.linear(torch.cat([embedding[tokens], features], -1), w["fc.weight"], w.get("fc.bias"))
        x = layer(x, position_embeddings=rotary(x, at), past_key_values=cache, cache_position=at[0])
        return x, x @ torch.tensor(target.head).float().T

    assert ("fc.bias" in w) == options.get("bias", True)
    assert ("embed_tokens.weight" in w) == options.get("own_embedding", True)
    check_chain(Eagle(path, target), step)


def test_deeper_eagle_blocks_have_an_input_norm(target: Target) -> None:
    path = tiny_drafts.eagle(layers=2)
    assert Eagle(path, target).after(IDS, K).tokens != Eagle(tiny_drafts.eagle(), target).after(IDS, K).tokens
    assert [name for name in tensors(path) if "input_layernorm" in name] == ["layers.1.input_layernorm.weight"]


EAGLE3 = {
    "original": {},
    "whole vocabulary": {"draft_vocab": None, "own_embedding": True, "rope_theta": 500.0},
    "target's head": {"draft_vocab": None, "own_head": False},
    "narrower": {"hidden": 32, "norm_before_residual": True},
    "specforge": {"layout": "specforge", "head_dim": 32, "fc_norm": True, "norm_output": True},
    "chosen states": {"layout": "specforge", "aux_ids": [0, 2, 6], "draft_vocab": None},
    "no states": {"layout": "specforge", "use_aux": False},
    "speculators": {"layout": "speculators", "norm_before_residual": True, "norm_before_fc": True, "layers": 2},
    "qwen3": {"layout": "speculators", "qwen3": True, "attention_bias": True, "aux_ids": [1, 7], "aux": 2},
}
TAPS = {"chosen states": [1, 3, 7], "qwen3": [1, 7]}


@pytest.mark.parametrize("variant", EAGLE3)
def test_eagle3_is_a_block_of_twice_the_width(variant: str, target: Target) -> None:
    options = EAGLE3[variant]
    path = tiny_drafts.eagle3(**options)
    w = {name.replace("midlayer.", "layers.0."): value for name, value in tensors(path).items()}
    config = layer_config(path)
    block = Qwen3DecoderLayer if options.get("qwen3") else LlamaDecoderLayer
    layers = [block(config, i) for i in range(options.get("layers", 1))]
    attention = layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        bias = getattr(attention, name).bias is not None
        setattr(attention, name, nn.Linear(2 * config.hidden_size, getattr(attention, name).out_features, bias=bias))
    rotary, norms = LlamaRotaryEmbedding(config), {}
    for name in [name for name in w if w[name].ndim == 1 and "norm" in name]:
        norms[name] = LlamaRMSNorm(len(w[name]), config.rms_norm_eps)
        norms[name].weight.data = w[name]
    hidden_norm = norms["layers.0.hidden_norm.weight"]
    for i, layer in enumerate(layers):
        layer.load_state_dict(
            {name: value for name, value in below(w, f"layers.{i}.").items() if name != "hidden_norm.weight"}
        )
    embedding = w.get("embed_tokens.weight", torch.tensor(target.embedding).float())
    head = w.get("lm_head.weight", torch.tensor(target.head).float())

    def first(states: np.ndarray, normed: np.ndarray) -> torch.Tensor:
        if not options.get("use_aux", True):
            return torch.tensor(normed).float()[None]
        chunks = [torch.tensor(states[i]).float()[None] for i in TAPS.get(variant, [2, 3, 4])]
        if options.get("fc_norm"):
            chunks = [norms[f"fc_norm.{i}.weight"](chunk) for i, chunk in enumerate(chunks)]
        x = torch.cat(chunks, -1)
        return F.linear(norms["input_norm.weight"](x) if options.get("norm_before_fc") else x, w["fc.weight"])

    def step(tokens: torch.Tensor, c: torch.Tensor, at: torch.Tensor, cache: DynamicCache) -> tuple:
        layer = layers[0]
        z = torch.cat([layer.input_layernorm(embedding[tokens]), hidden_norm(c)], -1)
        turn = rotary(z, at)
        x = hidden_norm(c) if options.get("norm_before_residual") else c
        x = x + attention(z, turn, None, past_key_values=cache, cache_position=at[0])[0]
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        for layer in layers[1:]:
            x = layer(x, position_embeddings=turn, past_key_values=cache, cache_position=at[0])
        out = norms["norm.weight"](x)
        logits = torch.full((*x.shape[:2], V), -torch.inf)
        ids = torch.arange(len(head)) + w.get("d2t", torch.tensor(0))
        logits[..., ids.long()] = out @ head.T
        return out if options.get("norm_output") else x, logits

    check_chain(Eagle3(path, target), step, first)


@pytest.mark.parametrize("layout, bias, layers", [("original", True, 1), ("vllm", False, 2), ("vllm", True, 1)])
def test_medusa_is_a_sequence_of_modules(layout: str, bias: bool, layers: int, target: Target) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(H, H, bias=bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.silu(self.linear(x))

    path = tiny_drafts.medusa(layout=layout, bias=bias, layers=layers)
    w = tensors(path)
    if layout == "vllm":
        rename = {f"lm_heads.{h}.weight": f"{h}.{layers}.weight" for h in range(5)}
        kinds = ["weight", "bias"] if bias else ["weight"]
        for h, i, kind in [(h, i, kind) for h in range(5) for i in range(layers) for kind in kinds]:
            rename[f"blocks.{h}.layers.{i}.{kind}"] = f"{h}.{i}.linear.{kind}"
        w = {rename[name]: value for name, value in w.items()}
    heads = nn.ModuleList(
        nn.Sequential(*(Block() for _ in range(layers)), nn.Linear(H, V, bias=False)) for _ in range(5)
    )
    heads.load_state_dict(w)
    features = target.run(IDS[:-1])
    with torch.no_grad():
        wanted = torch.stack([head(torch.tensor(features.normed[-1]).float()) for head in heads])
    check(Medusa(path, target).after(IDS, 5), wanted)


def test_mtp_is_a_qwen2_block_on_hidden_state_and_embedding() -> None:
    path = tiny_drafts.mtp()
    target, at_name = Target(path), "model.mtp_layers.0."
    w = below(tensors(path), at_name)
    config = Qwen2Config.from_dict(json.loads((path / "config.json").read_text()), attn_implementation="sdpa")
    layer, rotary = Qwen2DecoderLayer(config, 0), LlamaRotaryEmbedding(config)
    outer = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
    layer.load_state_dict({name: value for name, value in w.items() if name.split(".")[0] not in outer})

    def rms(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (H,), w[f"{name}.weight"], config.rms_norm_eps)

    def step(tokens: torch.Tensor, features: torch.Tensor, at: torch.Tensor, cache: DynamicCache) -> tuple:
        embedded = torch.tensor(target.embedding).float()[tokens] * (at > 0)[..., None]
        x = torch.cat([rms("hidden_layernorm", features), rms("token_layernorm", embedded)], -1)
        x = F.linear(x, w["input_proj.weight"])
        x = layer(x, position_embeddings=rotary(x, at), past_key_values=cache, cache_position=at[0])
        x = rms("final_layernorm", x)
        return x, x @ torch.tensor(target.head).float().T

    check_chain(Mtp(path, target), step)
    assert len(w) == 16


SLIDING = {
    "target_layer_ids": [2, 6],
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 4,
}


@pytest.mark.parametrize(
    "options, taps",
    [
        ({}, [2, 4, 6]),
        # outputs of blocks 1, 2 (2.5 rounds to even) and 4
        ({"target_layer_ids": None, "nested_block_size": True, "attention_bias": True}, [2, 3, 5]),
        (SLIDING, [3, 7]),
    ],
)
def test_dflash_looks_at_all_states_and_its_whole_block(options: dict, taps: list[int], target: Target) -> None:
    path = tiny_drafts.dflash(block_size=6, mask_token_id=9, **options)
    w, config = tensors(path), layer_config(path)
    n, rows = len(IDS) - 1, 6
    features = target.run(IDS[:-1])
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(n + rows)[None])
    distance = torch.arange(n, n + rows)[:, None] - torch.arange(n + rows)

    def rms(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], config.rms_norm_eps)

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(1, len(x), -1, config.head_dim)

    context = rms(
        "hidden_norm", project("fc", torch.tensor(np.concatenate([features.states[i] for i in taps], -1)).float())
    )
    x = torch.tensor(target.embedding)[[IDS[-1]] + [9] * (rows - 1)].float()
    for i in range(3):
        at = f"layers.{i}.self_attn."
        y = rms(f"layers.{i}.input_layernorm", x)
        q = rms(f"{at}q_norm", heads(project(f"{at}q_proj", y))).transpose(1, 2)
        both = torch.cat([context, y])
        k = rms(f"{at}k_norm", heads(project(f"{at}k_proj", both))).transpose(1, 2)
        v = heads(project(f"{at}v_proj", both)).transpose(1, 2)
        q = apply_rotary_pos_emb(q, q, cos[:, n:], sin[:, n:])[0]
        k = apply_rotary_pos_emb(k, k, cos, sin)[0]
        sliding = options.get("layer_types", [""] * 3)[i] == "sliding_attention"
        mask = (distance >= 0) & (distance < 4) if sliding else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + project(f"{at}o_proj", out.transpose(1, 2).reshape(rows, -1))
        y, at = rms(f"layers.{i}.post_attention_layernorm", x), f"layers.{i}.mlp."
        x = x + project(f"{at}down_proj", F.silu(project(f"{at}gate_proj", y)) * project(f"{at}up_proj", y))
    wanted = rms("norm", x) @ torch.tensor(target.head).float().T
    reference = Dflash(path, target)
    assert (reference.block_size, reference.mask) == (6, 9)
    check(reference.after(IDS, rows - 1), wanted[1:])
    assert "embed_tokens.weight" not in w and "lm_head.weight" not in w


def test_draft_model_goes_on_as_transformers_does(target: Target) -> None:
    path = tiny_drafts.draft_model()
    model = AutoModelForCausalLM.from_pretrained(path)
    model.generation_config.eos_token_id = None
    out = model.generate(torch.tensor([IDS]), max_new_tokens=K, do_sample=False)
    reference = DraftModel(path, target)
    assert reference.after(IDS, K).tokens == out[0, len(IDS) :].tolist() == reference.model.greedy(IDS, K)


MAKE: dict[str, Callable[[Target], Reference]] = {
    "eagle": lambda target: Eagle(tiny_drafts.eagle(), target),
    "eagle3": lambda target: Eagle3(tiny_drafts.eagle3(draft_ids=(*LOUD, *range(20, 60)), loud=LOUD), target),
    "medusa": lambda target: Medusa(tiny_drafts.medusa(loud=LOUD), target),
    "dflash": lambda target: Dflash(tiny_drafts.dflash(), target),
    "draft_model": lambda target: DraftModel(tiny_drafts.draft_model(loud=LOUD), target),
    "mtp": lambda target: Mtp(path := tiny_drafts.mtp(loud=LOUD), Target(path)),
}


@pytest.mark.parametrize("method", MAKE)
def test_drafts_vary_and_a_loud_target_takes_some(method: str) -> None:
    reference = MAKE[method](Target(tiny_drafts.target(loud=LOUD)))
    rng, said, taken, total = np.random.default_rng(5), set(), 0, 0
    for _ in range(30):
        ids = rng.integers(5, V, rng.integers(2, 12)).tolist()
        tokens = reference.after(ids, K).tokens
        said.add(tuple(tokens))
        taken += tokens[0] == reference.target.greedy(ids, 1)[0]
        total += len(set(tokens)) == K
    assert len(said) > 15 and 0 < taken < 30 and total > 0


def test_features_of_the_newest_token_are_not_looked_at(target: Target) -> None:
    features = target.run(IDS)
    for make in (MAKE[method] for method in MAKE if method != "mtp"):
        reference = make(target)
        drafted = reference.drafts(IDS, dict(enumerate(features.states)), features.normed, K)
        np.testing.assert_allclose(drafted.logits, reference.after(IDS, K).logits)


def test_reduced_vocabulary_is_a_table_of_offsets() -> None:
    w = read_tensors(tiny_drafts.eagle3(draft_ids=[9, 3, 100]))
    assert (np.arange(3) + w["d2t"]).tolist() == [3, 9, 100] == np.flatnonzero(w["t2d"]).tolist()
    assert w["d2t"].dtype == np.int64 and w["t2d"].dtype == bool and w["lm_head.weight"].shape == (3, H)
    config = json.loads((tiny_drafts.eagle3(layout="speculators") / "config.json").read_text())
    assert config["draft_vocab_size"] == 48 and config["transformer_layer_config"]["vocab_size"] == V
    assert "d2t" not in read_tensors(tiny_drafts.eagle3(draft_vocab=None))


def test_same_arguments_same_numbers_and_other_seeds_others() -> None:
    first, again, other = (read_tensors(tiny_drafts.eagle(seed=seed)) for seed in (1, 1, 2))
    assert all((first[name] == again[name]).all() and (first[name] != other[name]).any() for name in first)


def test_near_ties_are_not_compared() -> None:
    logits = np.array([[0.0, 5.0, 1.0], [2.0, 0.0, 2.0 + 1e-6], [3.0, 0.0, 0.0]])
    drafted = Drafted([1, 2, 0], [4.0, 1e-6, 3.0], logits, chained=True)
    assert drafted.compare([1, 2, 0]) == 3 and drafted.compare([1]) == 1
    assert drafted.compare([1, 0, 1]) == 1  # what follows another choice is another chain
    for wrong in ([0, 2, 0], [1, 1, 0], [1, 2, 1], [-1, 2, 0]):
        with pytest.raises(AssertionError):
            drafted.compare(wrong)
    drafted.chained = False
    assert drafted.compare([1, 0, 0]) == 2


def check_chain(reference: Eagle | Eagle3 | Mtp, step: Step, first: Callable[..., torch.Tensor] | None = None) -> None:
    """Compares K drafts with those of a torch block that keeps a cache."""
    done = reference.target.run(IDS[:-1])
    features = first(done.states, done.normed) if first else torch.tensor(done.normed).float()[None]
    tokens, at, cache, rows = torch.tensor([IDS[1:]]), torch.arange(len(IDS) - 1)[None], DynamicCache(), []
    with torch.no_grad():
        for _ in range(K):
            features, logits = step(tokens, features, at, cache)
            rows.append(logits[0, -1])
            tokens, features, at = logits[:, -1:].argmax(-1), features[:, -1:], at[:, -1:] + 1
    check(reference.after(IDS, K), torch.stack(rows))


def check(drafted: Drafted, wanted: torch.Tensor) -> None:
    assert min(drafted.gaps) > 1e-3, "choose other ids: a near tie decides nothing"
    np.testing.assert_allclose(drafted.logits, wanted.detach().numpy(), **CLOSE)
    assert drafted.compare(wanted.argmax(-1).tolist()) == len(wanted)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """As float32, or integers and booleans as they are."""
    read = {name: torch.tensor(value) for name, value in read_tensors(path).items()}
    return {name: value.float() if value.is_floating_point() else value for name, value in read.items()}


def below(w: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name[len(prefix) :]: value for name, value in w.items() if name.startswith(prefix)}


def layer_config(path: Path) -> Any:
    fields = json.loads((path / "config.json").read_text())
    fields = fields.get("transformer_layer_config", fields)
    if fields.get("qkv_bias"):
        fields["attention_bias"] = True
    kind = Qwen3Config if fields["model_type"] == "qwen3" else LlamaConfig
    return kind.from_dict(fields, attn_implementation="sdpa")
