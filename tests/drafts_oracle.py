"""NumPy references of the drafters that have weights, in float64, without caches: each call starts from nothing.

A reference is made of a draft checkpoint's folder and the ``Target`` it drafts for. ``drafts(ids, states, normed, k)``
takes the committed ids x_0 .. x_n and the target's features of positions 0 .. n - 1 (more rows do no harm: x_n has not
been fed to the target when it is drafted for) and returns the k greedy drafts that continue x_n. ``states[L]`` is the
target's residual stream [T, H] after L blocks (0: the embedding), ``normed`` [T, H] the output of its final norm.

    target = Target(model_folder)
    drafter = Eagle3(draft_folder, target)
    drafted = drafter.after(ids, k=3)  # runs the target itself
    drafted.tokens, drafted.gaps, drafted.logits
    drafted.compare(tokens_of_the_code_under_test)

What a method computes is written here from its paper and its public checkpoints' code (SafeAILab/EAGLE, SpecForge,
speculators, FasterDecoding/Medusa, XiaomiMiMo/MiMo as in vLLM, z-lab/dflash), not from this project's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy_decoder import Decoded, Shape, attend, block, causal, decode, linear, mlp, norm, project, silu

States = Any  # indexed by L: an array [N + 1, T, H], a list or a dict of arrays [T, H]


@dataclass
class Drafted:
    """k drafts and how sure they are."""

    tokens: list[int]  # target ids
    gaps: list[float]  # best logit minus second best; where it is tiny another sum order may choose otherwise
    logits: np.ndarray  # float64 [k, V] over the target's vocabulary; -inf: no draft id
    chained: bool  # a draft depends on the ones before it

    def compare(self, tokens: Sequence[int], tolerance: float = 1e-3) -> int:
        """Asserts that ``tokens`` (k or fewer) are these, except where the gap is below ``tolerance``.

        Where they differ for that reason, what follows in a chain is not compared. Returns how many were compared.
        """
        compared = 0
        for i, (token, wanted, gap) in enumerate(zip(tokens, self.tokens, self.gaps)):
            close = 0 <= token < len(self.logits[i]) and self.logits[i].max() - self.logits[i][token] < tolerance
            if token != wanted and close:
                if self.chained:
                    break
                continue
            assert token == wanted, f"draft {i} is {token}, not {wanted} (gap {gap:.2g}); all: {tokens}, {self.tokens}"
            compared += 1
        return compared


class Target:
    """A Llama, Qwen2, Qwen3 or MiMo folder as Hugging Face writes it (without rotary scaling)."""

    def __init__(self, path: Path) -> None:
        self.config = read_config(path)
        self.w = read_tensors(path)
        if self.config.get("tie_word_embeddings"):
            self.w.pop("lm_head.weight", None)
        self.shape = shape_of(self.config)
        self.layers = self.config["num_hidden_layers"]
        self.embedding = self.w["model.embed_tokens.weight"]
        self.head = self.w.get("lm_head.weight", self.embedding)

    def run(self, ids: Sequence[int]) -> Decoded:
        """Logits, states and normed outputs of all positions."""
        return decode(self.shape, self.w, ids, self.layers)

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The next ``count`` tokens of plain greedy decoding."""
        text = list(ids)
        for _ in range(count):
            text.append(int(self.run(text).logits[-1].argmax()))
        return text[len(ids) :]


class Reference:
    """What all have in common: a config, tensors, a target, and a way from draft logits to target ids."""

    chained = True

    def __init__(self, path: Path, target: Target) -> None:
        self.target = target
        self.config = read_config(path)
        self.w = read_tensors(path)

    def drafts(self, ids: Sequence[int], states: States, normed: np.ndarray, k: int) -> Drafted:
        raise NotImplementedError

    def after(self, ids: Sequence[int], k: int) -> Drafted:
        """Drafts for a text of at least two tokens, with features of the NumPy target."""
        features = self.target.run(ids[:-1])
        return self.drafts(ids, features.states, features.normed, k)

    def _collect(self, rows: Sequence[np.ndarray]) -> Drafted:
        tokens = [int(row.argmax()) for row in rows]
        gaps = [float(np.diff(np.partition(row, -2)[-2:])[0]) for row in rows]
        return Drafted(tokens, gaps, np.stack(rows), self.chained)

    def _spread(self, logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Logits of draft ids [Vd] at their target ids [V]."""
        row = np.full(len(self.target.head), -np.inf)
        row[ids] = logits
        return row


class Chain(Reference):
    """Drafters that run one position after the other and feed their own output back (EAGLE, EAGLE-3, MTP).

    Their row t holds the token x_{t+1} and the feature of position t, and predicts x_{t+2}. Rows 0 .. n - 1 have the
    target's features; each draft adds a row with itself and the recycled output of the row before.
    """

    embedding: np.ndarray

    def drafts(self, ids: Sequence[int], states: States, normed: np.ndarray, k: int) -> Drafted:
        n = len(ids) - 1
        tokens, features = list(ids[1:]), self.features(states, normed, n)
        rows = []
        for _ in range(k):
            recycled, logits = self.forward(np.array(tokens), features)
            rows.append(logits)
            tokens.append(int(logits.argmax()))
            features = np.concatenate([features, recycled[-1:]])
        return self._collect(rows)

    def features(self, states: States, normed: np.ndarray, n: int) -> np.ndarray:
        """What the drafter is fed of the target's positions 0 .. n - 1."""
        return np.asarray(normed, np.float64)[:n]

    def forward(self, tokens: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All rows from position 0: (what is fed back [T, H], the last row's logits [V])."""
        raise NotImplementedError


class Eagle(Chain):
    """EAGLE (Li et al., 2024): embedding and feature through ``fc``, a block without input norm, the target's head."""

    def __init__(self, path: Path, target: Target) -> None:
        super().__init__(path, target)
        self.shape = shape_of(self.config)
        self.embedding = self.w.get("embed_tokens.weight", target.embedding)

    def forward(self, tokens: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = linear(self.w, "fc", np.concatenate([self.embedding[tokens], features], -1))
        positions, seen = np.arange(len(x)), causal(len(x))
        for i in range(count_layers(self.w)):
            at = f"layers.{i}."
            gamma = self.w.get(f"{at}input_layernorm.weight")  # the first block has none
            y = x if gamma is None else norm(x, gamma, self.shape.eps)
            q, k, v = project(self.shape, self.w, f"{at}self_attn.", y, positions)
            x = x + linear(self.w, f"{at}self_attn.o_proj", attend(q, k, v, seen))
            y = norm(x, self.w[f"{at}post_attention_layernorm.weight"], self.shape.eps)
            x = x + mlp(self.w, f"{at}mlp.", y)
        return x, self.target.head @ x[-1]


class Eagle3(Chain):
    """EAGLE-3 (Li et al., 2025), all published layouts and switches.

    ``taps``: indices L of the states; None: what the config says, see ``_taps``.
    """

    def __init__(self, path: Path, target: Target, taps: Sequence[int] | None = None) -> None:
        super().__init__(path, target)
        self.w = {name.replace("midlayer.", "layers.0."): value for name, value in self.w.items()}
        self.shape = shape_of(self.config.get("transformer_layer_config", self.config))
        self.embedding = self.w.get("embed_tokens.weight", target.embedding)
        self.head = self.w.get("lm_head.weight", target.head)
        offsets = self.w.get("d2t", np.zeros(len(self.head), np.int64))
        self.ids = np.arange(len(self.head)) + offsets
        self.use_aux = bool(self._flag("use_aux_hidden_state", True))
        self.taps = sorted(self._taps() if taps is None else taps)

    def features(self, states: States, normed: np.ndarray, n: int) -> np.ndarray:
        if not self.use_aux:
            return super().features(states, normed, n)
        parts = [np.asarray(states[tap], np.float64)[:n] for tap in self.taps]
        if self._flag("fc_norm", False):
            parts = [norm(part, self.w[f"fc_norm.{i}.weight"], self.shape.eps) for i, part in enumerate(parts)]
        both = np.concatenate(parts, -1)
        if self._flag("norm_before_fc", False):
            both = norm(both, self.w["input_norm.weight"], self.shape.eps)
        return linear(self.w, "fc", both)

    def forward(self, tokens: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        w, eps, at = self.w, self.shape.eps, "layers.0."
        positions, seen = np.arange(len(tokens)), causal(len(tokens))
        normed = norm(features, w[f"{at}hidden_norm.weight"], eps)
        residual = normed if self._flag("norm_before_residual", False) else features
        z = np.concatenate([norm(self.embedding[tokens], w[f"{at}input_layernorm.weight"], eps), normed], -1)
        q, k, v = project(self.shape, w, f"{at}self_attn.", z, positions)
        x = residual + linear(w, f"{at}self_attn.o_proj", attend(q, k, v, seen))
        x = x + mlp(w, f"{at}mlp.", norm(x, w[f"{at}post_attention_layernorm.weight"], eps))
        for i in range(1, count_layers(w)):
            x, _, _ = block(self.shape, w, f"layers.{i}.", x, positions, seen)
        out = norm(x, w["norm.weight"], eps)
        logits = self.head @ out[-1] * self.config.get("logit_scale", 1.0)
        return out if self._flag("norm_output", False) else x, self._spread(logits, self.ids)

    def _flag(self, name: str, default: bool) -> Any:
        value = self.config.get(name)
        return self.config.get("eagle_config", {}).get(name, default) if value is None else value

    def _taps(self) -> list[int]:
        """States by index: top-level ids are such; ids inside ``eagle_config`` (SpecForge) count blocks' outputs."""
        key, layers = "eagle_aux_hidden_state_layer_ids", self.target.layers
        if self.config.get(key) is not None:
            return list(self.config[key])
        inner = self.config.get("eagle_config", {}).get(key)
        return [2, layers // 2, layers - 3] if inner is None else [i + 1 for i in inner]


class Mtp(Chain):
    """The first multi-token prediction block of a MiMo checkpoint, used again for every further draft.

    As in vLLM: the embedding of position 0 is zeroed, and what the final norm gives is both scored and fed back.
    """

    def __init__(self, path: Path, target: Target, zero_first: bool = True) -> None:
        super().__init__(path, target)
        self.shape, self.zero_first = shape_of(self.config), zero_first
        self.embedding = target.embedding

    def forward(self, tokens: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        w, eps, at = self.w, self.shape.eps, "model.mtp_layers.0."
        embedded = self.embedding[tokens]
        if self.zero_first:
            embedded[0] = 0
        hidden = norm(features, w[f"{at}hidden_layernorm.weight"], eps)
        embedded = norm(embedded, w[f"{at}token_layernorm.weight"], eps)
        x = linear(w, f"{at}input_proj", np.concatenate([hidden, embedded], -1))
        x, _, _ = block(self.shape, w, at, x, np.arange(len(x)), causal(len(x)))
        out = norm(x, w[f"{at}final_layernorm.weight"], eps)
        return out, self.target.head @ out[-1]


class Medusa(Reference):
    """Medusa heads (Cai et al., 2024) on the normed output of position n - 1, the one that chose x_n."""

    chained = False

    def __init__(self, path: Path, target: Target) -> None:
        super().__init__(path, target)
        prefixes = ("medusa_heads.", "medusa_head.")
        for prefix in prefixes:
            self.w = {name[len(prefix) if name.startswith(prefix) else 0 :]: v for name, v in self.w.items()}
        self.ids = self.w.get("token_map", np.arange(len(target.head)))

    def drafts(self, ids: Sequence[int], states: States, normed: np.ndarray, k: int) -> Drafted:
        hidden = np.asarray(normed, np.float64)[len(ids) - 2]
        return self._collect([self._spread(self._head(h, hidden), self.ids) for h in range(k)])

    def _head(self, h: int, x: np.ndarray) -> np.ndarray:
        w, layer = self.w, 0
        original = f"{h}.0.linear.weight" in w
        name = (lambda i: f"{h}.{i}.linear") if original else (lambda i: f"blocks.{h}.layers.{i}")
        while f"{name(layer)}.weight" in w:
            x = x + silu(linear(w, name(layer), x))
            layer += 1
        if original:
            return w[f"{h}.{layer}.weight"] @ x
        shared = w.get("lm_head.weight", w.get("lm_heads.0.weight"))
        return w.get(f"lm_heads.{h}.weight", shared) @ x


class Dflash(Reference):
    """DFlash (z-lab): a block of masks is filled in one pass, looking at the target's states of all positions before.

    A draft depends on the number of masks. ``rows`` of the block: x_n and rows - 1 masks; None: k + 1.
    """

    chained = False

    def __init__(self, path: Path, target: Target) -> None:
        super().__init__(path, target)
        self.shape, self.layers = shape_of(self.config), self.config["num_hidden_layers"]
        self.block_size = self._value("block_size", 16)
        self.mask = self._value("mask_token_id")
        ids = self._value("target_layer_ids")
        if ids is None:
            span, last = self.target.layers - 4, self.layers - 1
            ids = [round(1 + i * span / last) for i in range(self.layers)] if last else [self.target.layers // 2]
        self.taps = [i + 1 for i in ids]  # the ids count outputs of blocks

    def drafts(
        self, ids: Sequence[int], states: States, normed: np.ndarray, k: int, rows: int | None = None
    ) -> Drafted:
        w, eps, n = self.w, self.shape.eps, len(ids) - 1
        rows = rows or k + 1
        assert k < rows
        context = np.concatenate([np.asarray(states[tap], np.float64)[:n] for tap in self.taps], -1)
        context = norm(linear(w, "fc", context), w["hidden_norm.weight"], eps)
        x = self.target.embedding[[ids[-1]] + [self.mask] * (rows - 1)]
        before, here = np.arange(n), np.arange(n, n + rows)
        everywhere = np.arange(n + rows)
        for i in range(self.layers):
            at = f"layers.{i}."
            _, far_keys, far_values = project(self.shape, w, f"{at}self_attn.", context, before)
            y = norm(x, w[f"{at}input_layernorm.weight"], eps)
            q, keys, values = project(self.shape, w, f"{at}self_attn.", y, here)
            keys, values = np.concatenate([far_keys, keys]), np.concatenate([far_values, values])
            seen = self._seen(i, here[:, None] - everywhere)
            x = x + linear(w, f"{at}self_attn.o_proj", attend(q, keys, values, seen))
            x = x + mlp(w, f"{at}mlp.", norm(x, w[f"{at}post_attention_layernorm.weight"], eps))
        logits = norm(x, w["norm.weight"], eps) @ self.target.head.T
        return self._collect(list(logits[1 : k + 1]))

    def _seen(self, layer: int, distance: np.ndarray) -> np.ndarray:
        """bool as ``distance`` (query position minus key position)."""
        kinds = self.config.get("layer_types")
        sliding = bool(kinds) and kinds[layer] == "sliding_attention"
        is_causal = self.config.get("is_causal")
        if is_causal is None:
            is_causal = self.config.get("dflash_config", {}).get("causal", sliding)
        seen = distance >= 0 if is_causal else np.ones_like(distance, bool)
        return seen & (abs(distance) < self.config["sliding_window"]) if sliding else seen

    def _value(self, name: str, default: Any = None) -> Any:
        return self.config.get("dflash_config", {}).get(name, self.config.get(name, default))


class DraftModel(Reference):
    """An independent language model that goes on greedily; it needs no features."""

    def __init__(self, path: Path, target: Target) -> None:
        self.target, self.model = target, Target(path)

    def drafts(self, ids: Sequence[int], states: States, normed: np.ndarray | None, k: int) -> Drafted:
        text, rows = list(ids), []
        for _ in range(k):
            rows.append(self.model.run(text).logits[-1])
            text.append(int(rows[-1].argmax()))
        return self._collect(rows)

    def after(self, ids: Sequence[int], k: int) -> Drafted:
        return self.drafts(ids, None, None, k)


REFERENCES = {
    "eagle": Eagle,
    "eagle3": Eagle3,
    "medusa": Medusa,
    "mtp": Mtp,
    "dflash": Dflash,
    "draft_model": DraftModel,
}


def read_config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder: float64, or as they are if they are integers or booleans."""
    import torch
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors.update(load_file(file))
    for file in [] if tensors else sorted([*path.glob("*.bin"), *path.glob("*.pt")]):
        tensors.update(torch.load(file, map_location="cpu", weights_only=True))
    return {name: (t.double() if t.is_floating_point() else t).numpy() for name, t in tensors.items()}


def shape_of(config: Mapping[str, Any]) -> Shape:
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise ValueError(f"rope_scaling: {scaling}: these references have none; use a config without it")
    heads = config["num_attention_heads"]
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    return Shape(
        heads,
        config.get("num_key_value_heads", heads),
        config.get("head_dim") or config["hidden_size"] // heads,
        config.get("rms_norm_eps", 1e-6),
        theta,
    )


def count_layers(tensors: Mapping[str, np.ndarray]) -> int:
    """How many ``layers.*`` there are; configs of single-layer drafts do not always say one."""
    return len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
