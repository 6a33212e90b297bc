"""Draft checkpoints in their public layouts: shapes, names and tables; what does not fit is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_drafts
from safetensors.numpy import load_file, save_file
from tiny import new_folder, tiny_tokenizer

from ms_spec.models.checkpoint import open_checkpoint
from ms_spec.models.config import RopeConfig
from ms_spec.models.drafts import OverrideError, detect_method, open_draft
from ms_spec.models.drafts.renamed import RenamedCheckpoint
from ms_spec.models.loading import load

H, V, N = tiny_drafts.HIDDEN, tiny_drafts.VOCAB, tiny_drafts.LAYERS
SCALING = {"rope_type": "linear", "factor": 2.0}


def model(hidden=H, vocab=V, layers=N, tokens=V, kind="Llama", more=(), **config) -> Path:
    """A folder with a language model's config and those of its tensors that readers look at."""
    folder = new_folder()
    random = np.random.default_rng(layers)
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    tensors = {name: random.standard_normal((vocab, hidden)).astype(np.float32) for name in names}
    tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((8, hidden), np.float32)
    save_file({**tensors, **dict(more)}, folder / "model.safetensors")
    fields = {
        "architectures": [f"{kind}ForCausalLM"],
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "intermediate_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_theta": 5000.0,
        "rope_scaling": SCALING,
    }
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    tiny_tokenizer(folder, tokens)
    return folder


@pytest.fixture(scope="module")
def target():
    return load(str(model()))


def edit(folder: Path, **fields) -> Path:
    """Changes fields of config.json; None takes one out."""
    file = folder / "config.json"
    content = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return folder


def edit_tensors(folder: Path, remove=(), **tensors) -> Path:
    file = folder / "model.safetensors"
    content = {**load_file(file), **{name.replace("__", "."): value for name, value in tensors.items()}}
    save_file({k: v for k, v in content.items() if k not in remove}, file)
    return folder


def refused(words, method, folder, target, **overrides):
    with pytest.raises(ValueError) as error:
        open_draft(method, folder, target, overrides)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def zeros(*shape):
    return np.zeros(shape, np.float32)


# EAGLE


def test_eagle(target):
    folder = tiny_drafts.eagle(layers=2, qkv_bias=True, kv_heads=1)
    draft = open_draft("eagle", folder, target)
    shape = draft.shape
    assert (shape.hidden_size, shape.intermediate_size, shape.num_layers, shape.vocab_size) == (H, 96, 2, V)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.rms_norm_eps) == (4, 1, 16, tiny_drafts.EPS)
    assert (shape.qkv_bias, shape.output_bias, shape.mlp_bias, shape.qk_norm, shape.fc_bias) == (
        True,
        *[False] * 3,
        True,
    )
    assert shape.rope == RopeConfig(10000.0, original_max_position=512)  # neither base nor scaling is the target's
    assert shape.own_embeddings and draft.kv_numbers == 2 * 2 * 16
    assert (draft.suggested_tokens, draft.max_tokens) == (None, None)
    stored = open_checkpoint(folder)
    assert sorted(draft.checkpoint.names()) == sorted(stored.names())
    assert (
        "layers.1.input_layernorm.weight" in stored.names() and "layers.0.input_layernorm.weight" not in stored.names()
    )
    assert np.array_equal(draft.checkpoint.read("fc.weight", 3, 5), stored.read("fc.weight", 3, 5))


def test_eagle_without_biases_and_embeddings(target):
    folder = tiny_drafts.eagle(bias=False, own_embedding=False, rope_theta=5e5)
    draft = open_draft("eagle", folder, target)
    assert not draft.shape.fc_bias and not draft.shape.own_embeddings and draft.shape.rope.theta == 5e5
    assert open_draft("eagle", folder, target, overrides={"rope_theta": 7.0}).shape.rope.theta == 7.0


def speculators_eagle(**fields) -> Path:
    """As its converter wrote them: no embeddings, an output matrix that nobody reads."""
    source, folder = open_checkpoint(tiny_drafts.eagle(bias=False)), new_folder()
    layer = json.loads((tiny_drafts.eagle(bias=False) / "config.json").read_text())
    names = {n.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): n for n in source.names()}
    save_file({n: source.read(o) for n, o in names.items() if "embed" not in n}, folder / "model.safetensors")
    edit_tensors(folder, lm_head__weight=zeros(V, H))
    config = {**tiny_drafts._speculators("eagle", layer, 5), "fusion_bias": False, "layernorms": False, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_eagle_of_speculators(target):
    folder = speculators_eagle()
    draft = open_draft("eagle", folder, target)
    plain = open_draft("eagle", tiny_drafts.eagle(bias=False), target)
    assert sorted(draft.checkpoint.names()) == sorted(set(plain.checkpoint.names()) - {"embed_tokens.weight"})
    assert np.array_equal(draft.checkpoint.read("fc.weight"), plain.checkpoint.read("fc.weight"))
    assert draft.suggested_tokens == 5 and not draft.shape.own_embeddings
    edit_tensors(folder, embedding_layernorm__weight=zeros(H))
    refused(["embedding_layernorm.weight", "layernorms: true"], "eagle", folder, target)


def test_copies_of_the_target_are_not_held_twice(target):
    folder = speculators_eagle()
    mine = target.checkpoint.read("model.embed_tokens.weight")
    edit_tensors(folder, embed_tokens__weight=mine)
    assert not open_draft("eagle", folder, target).shape.own_embeddings
    mine[V - 1, H - 1] += 1
    edit_tensors(folder, embed_tokens__weight=mine)
    draft = open_draft("eagle", folder, target)
    assert draft.shape.own_embeddings and "embed_tokens.weight" in draft.checkpoint.names()
    folder = tiny_drafts.eagle3(layout="specforge", draft_vocab=None)
    edit_tensors(folder, lm_head__weight=target.checkpoint.read("lm_head.weight"))
    draft = open_draft("eagle3", folder, target)
    assert not draft.shape.own_head and "lm_head.weight" not in draft.checkpoint.names()


@pytest.mark.parametrize(
    "options, fields, words",
    [
        ({"hidden": 32}, {}, ["hidden_size: 32", "64 wide"]),
        ({"vocab": 100}, {}, ["vocab_size: 100", "128"]),
        ({"vocab": 4096}, {}, ["vocab_size: 4096", "128"]),
        ({}, {"hidden_act": "gelu"}, ["hidden_act: 'gelu'"]),
        ({}, {"num_key_value_heads": 3}, ["num_key_value_heads: 3 does not divide num_attention_heads (4)"]),
        (
            {},
            {"num_attention_heads": 5, "num_key_value_heads": 1},
            ["num_attention_heads: 5 does not divide the 64 rows"],
        ),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({}, {"rope_scaling": {"type": "longrope"}}, ["rope_scaling.rope_type: 'longrope'"]),
        ({}, {"layer_types": ["sliding_attention"]}, ["sliding_attention"]),
        ({}, {"intermediate_size": None}, ["intermediate_size: missing"]),
    ],
)
def test_eagle_that_does_not_fit(options, fields, words, target):
    folder = edit(tiny_drafts.eagle(**options), **fields)
    refused([f"{folder}/config.json: ", *words], "eagle", folder, target)


def test_padded_vocabularies(target):
    """The target's embeddings serve a draft whose rows are padded to another multiple of 64."""
    padded = load(str(model(vocab=256, tokens=V)))
    draft = open_draft("eagle", tiny_drafts.eagle(), padded)
    assert draft.shape.vocab_size == 256 and not draft.shape.own_embeddings
    draft = open_draft("eagle3", tiny_drafts.eagle3(draft_vocab=None), padded)
    assert draft.shape.own_head and draft.shape.draft_vocab_size == V
    assert np.array_equal(draft.shape.token_map, np.arange(V))
    draft = open_draft("eagle3", tiny_drafts.eagle3(draft_vocab=None, vocab=192), target)
    assert draft.shape.draft_vocab_size == V and draft.shape.token_map is None
    assert draft.checkpoint.shape("lm_head.weight") == (V, H) == draft.checkpoint.read("lm_head.weight").shape
    assert draft.checkpoint.read("lm_head.weight", 120, 500).shape == (8, H)


# EAGLE-3


@pytest.mark.parametrize("layout", ["original", "specforge", "speculators"])
def test_eagle3(layout, target):
    ids = [3, 7, 8, 100, 127]
    folder = tiny_drafts.eagle3(layout=layout, draft_ids=ids, kv_heads=4)
    draft = open_draft("eagle3", folder, target)
    shape = draft.shape
    assert (shape.hidden_size, shape.target_hidden_size, shape.num_layers, shape.num_kv_heads) == (H, H, 1, 4)
    assert (shape.vocab_size, shape.draft_vocab_size, shape.aux_layers) == (V, 5, (2, 3, 4))
    assert shape.token_map.dtype == np.int32 and shape.token_map.tolist() == ids
    assert shape.own_head and shape.own_embeddings == (layout == "speculators")
    assert not any((shape.qkv_bias, shape.output_bias, shape.qk_norm, shape.norm_before_residual, shape.norm_output))
    assert shape.rope == RopeConfig(10000.0, original_max_position=512) and shape.logit_scale == 1.0
    assert draft.kv_numbers == 2 * 4 * 16 and draft.suggested_tokens == (3 if layout == "speculators" else None)
    names = draft.checkpoint.names()
    assert {"fc.weight", "norm.weight", "lm_head.weight", "midlayer.hidden_norm.weight"} <= set(names)
    assert not {"d2t", "t2d"} & set(names) and not any(n.startswith("layers.") for n in names)
    first = "layers.0." if layout == "speculators" else "midlayer."
    query = "self_attn.q_proj.weight"
    theirs = open_checkpoint(folder).read(first + query)
    assert np.array_equal(draft.checkpoint.read("midlayer." + query), theirs) and theirs.shape == (H, 2 * H)


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_variants_of_eagle3(layout, target):
    flags = {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "attention_bias": True, "qwen3": True}
    folder = tiny_drafts.eagle3(
        layout=layout, hidden=48, head_dim=10, layers=2, aux=2, aux_ids=[0, 6], draft_vocab=None, **flags
    )
    shape = open_draft("eagle3", folder, target).shape
    assert (shape.hidden_size, shape.target_hidden_size, shape.head_dim, shape.num_layers) == (48, H, 10, 2)
    assert shape.norm_before_residual and shape.fc_norm and shape.norm_output and not shape.norm_before_fc
    assert shape.qkv_bias and shape.output_bias and shape.qk_norm and shape.own_embeddings and shape.own_head
    assert shape.aux_layers == ((1, 7) if layout == "specforge" else (0, 6))
    assert shape.token_map is None and shape.draft_vocab_size == V
    names = open_draft("eagle3", folder, target).checkpoint.names()
    assert {"fc_norm.1.weight", "layers.1.input_layernorm.weight", "embed_tokens.weight"} <= set(names)
    folder = tiny_drafts.eagle3(layout=layout, use_aux=False, own_head=False, draft_vocab=None, norm_before_fc=False)
    draft = open_draft("eagle3", folder, target)
    assert draft.shape.aux_layers == () and not draft.shape.own_head and "fc.weight" not in draft.checkpoint.names()
    folder = tiny_drafts.eagle3(layout=layout, norm_before_fc=True)
    draft = open_draft("eagle3", folder, target)
    assert draft.shape.norm_before_fc and draft.checkpoint.shape("input_norm.weight") == (3 * H,)


def test_layers_are_counted(target):
    """Public configs say 40."""
    folder = edit(tiny_drafts.eagle3(), num_hidden_layers=40)
    assert open_draft("eagle3", folder, target).shape.num_layers == 1
    folder = tiny_drafts.eagle3(layout="specforge", layers=3)
    edit_tensors(folder, remove=[n for n in load_file(folder / "model.safetensors") if n.startswith("layers.1.")])
    refused([str(folder), "has layers.2. but no layers.1."], "eagle3", folder, target)


@pytest.mark.parametrize(
    "fields, aux",
    [
        ({}, (2, 3, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 5, 7]}, (0, 5, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}}, (1, 3, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 7]}}, (1, 5, 7)),  # 7 can only be a state
        ({"eagle_config": {"layer_ids": [1, 2, 6], "eagle_aux_hidden_state_layer_ids": [4, 5, 6]}}, (1, 2, 6)),
    ],
)
def test_states_of_the_target(fields, aux, target):
    folder = edit(tiny_drafts.eagle3(), **fields)
    assert open_draft("eagle3", folder, target).shape.aux_layers == aux
    chosen = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    assert open_draft("eagle3", folder, target, overrides=chosen).shape.aux_layers == (1, 3, 6)


def test_overrides(target):
    folder = tiny_drafts.eagle3(layout="speculators", rope_theta=1e6)
    inner = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    edit(
        folder,
        transformer_layer_config={**inner, "rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 9.0}},
    )
    rope = open_draft("eagle3", folder, target).shape.rope
    assert (rope.theta, rope.kind, rope.factor) == (9.0, "linear", 4.0)
    rope = open_draft("eagle3", folder, target, overrides={"rope_theta": 10000.0}).shape.rope
    assert (rope.theta, rope.kind, rope.factor) == (10000.0, "linear", 4.0)
    rope = open_draft("eagle3", folder, target, overrides={"rope_scaling": None}).shape.rope
    assert (rope.theta, rope.kind) == (9.0, "default")
    assert open_draft("eagle3", folder, target, overrides={"norm_output": True}).shape.norm_output
    refused(["hidden_size: cannot be overridden", "rope_theta"], "eagle3", folder, target, hidden_size=3)
    refused(["rope_theta: cannot be overridden with method 'mtp'"], "mtp", None, target, rope_theta=3)
    refused(["rope_theta: -1"], "eagle3", folder, target, rope_theta=-1)


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("eagle3", "foo", 1),
        ("eagle3", "rope_theta", "x"),
        ("eagle3", "rope_scaling", {"rope_type": "linear", "factor": -1}),
        ("eagle3", "rope_scaling", {"rope_theta": "x"}),
        ("eagle3", "norm_output", 3),
        ("eagle3", "eagle_aux_hidden_state_layer_ids", [2, 3, 99]),
        ("eagle3", "eagle_aux_hidden_state_layer_ids", [2, 3]),
        ("dflash", "block_size", 10**9),
        ("dflash", "mask_token_id", -1),
        ("medusa", "rope_theta", 1.0),
    ],
)
def test_a_wrong_override_is_not_the_files_fault(method, name, value, target):
    folder = getattr(tiny_drafts, method)()
    with pytest.raises(OverrideError) as error:
        open_draft(method, folder, target, {name: value})
    assert str(error.value).startswith(name) and str(folder) not in str(error.value)


def test_too_few_layers_for_the_default_states():
    small = load(str(model(layers=6)))
    refused(["num_hidden_layers: 6", "2, 3, 3", "eagle_aux_hidden"], "eagle3", tiny_drafts.eagle3(), small)
    assert open_draft("eagle3", tiny_drafts.eagle3(aux_ids=[2, 3, 4]), small).shape.aux_layers == (2, 3, 4)


@pytest.mark.parametrize(
    "options, fields, words",
    [
        ({"target_hidden": 32}, {}, ["hidden_size: 32", "64 wide"]),
        ({"hidden": 48, "target_hidden": 32}, {}, ["target_hidden_size: 32", "64 wide"]),
        ({"aux": 2}, {}, ["fc.weight takes 128 numbers", "3 states of the target (2, 3, 4)", "3 * 64 = 192"]),
        ({"vocab": 100}, {}, ["vocab_size: 100", "128"]),
        ({"aux_ids": [2, 3, 8]}, {}, ["eagle_aux_hidden_state_layer_ids: 8", "which has 7; allowed: 0 to 7"]),
        ({"aux_ids": [3, 2, 4]}, {}, ["[3, 2, 4] does not rise"]),
        ({"aux_ids": []}, {}, ["expected a list of layer ids"]),
        ({}, {"eagle_aux_hidden_state_layer_ids": "2,3,4"}, ["'2,3,4'; expected a list"]),
        ({}, {"eagle_config": {"layer_ids": [True]}}, ["eagle_config.layer_ids: True"]),
        ({}, {"eagle_config": [1]}, ["eagle_config: [1]", "expected an object"]),
        ({}, {"norm_before_residual": "yes"}, ["norm_before_residual: 'yes'"]),
        ({"fc_norm": True}, {"norm_before_fc": True}, ["fc_norm: true together with norm_before_fc"]),
        ({"own_head": False, "draft_vocab": None}, {"draft_vocab_size": 50}, ["draft_vocab_size", "50", "no lm_head"]),
    ],
)
def test_eagle3_that_does_not_fit(options, fields, words, target):
    folder = edit(tiny_drafts.eagle3(**options), **fields)
    refused([f"{folder}/config.json: ", *words], "eagle3", folder, target)


@pytest.mark.parametrize(
    "remove, tensors, words",
    [
        ([], {"d2t": np.full(48, V)}, ["d2t[i] + i: 128 is no token id of the target; allowed: 0 to 127"]),
        ([], {"d2t": np.arange(-1, 47)}, ["d2t[i] + i: -1 is no token id"]),
        ([], {"d2t": np.zeros(40, np.int64)}, ["d2t: has shape [40]; expected [48], as lm_head.weight has 48 rows"]),
        ([], {"d2t": np.zeros((48, 1), np.int64)}, ["d2t: has shape [48, 1]; expected [48]"]),
        ([], {"d2t": zeros(48)}, ["tensor d2t has dtype F32"]),
        (["d2t"], {}, ["lm_head.weight rows (there is no d2t): 48", "128"]),
        (["lm_head.weight"], {}, ["draft_vocab_size (there is no lm_head.weight): 48", "128"]),
        (["fc.weight"], {}, ["no tensor fc.weight"]),
        (["midlayer.hidden_norm.weight"], {}, ["has no midlayer.hidden_norm.weight"]),
        ([], {"mask_hidden": zeros(1, H)}, ["mask_hidden: parallel drafting"]),
    ],
)
def test_tensors_of_eagle3_that_do_not_fit(remove, tensors, words, target):
    folder = edit_tensors(tiny_drafts.eagle3(layout="specforge"), remove, **tensors)
    refused([str(folder), *words], "eagle3", folder, target)
    if not (words[0].startswith("draft_vocab_size") or "midlayer.hidden_norm.weight" in remove):
        with pytest.raises(ValueError) as error:
            open_draft("eagle3", folder, target)
        assert "config.json" not in str(error.value)


def test_ties_to_own_embeddings(target):
    folder = tiny_drafts.eagle3(layout="specforge", own_embedding=True, own_head=False, draft_vocab=None)
    edit(folder, tie_word_embeddings=True)
    draft = open_draft("eagle3", folder, target)
    assert draft.shape.own_head
    assert np.array_equal(draft.checkpoint.read("lm_head.weight"), draft.checkpoint.read("embed_tokens.weight"))


# Medusa


@pytest.mark.parametrize("layout", ["original", "vllm"])
def test_medusa(layout, target):
    folder = tiny_drafts.medusa(layout=layout, heads=3, layers=2)
    draft = open_draft("medusa", folder, target)
    shape = draft.shape
    assert (shape.hidden_size, shape.vocab_size, shape.draft_vocab_size) == (H, V, V)
    assert (shape.num_heads, shape.num_layers, shape.bias) == (3, 2, layout == "original")
    assert (draft.max_tokens, draft.suggested_tokens, draft.kv_numbers, shape.token_map) == (3, 3, 0, None)
    parts = ["weight", "bias"] if layout == "original" else ["weight"]
    blocks = {f"blocks.{h}.layers.{i}.{part}" for h in range(3) for i in range(2) for part in parts}
    assert set(draft.checkpoint.names()) == blocks | {f"lm_heads.{h}.weight" for h in range(3)}
    stored = "{}.{}.linear.weight" if layout == "original" else "blocks.{}.layers.{}.weight"
    theirs = open_checkpoint(folder).read(stored.format(2, 1))
    assert np.array_equal(draft.checkpoint.read("blocks.2.layers.1.weight"), theirs)


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_medusa_in_the_target(prefix):
    heads = open_checkpoint(tiny_drafts.medusa(heads=2))
    more = {prefix + name: heads.read(name) for name in heads.names()}
    path = model(more=more, medusa_num_heads=2)
    whole = load(str(path))
    for folder in (None, path):
        draft = open_draft("medusa", folder, whole)
        assert (draft.shape.num_heads, draft.shape.bias) == (2, True)
        assert np.array_equal(draft.checkpoint.read("lm_heads.1.weight"), more[f"{prefix}1.1.weight"])
    assert open_draft("draft_model", path, whole).shape == whole.config


def test_medusa_beside_the_target(target):
    heads, folder = open_checkpoint(tiny_drafts.medusa(heads=2)), model()
    save_file({name: heads.read(name) for name in heads.names()}, folder / "medusa_lm_head.safetensors")
    assert open_draft("medusa", None, load(str(folder))).shape.num_heads == 2
    assert open_draft("medusa", folder, target).shape.num_heads == 2
    refused(["has no Medusa heads"], "medusa", None, target)


def test_truncated_and_shared_output_matrices(target):
    folder = tiny_drafts.medusa(layout="vllm", heads=2)
    cut = {f"lm_heads__{h}__weight": zeros(3, H) for h in range(2)}
    edit_tensors(folder, token_map=np.array([5, 1, 9]), **cut)
    shape = open_draft("medusa", folder, target).shape
    assert shape.draft_vocab_size == 3 and shape.token_map.dtype == np.int32 and shape.token_map.tolist() == [5, 1, 9]
    edit_tensors(folder, token_map=np.array([5, 1, V]))
    refused([str(folder), "token_map: 128 is no token id"], "medusa", folder, target)
    edit_tensors(folder, remove=["token_map"])
    refused([str(folder), "lm_heads.0.weight rows: 3", "128"], "medusa", folder, target)
    folder = edit(tiny_drafts.medusa(layout="vllm", heads=3), original_lm_head=True)
    edit_tensors(folder, remove=["lm_heads.1.weight", "lm_heads.2.weight"])
    draft = open_draft("medusa", folder, target)
    assert draft.shape.num_heads == 3
    assert np.array_equal(draft.checkpoint.read("lm_heads.2.weight"), draft.checkpoint.read("lm_heads.0.weight"))


def test_medusa_that_does_not_fit(target):
    folder = tiny_drafts.medusa(hidden=32)
    refused([str(folder), "lm_heads.0.weight columns: 32", "64 wide"], "medusa", folder, target)
    folder = tiny_drafts.medusa(vocab=100)
    refused([str(folder), "lm_heads.0.weight rows: 100", "128"], "medusa", folder, target)
    folder = edit_tensors(tiny_drafts.medusa(layout="vllm", heads=3), remove=["lm_heads.1.weight"])
    refused(["has lm_heads.2. but no lm_heads.1."], "medusa", folder, target)


# MTP


def mimo(modules=1, said=None, bias=True, **more) -> Path:
    tensors = {}
    for i in range(modules):
        at = f"model.mtp_layers.{i}."
        tensors[f"{at}input_proj.weight"] = np.full((H, 2 * H), i + 1, np.float32)
        tensors[f"{at}self_attn.q_proj.weight"] = zeros(H, H)
        if bias:
            tensors[f"{at}self_attn.q_proj.bias"] = zeros(H)
    said = modules if said is None else said
    return model(kind="MiMo", more=tensors, attention_bias=True, num_nextn_predict_layers=said, **more)


def test_mtp():
    path = mimo(head_dim=24)
    target = load(str(path))
    assert target.config.qkv_bias and not target.config.output_bias and not target.config.qk_norm
    for folder in (None, path):
        draft = open_draft("mtp", folder, target)
        shape = draft.shape
        assert (shape.hidden_size, shape.num_layers, shape.head_dim, shape.vocab_size) == (H, 1, 24, V)
        assert shape.qkv_bias and not shape.output_bias and shape.rope == target.config.rope
        assert (draft.suggested_tokens, draft.max_tokens, draft.kv_numbers) == (1, None, 2 * 2 * 24)
        assert sorted(draft.checkpoint.names()) == sorted(n for n in target.checkpoint.names() if "mtp" in n)
        assert draft.checkpoint.read("model.mtp_layers.0.input_proj.weight", 0, 1).shape == (1, 2 * H)


@pytest.mark.parametrize(
    "path, words",
    [
        (lambda: mimo(2), ["num_nextn_predict_layers: 2", "supported: 1"]),
        (lambda: mimo(1, 3), ["num_nextn_predict_layers: 3", "supported: 1"]),
        (lambda: mimo(1, 0), ["num_nextn_predict_layers: 0"]),
        (lambda: mimo(0, 1), ["has no tensors model.mtp_layers.*"]),
        (lambda: mimo(1, "x"), ["config.json: num_nextn_predict_layers: 'x'"]),
        (lambda: model(kind="Qwen2"), ["a Qwen2ForCausalLM has no layers", "MiMoForCausalLM"]),
    ],
)
def test_targets_without_exactly_one_mtp_layer(path, words):
    path = path()
    refused([str(path), *words], "mtp", None, load(str(path)))


def test_mtp_drafts_with_the_target_alone(target):
    refused(["method 'mtp' drafts with the target"], "mtp", mimo(), load(str(mimo())))


# DFlash


def test_dflash(target):
    folder = tiny_drafts.dflash(head_dim=24, kv_heads=1, block_size=6, nested_block_size=True, rope_theta=1e6)
    draft = open_draft("dflash", folder, target)
    shape = draft.shape
    assert (shape.hidden_size, shape.target_hidden_size, shape.num_layers, shape.head_dim) == (H, H, 3, 24)
    assert (shape.aux_layers, shape.block_size, shape.mask_token_id) == ((2, 4, 6), 6, 5)
    assert shape.qk_norm and not shape.qkv_bias and not shape.own_embeddings and not shape.own_head
    assert (shape.vocab_size, shape.draft_vocab_size, shape.token_map, shape.rope.theta) == (V, V, None, 1e6)
    assert (draft.suggested_tokens, draft.max_tokens, draft.kv_numbers) == (5, 5, 2 * 3 * 24)
    assert sorted(draft.checkpoint.names()) == sorted(open_checkpoint(folder).names())


def test_layers_of_dflash_with_a_window_are_causal(target):
    shape = open_draft("dflash", tiny_drafts.dflash(sliding_window=9), target).shape
    assert (shape.causal, shape.sliding_window) == ((False,) * 3, None)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    folder = tiny_drafts.dflash(layer_types=kinds, sliding_window=9)
    shape = open_draft("dflash", folder, target).shape
    assert (shape.causal, shape.sliding_window) == ((False, True, False), 9)
    shape = open_draft("dflash", edit(folder, is_causal=False), target).shape
    assert (shape.causal, shape.sliding_window) == ((False,) * 3, 9)


@pytest.mark.parametrize(
    "layers, total, aux", [(1, 7, (4,)), (2, 7, (2, 5)), (3, 10, (2, 5, 8)), (5, 36, (2, 10, 18, 26, 34))]
)
def test_default_states_of_dflash(layers, total, aux):
    folder = tiny_drafts.dflash(layers=layers, target_layers=total, target_layer_ids=None)
    assert open_draft("dflash", folder, load(str(model(layers=total)))).shape.aux_layers == aux


def test_dflash_of_speculators(target):
    base = tiny_drafts.dflash(attention_bias=True)
    layer = {k: v for k, v in json.loads((base / "config.json").read_text()).items() if "dflash" not in k}
    layer = {
        k: v for k, v in layer.items() if k not in ("architectures", "block_size", "num_target_layers", "auto_map")
    }
    config = {**tiny_drafts._speculators("dflash", layer, 7), "draft_vocab_size": 3, "mask_token_id": 9}
    edit_tensors(base, d2t=np.array([4, 5, 6]), lm_head__weight=zeros(3, H), embed_tokens__weight=zeros(V, H))
    (base / "config.json").write_text(json.dumps({**config, "aux_hidden_state_layer_ids": [1, 3, 7]}))
    draft = open_draft("dflash", base, target)
    shape = draft.shape
    assert (shape.aux_layers, shape.block_size, shape.mask_token_id, draft.suggested_tokens) == ((1, 3, 7), 8, 9, 7)
    assert shape.token_map.tolist() == [4, 6, 8] and shape.own_head and shape.own_embeddings and shape.output_bias
    assert {"lm_head.weight", "embed_tokens.weight"} <= set(draft.checkpoint.names())


@pytest.mark.parametrize(
    "options, fields, words",
    [
        ({"hidden": 32}, {}, ["hidden_size: 32", "64 wide"]),
        ({"vocab": 100}, {}, ["vocab_size: 100", "128"]),
        ({"target_layers": 9}, {}, ["num_target_layers: 9", "has 7 layers"]),
        ({}, {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 3]}}, ["takes 192", "2 * 64 = 128"]),
        ({"target_layer_ids": [1, 3, 7]}, {}, ["target_layer_ids: 7", "allowed: 0 to 6"]),
        ({"layers": 5, "target_layer_ids": None}, {}, ["num_hidden_layers: 7", "2, 3, 3, 4, 5"]),
        ({"mask_token_id": 128}, {}, ["mask_token_id: 128", "0 to 127"]),
        ({}, {"dflash_config": {"target_layer_ids": [1, 3, 5]}}, ["mask_token_id: None"]),
        ({"block_size": 1}, {}, ["block_size: 1"]),
        ({}, {"block_size": "many"}, ["block_size: 'many'"]),
        ({"layer_types": ["full_attention"]}, {}, ["layer_types: ['full_attention']", "each of 3 layers"]),
        ({"layer_types": ["full_attention", "linear", "linear"]}, {}, ["layer_types: ", "or sliding_attention"]),
        ({"layer_types": ["sliding_attention"] * 3}, {}, ["sliding_window: missing"]),
        ({}, {"is_causal": True}, ["is_causal: true"]),
        ({}, {"sample_from_anchor": True}, ["sample_from_anchor: true"]),
        ({}, {"selector_rank": 256}, ["selector_rank: 256"]),
        ({}, {"input_embedding_scale": 2.0}, ["input_embedding_scale: 2.0"]),
        ({}, {"is_neox_style": False}, ["is_neox_style: false"]),
    ],
)
def test_dflash_that_does_not_fit(options, fields, words, target):
    folder = edit(tiny_drafts.dflash(**options), **fields)
    refused([f"{folder}/config.json: ", *words], "dflash", folder, target)


def test_dflash_with_a_mask_of_its_own(target):
    folder = tiny_drafts.dflash()
    (folder / "mask_embedding.pt").write_bytes(b"")
    refused([str(folder), "mask_embedding.pt"], "dflash", folder, target)


# Draft models


def test_draft_model(target):
    path = model(hidden=32, layers=2, kind="Qwen2")
    draft = open_draft("draft_model", path, target)
    assert draft.shape == load(str(path)).config and draft.kv_numbers == 2 * 2 * 2 * 8
    assert (draft.suggested_tokens, draft.max_tokens) == (None, None)
    assert draft.checkpoint.names() == open_checkpoint(path).names()


def test_vocabulary_of_a_draft_model(target):
    assert open_draft("draft_model", model(vocab=192, tokens=V), target).shape.vocab_size == 192
    for vocab, tokens in ((192, 150), (192, 192), (150, 150), (140, V), (8192, V)):
        folder = model(vocab=vocab, tokens=tokens)
        words = [f"{folder}: vocab_size: {vocab} ({tokens} tokens)", f"the target's is {V} ({V} tokens)"]
        refused(words, "draft_model", folder, target)


# Which method


def test_detection():
    drafts = {
        "eagle": [tiny_drafts.eagle(), tiny_drafts.eagle(own_embedding=False), speculators_eagle()],
        "eagle3": [tiny_drafts.eagle3(layout=layout) for layout in ("original", "specforge", "speculators")],
        "medusa": [tiny_drafts.medusa(), tiny_drafts.medusa(layout="vllm")],
        "dflash": [tiny_drafts.dflash(), edit(tiny_drafts.dflash(), architectures=None, dflash_config=None)],
        "draft_model": [model()],
    }
    heads = open_checkpoint(tiny_drafts.medusa(heads=1))
    more = {"medusa_head." + name: heads.read(name) for name in heads.names()}
    drafts["medusa"].append(model(more=more, medusa_num_heads=1))
    for method, folders in drafts.items():
        for folder in folders:
            assert detect_method(folder) == method


def test_detection_of_what_it_cannot_tell(tmp_path):
    heads = open_checkpoint(tiny_drafts.medusa(heads=1))
    for folder, words in (
        (mimo(), ["tensors of draft_model, mtp", "say which with method"]),
        (model(more={"medusa_head." + n: heads.read(n) for n in heads.names()}), ["draft_model, medusa"]),
        (edit(tiny_drafts.eagle(), architectures=["LlamaForCausalLMEagle3"]), ["of eagle", "config.json says eagle3"]),
        (edit(tiny_drafts.eagle3(), speculators_model_type="peagle"), ["'peagle' is not supported", "config.json"]),
        (edit_tensors(model(), remove=["model.embed_tokens.weight"]), ["no tensors of a known draft"]),
    ):
        with pytest.raises(ValueError) as error:
            detect_method(folder)
        text = str(error.value)
        assert str(folder) in text and "\n" not in text and all(word in text for word in words), text
    with pytest.raises(ValueError, match=r"has no config.json"):
        detect_method(tmp_path)


@pytest.mark.parametrize(
    "method, folder, words",
    [
        ("eagle", tiny_drafts.eagle3, ["has tensors of eagle3; set method to 'eagle3'"]),
        ("eagle3", tiny_drafts.eagle, ["has tensors of eagle; set method to 'eagle'"]),
        ("medusa", tiny_drafts.dflash, ["has tensors of dflash"]),
        ("dflash", tiny_drafts.medusa, ["has tensors of medusa"]),
        ("draft_model", tiny_drafts.eagle3, ["has tensors of eagle3"]),
        ("eagle", model, ["has tensors of draft_model"]),
    ],
)
def test_another_method_than_the_checkpoint_is_for(method, folder, words, target):
    folder = folder()
    refused([str(folder), *words], method, folder, target)


def test_methods_and_their_checkpoints(target):
    for method in ("ngram", "suffix", "extract_hidden_states"):
        refused([f"method {method!r} has no draft checkpoint", "eagle3"], method, None, target)
    for method in ("eagle", "eagle3", "dflash", "draft_model"):
        refused([f"missing; method '{method}' needs the path"], method, None, target)
    refused(["'nowhere' is no directory"], "eagle", "nowhere", target)
    with pytest.raises(ValueError, match=r"^'nowhere' is no directory"):
        detect_method("nowhere")


def test_renamed_checkpoint():
    source = open_checkpoint(tiny_drafts.eagle3(layout="specforge"))
    renamed = RenamedCheckpoint(source, {"a": "fc.weight", "ids": "d2t", "b": "lm_head.weight"}, {"b": 3})
    assert renamed.names() == ["a", "ids", "b"] and renamed.shape("a") == source.shape("fc.weight")
    assert renamed.dtype("a") == "float32" and renamed.shape("b") == (3, H)
    assert np.array_equal(renamed.read("b", 1), source.read("lm_head.weight", 1, 3))
    assert np.array_equal(renamed.read_int("ids"), source.read_int("d2t"))
    others = [({"a": "fc.weight"}, {}), ({"a": "norm.weight"}, {}), ({"a": "fc.weight"}, {"a": 2})]
    identities = {RenamedCheckpoint(source, names, rows).identity() for names, rows in others}
    assert len(identities | {source.identity(), renamed.identity()}) == 5
    with pytest.raises(ValueError, match=r"there is no tensor fc.weight"):
        renamed.read("fc.weight")


def test_needs_no_mindspore():
    code = (
        "import sys; from ms_spec.models import drafts; drafts.detect_method(sys.argv[1]); "
        "print([m for m in ('mindspore', 'transformers', 'torch', 'huggingface_hub') if m in sys.modules])"
    )
    path = str(tiny_drafts.eagle())
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
