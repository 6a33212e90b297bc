"""mindformers' inference network of Qwen3, in the place of our own decoder.

It computes in the decode form throughout, prompts included: PagedAttention over the paged cache, with a mask for more
than one query token of a request. Its prefill form attends within a chunk alone, and ours begin anywhere.

The kernels of PagedAttention take the lengths from graph inputs that are called ``batch_valid_length`` and
``q_seq_lens``, so ``bounds`` is that pair here, int32 [n] each, and whoever makes the graph names its inputs so:

====================  ================================================================================================
batch_valid_length    tokens of each request, those of this step included: its first position + w
q_seq_lens            w for each request: rows without a token are computed, too
====================  ================================================================================================

The block tables have room for w positions more than a context, because rows of padding count.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_spec.models.config import ModelConfig
from ms_spec.models.mindformers_limits import check_mindformers
from ms_spec.models.ops.ascend import BOUNDS, LIVE, MASK, SLOTS
from ms_spec.models.ops.interface import Backend
from ms_spec.models.ops.limits import storage_dtype
from ms_spec.models.weights import WeightSpec

_log = logging.getLogger("ms_spec")
UNSEEN = -10000.0
"""What the mask adds to the score of a key that is not to be seen."""


def import_mindformers() -> Any:
    """mindformers' package, imported without its banner and without its log folder in the working directory.

    Its log goes to a folder that is deleted at exit, unless the environment variable LOG_MF_PATH names one.

    Raises:
        ValueError: it cannot be imported.
    """
    if "LOG_MF_PATH" not in os.environ:
        folder = tempfile.mkdtemp(prefix="ms-spec-mindformers-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["LOG_MF_PATH"] = folder
    os.environ.setdefault("RUN_MODE", "predict")
    # The other kernel of this operator takes its lengths from the device; this one from the host, as mindformers asks.
    os.environ.setdefault("MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST", "PagedAttention")
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import mindformers
        from mindformers.tools.logger import get_logger
    except ImportError as error:
        raise ValueError(f"model_impl = 'mindformers': mindformers is not importable ({error})") from None
    finally:
        logging.disable(before)
    get_logger().setLevel(logging.ERROR)
    return mindformers


def build_network(model: ModelConfig, num_blocks: int, block_size: int, max_len: int, dtype: str) -> nn.Cell:
    """mindformers' network with weights that are not loaded, set to give normed states of all rows."""
    import_mindformers()
    from mindformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from mindformers.models.qwen3.modeling_qwen3_infer import InferenceQwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        rope_theta=model.rope.theta,
        tie_word_embeddings=model.tie_word_embeddings,
        max_position_embeddings=max_len,
        seq_length=max_len,
        block_size=block_size,
        num_blocks=num_blocks,
        params_dtype=dtype,
        compute_dtype=dtype,
        rotary_dtype=dtype,
        layernorm_compute_dtype="float32",
        softmax_compute_dtype="float32",
    )
    with contextlib.redirect_stdout(io.StringIO()):  # a table of its settings
        network = InferenceQwen3ForCausalLM(config)
    network.add_flags_custom_mcore(is_prefill=False)
    network.model.return_hidden_states = True
    network.model.move_lens_to_cpu = False  # the lengths come from the host, by name
    return network


class MindformersQwen3(nn.Cell):
    """What :class:`ms_spec.models.decoder.Decoder` is to the steps. The one state that it gives is the normed last.

    Args:
        config: the model's shape.
        backend: the operations of Ascend.
        num_blocks, block_size: the paged KV cache; block 0 takes the writes of dead rows.
        max_len: positions that the rotary tables cover.
        dtype: of weights, caches and activations: bfloat16 or float16 (float32 is stored as bfloat16).

    Raises:
        ValueError: the network is not one that mindformers can stand in for.
    """

    def __init__(
        self, config: ModelConfig, backend: Backend, num_blocks: int, block_size: int, max_len: int, dtype: str
    ) -> None:
        super().__init__()
        check_mindformers(config)
        dtype, note = storage_dtype(dtype)
        if note:
            _log.warning(note)
        self.config = config
        self.dtype = dtype
        self.mask_dtype = getattr(ms, dtype)
        self.rows = backend.Rows(max_len, block_size)
        self.network = build_network(config, num_blocks, block_size, max_len, dtype)
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.key_caches = _caches("key_cache", config.num_layers, shape, self.mask_dtype)
        self.value_caches = _caches("value_cache", config.num_layers, shape, self.mask_dtype)

    def weights(self) -> list[WeightSpec]:
        """Every parameter's place in a Hugging Face checkpoint."""
        model, at = self.network.model, "model.layers"
        specs = [self._matrix(model.embedding.word_embeddings, "model.embed_tokens")]
        for i, layer in enumerate(model.decoder.layers):
            attention, mlp = layer.self_attention, layer.mlp
            specs += [
                self._norm(layer.input_layernorm, f"{at}.{i}.input_layernorm"),
                self._matrix(attention.linear_qkv, *(f"{at}.{i}.self_attn.{x}_proj" for x in "qkv")),
                self._norm(attention.q_layernorm, f"{at}.{i}.self_attn.q_norm"),
                self._norm(attention.k_layernorm, f"{at}.{i}.self_attn.k_norm"),
                self._matrix(attention.linear_proj, f"{at}.{i}.self_attn.o_proj"),
                self._norm(layer.pre_mlp_layernorm, f"{at}.{i}.post_attention_layernorm"),
                self._matrix(mlp.linear_fc1, f"{at}.{i}.mlp.gate_proj", f"{at}.{i}.mlp.up_proj"),
                self._matrix(mlp.linear_fc2, f"{at}.{i}.mlp.down_proj"),
            ]
        specs.append(self._norm(model.decoder.final_layernorm, "model.norm"))
        if not self.config.tie_word_embeddings:
            specs.append(self._matrix(model.output_layer, "lm_head"))
        return specs

    def _matrix(self, layer: nn.Cell, *sources: str) -> WeightSpec:
        names = tuple(f"{source}.weight" for source in sources)
        return WeightSpec(layer.weight, tuple(layer.weight.shape), "rows", self.dtype, names)

    def _norm(self, layer: nn.Cell, source: str) -> WeightSpec:
        return WeightSpec(layer.weight, tuple(layer.weight.shape), "vector", "float32", (f"{source}.weight",))

    def construct(self, rows: tuple) -> tuple[Tensor, ...]:
        count, n = rows[0].shape[0], rows[5].shape[0]
        batch_valid_length, q_seq_lens = rows[BOUNDS]
        # A request without tokens looks at the null block. With one row each the kernel takes no mask.
        tables = rows[5] * rows[LIVE].reshape(n, -1)[:, :1]
        if count == n:
            mask = ops.zeros((1, 1), self.mask_dtype)
        else:
            mask = rows[MASK].reshape(count, -1).astype(self.mask_dtype) * UNSEEN
        state = self.network.model(
            input_ids=rows[0],
            positions=rows[1],
            batch_valid_length=batch_valid_length,
            q_seq_lens=q_seq_lens,
            block_tables=tables,
            slot_mapping=rows[SLOTS],
            attention_mask=mask,
            key_cache=self.key_caches,
            value_cache=self.value_caches,
        )
        return (state,)

    def keep(self, places: Sequence[int]) -> None:
        """See :class:`ms_spec.models.decoder.Decoder`: this network shows its last state only."""
        assert not places

    def head(self, state: Tensor, rows: tuple) -> Tensor:
        """Logits [R, vocab] of states [R, hidden]."""
        return self.network.model.output_layer(state)

    def normed(self, state: Tensor, rows: tuple) -> Tensor:
        """What the head's matrix sees."""
        return state


def _caches(name: str, layers: int, shape: tuple[int, ...], dtype: Any) -> ParameterTuple:
    return ParameterTuple(
        [
            Parameter(Tensor(np.zeros(shape, np.float32), dtype), name=f"{name}.{i}", requires_grad=False)
            for i in range(layers)
        ]
    )
