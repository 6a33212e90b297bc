"""Stand-ins for the Ascend operators that we call, for machines without an NPU.

Each class has the constructor and the call of the MindSpore primitive of the same name, computes the same thing with
NumPy in float32, rounds to the operator's dtype, and raises ``Violation`` on a call that breaks a documented rule
(MindSpore 2.9's operator pages and CANN's page of aclnnFusedInferAttentionScoreV2; for ``PagedAttention`` also the
header of its kernel in MindSpore's package, for ``ApplyRotaryPosEmb``, which has no page, how mindformers calls it).
Arguments that we never use (quantisation, left padding, shared prefixes, ...) are refused too. They run in PyNative
mode, where values can be looked at.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np

HALF = (ms.float16, ms.bfloat16)
MASKS = (ms.bool_, ms.int8, ms.uint8)
INT_MAX = 2147483647


class Violation(Exception):
    """A call that the operator's documentation forbids."""


def need(condition: Any, message: str) -> None:
    if not condition:
        raise Violation(message)


def values(tensor: Any) -> np.ndarray:
    """The tensor's values; half precision widened to float32."""
    if tensor.dtype in HALF:
        tensor = tensor.astype(ms.float32)
    return tensor.asnumpy()


class FusedInferAttentionScore:
    """BSH layout only. Q_S = 1 with paged or contiguous keys, Q_S > 1 with contiguous ones."""

    def __init__(
        self,
        num_heads=1,
        scale_value=1.0,
        pre_tokens=INT_MAX,
        next_tokens=INT_MAX,
        input_layout="BSH",
        num_key_value_heads=0,
        sparse_mode=0,
        inner_precise=1,
        block_size=0,
        antiquant_mode=0,
        softmax_lse_flag=False,
        key_antiquant_mode=0,
        value_antiquant_mode=0,
    ):
        need(input_layout == "BSH", f"input_layout {input_layout}: only BSH is emulated")
        need(not (antiquant_mode or key_antiquant_mode or value_antiquant_mode), "quantised caches are not emulated")
        need(not softmax_lse_flag, "softmax_lse is not emulated")
        need(pre_tokens == next_tokens == INT_MAX, "bands are not emulated")
        need(sparse_mode in (0, 1, 2, 3), f"sparse_mode {sparse_mode}: 0 to 3 are emulated")
        need(inner_precise in (0, 1, 2, 3), f"inner_precise {inner_precise} is not one of 0 to 3")
        self.heads, self.scale, self.sparse, self.precise = num_heads, scale_value, sparse_mode, inner_precise
        self.kv_heads = num_key_value_heads or num_heads
        self.block_size = block_size
        need(1 <= self.heads <= 256, f"num_heads {self.heads} is not within 1 to 256")
        need(1 <= self.kv_heads <= 256, f"num_key_value_heads {self.kv_heads} is not within 1 to 256")
        need(self.heads % self.kv_heads == 0, "num_heads is no multiple of num_key_value_heads")
        need(self.heads // self.kv_heads <= 64, "more than 64 query heads share a key/value head")

    def __call__(
        self,
        query,
        key,
        value,
        pse_shift=None,
        attn_mask=None,
        actual_seq_lengths=None,
        actual_seq_lengths_kv=None,
        dequant_scale1=None,
        quant_scale1=None,
        dequant_scale2=None,
        quant_scale2=None,
        quant_offset2=None,
        antiquant_scale=None,
        antiquant_offset=None,
        block_table=None,
        query_padding_size=None,
        kv_padding_size=None,
        key_antiquant_scale=None,
        key_antiquant_offset=None,
        value_antiquant_scale=None,
        value_antiquant_offset=None,
        key_shared_prefix=None,
        value_shared_prefix=None,
        actual_shared_prefix_len=None,
    ):
        unused = [pse_shift, dequant_scale1, quant_scale1, dequant_scale2, quant_scale2, quant_offset2]
        unused += [antiquant_scale, antiquant_offset, query_padding_size, kv_padding_size]
        unused += [key_antiquant_scale, key_antiquant_offset, value_antiquant_scale, value_antiquant_offset]
        unused += [key_shared_prefix, value_shared_prefix, actual_shared_prefix_len]
        need(all(x is None for x in unused), "an argument that is not emulated was given")
        need(isinstance(key, (list, tuple)) and isinstance(value, (list, tuple)), "key and value are lists of tensors")
        need(len(key) == len(value) == 1, "one key tensor and one value tensor are emulated")
        key, value = key[0], value[0]
        need(query.dtype in HALF, f"query is {query.dtype}; float16 or bfloat16 are taken")
        need(key.dtype == value.dtype == query.dtype, "query, key and value have different dtypes")
        need(query.ndim == 3, f"query {query.shape} is not [B, S, H]")
        batch, steps, hidden = query.shape
        need(hidden % self.heads == 0, f"query's H {hidden} is no multiple of num_heads {self.heads}")
        dim = hidden // self.heads
        need(dim % 16 == 0 and dim <= 512, f"head_dim {dim} is no multiple of 16 up to 512")
        need(batch <= (65536 if steps == 1 else 65535), f"batch {batch} is too large")
        need(
            key.ndim == 3 and key.shape == value.shape, f"key {key.shape} and value {value.shape} are not 3-D and equal"
        )
        need(key.shape[2] == self.kv_heads * dim, f"key's H {key.shape[2]} is not kv heads * head_dim")
        if block_table is not None or self.block_size:
            need(steps == 1, "block_table and block_size are void when Q_S > 1")
            keys, vals, span = self._paged(key, value, block_table, actual_seq_lengths_kv, batch)
        else:
            need(key.shape[0] == batch, f"key's batch {key.shape[0]} is not query's {batch}")
            keys, vals, span = values(key), values(value), key.shape[1]
        lengths = self._lengths(actual_seq_lengths_kv, batch, span, "actual_seq_lengths_kv")
        if steps == 1:
            need(self.precise in (0, 1), f"inner_precise {self.precise}: 0 or 1 when Q_S is 1")
            allowed = self._incremental_mask(attn_mask, batch, span, paged=block_table is not None)
        else:
            allowed = self._prompt_mask(attn_mask, batch, steps, span, lengths)
            queries = self._lengths(actual_seq_lengths, batch, steps, "actual_seq_lengths")
            need((queries == steps).all(), "shorter queries are not emulated")
        allowed = allowed & (np.arange(span)[None, None] < lengths[:, None, None])
        if self.precise in (0, 1):
            need(allowed.any(-1).all(), "a row may attend to nothing: undefined without row correction")
        out = self._attend(values(query), keys, vals, allowed, dim)
        return ms.Tensor(out).astype(query.dtype), ms.Tensor(np.zeros(1, np.float32))

    def _paged(self, key, value, table, lengths, batch):
        need(table is not None and self.block_size, "paging needs both block_table and block_size")
        need(
            self.block_size % 16 == 0 and self.block_size <= 512, f"block_size {self.block_size}: 16's multiple <= 512"
        )
        need(key.shape[1] == self.block_size, f"cache blocks hold {key.shape[1]}, not block_size {self.block_size}")
        need(key.shape[2] <= 65536, f"cache rows of {key.shape[2]} are longer than 64K")
        need(int(np.prod(key.shape)) <= INT_MAX, "the cache has more elements than int32 counts")
        need(table.dtype == ms.int32, f"block_table is {table.dtype}, not int32")
        need(table.ndim == 2 and table.shape[0] == batch, f"block_table {table.shape} is not [{batch}, blocks]")
        need(lengths is not None, "paging needs actual_seq_lengths_kv")
        span = table.shape[1] * self.block_size
        ids, counts = values(table), self._lengths(lengths, batch, span, "actual_seq_lengths_kv")
        used = np.arange(table.shape[1])[None] * self.block_size < counts[:, None]
        need(((ids >= 0) & (ids < key.shape[0]))[used].all(), "block_table names a block outside the cache")
        ids = np.where(used, ids, 0)
        return values(key)[ids].reshape(batch, span, -1), values(value)[ids].reshape(batch, span, -1), span

    @staticmethod
    def _lengths(lengths, batch, longest, name) -> np.ndarray:
        if lengths is None:
            return np.full(batch, longest)
        if not isinstance(lengths, (list, tuple)):
            need(lengths.dtype in (ms.int32, ms.int64), f"{name} is {lengths.dtype}, not int32 or int64")
            need(lengths.ndim == 1, f"{name} {lengths.shape} is not 1-D")
            lengths = values(lengths)
        counts = np.asarray(lengths, np.int64)
        need(len(counts) == batch, f"{name} has {len(counts)} entries for a batch of {batch}")
        need((counts >= 1).all() and (counts <= longest).all(), f"{name} {counts} leaves 1 to {longest}")
        return counts

    @staticmethod
    def _check_mask(mask):
        need(mask.dtype in MASKS, f"attn_mask is {mask.dtype}; bool, int8 or uint8 are taken")
        found = values(mask).astype(np.int64)
        need(np.isin(found, (0, 1)).all(), "attn_mask holds something else than 0 and 1")
        return found == 0

    def _incremental_mask(self, mask, batch, span, paged):
        if mask is None:
            return np.ones((batch, 1, span), bool)
        shapes = [(batch, mask.shape[-1]), (batch, 1, mask.shape[-1]), (batch, 1, 1, mask.shape[-1])]
        need(tuple(mask.shape) in shapes, f"attn_mask {mask.shape} is not [B, S], [B, 1, S] or [B, 1, 1, S]")
        enough = mask.shape[-1] >= span if paged else mask.shape[-1] == span
        need(enough, f"attn_mask covers {mask.shape[-1]} keys of {span}")
        return self._check_mask(mask).reshape(batch, 1, -1)[:, :, :span]

    def _prompt_mask(self, mask, batch, steps, span, lengths):
        if self.sparse in (2, 3):
            need(mask is not None, f"sparse_mode {self.sparse} needs a mask")
            square = tuple(mask.shape)[-2:] == (2048, 2048) and int(np.prod(mask.shape)) == 2048 * 2048
            need(square, f"attn_mask {mask.shape} is not 2048 x 2048, as sparse_mode {self.sparse} asks")
            future = np.triu(np.ones((2048, 2048), bool), 1)
            need((self._check_mask(mask).reshape(2048, 2048) == ~future).all(), "attn_mask is not triu(ones, 1)")
            shift = lengths - steps if self.sparse == 3 else np.zeros_like(lengths)
            return np.arange(span)[None, None] <= np.arange(steps)[None, :, None] + shift[:, None, None]
        if mask is None:
            need(self.sparse == 0, f"sparse_mode {self.sparse} needs a mask")
            return np.ones((batch, steps, span), bool)
        tails = [(steps, span), (1, steps, span), (batch, steps, span), (1, 1, steps, span), (batch, 1, steps, span)]
        need(tuple(mask.shape) in tails, f"attn_mask {mask.shape} is not (B, 1, {steps}, {span}) or a shorter form")
        need(self.precise in (2, 3), "a mask of one's own with Q_S > 1 asks for inner_precise 2 or 3")
        return np.broadcast_to(self._check_mask(mask).reshape(-1, steps, span), (batch, steps, span))

    def _attend(self, query, key, value, allowed, dim):
        batch, steps, _ = query.shape
        group = self.heads // self.kv_heads
        q = query.reshape(batch, steps, self.kv_heads, group, dim)
        k = key.reshape(batch, -1, self.kv_heads, dim)
        v = value.reshape(batch, -1, self.kv_heads, dim)
        scores = np.einsum("bsngd,btnd->bngst", q, k, optimize=True) * np.float32(self.scale)
        scores = np.where(allowed[:, None, None], scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
        weights /= np.maximum(weights.sum(-1, keepdims=True), np.finfo(np.float32).tiny)
        out = np.einsum("bngst,btnd->bsngd", weights, v, optimize=True)
        return out.reshape(query.shape).astype(np.float32)


class ReshapeAndCache:
    """Caches [blocks, block_size, H] or [blocks, block_size, N, D], written in place."""

    def __call__(self, key, value=None, key_cache=None, value_cache=None, slot_mapping=None):
        need(slot_mapping is not None and key_cache is not None, "key_cache and slot_mapping are required")
        need(slot_mapping.dtype == ms.int32, f"slot_mapping is {slot_mapping.dtype}, not int32")
        need(slot_mapping.ndim == 1, f"slot_mapping {slot_mapping.shape} is not 1-D")
        slots = values(slot_mapping)
        for rows, cache in ((key, key_cache), (value, value_cache)):
            need((rows is None) == (cache is None), "a cache without rows, or rows without a cache")
            if cache is None:
                continue
            need(
                rows.dtype in (*HALF, ms.int8, ms.uint8), f"rows are {rows.dtype}; float16, bfloat16 or 8-bit are taken"
            )
            need(cache.dtype == rows.dtype, f"a cache of {cache.dtype} for rows of {rows.dtype}")
            need(rows.ndim == 2, f"rows {rows.shape} are not [T, H]")
            need(cache.ndim in (3, 4), f"cache {cache.shape} is not [blocks, block_size, H]")
            need(
                int(np.prod(cache.shape[2:])) == rows.shape[1], f"rows {rows.shape} do not fit the cache {cache.shape}"
            )
            need(len(slots) == rows.shape[0], f"{len(slots)} slots for {rows.shape[0]} rows")
            need((slots >= 0).all(), "a negative slot: what it does is not documented")
            need((slots < cache.shape[0] * cache.shape[1]).all(), "a slot beyond the cache")
            owned = slots[slots >= cache.shape[1]]
            need(len(np.unique(owned)) == len(owned), "two rows for one slot (other than those of the null block)")
            held = values(cache).reshape(-1, rows.shape[1]).copy()
            held[slots] = values(rows)
            cache.set_data(ms.Tensor(held.reshape(cache.shape)).astype(cache.dtype))
        return key


class RmsNorm:
    """Over the trailing dimensions that gamma spans; computed in float32."""

    def __init__(self, epsilon=1e-6):
        need(0 < epsilon <= 1, f"epsilon {epsilon} is not within (0, 1]")
        self.epsilon = epsilon

    def __call__(self, x, gamma):
        need(x.dtype in (*HALF, ms.float32), f"x is {x.dtype}")
        need(gamma.dtype == x.dtype, f"gamma is {gamma.dtype}, x is {x.dtype}")
        need(gamma.ndim <= x.ndim and tuple(x.shape)[-gamma.ndim :] == tuple(gamma.shape), "gamma does not fit x")
        axes = tuple(range(x.ndim - gamma.ndim, x.ndim))
        held = values(x)
        rstd = 1 / np.sqrt(np.square(held).mean(axes, keepdims=True) + np.float32(self.epsilon))
        return ms.Tensor(held * rstd * values(gamma)).astype(x.dtype), ms.Tensor(rstd.astype(np.float32))


class Swiglu:
    """silu of the first half times the second half."""

    def __call__(self, input, dim=-1):
        need(input.dtype in (*HALF, ms.float32), f"input is {input.dtype}")
        need(input.shape[dim] % 2 == 0, f"input {input.shape} cannot be halved along {dim}")
        gate, up = np.split(values(input), 2, axis=dim)
        return ms.Tensor(gate / (1 + np.exp(-gate)) * up).astype(input.dtype)


class PagedAttention:
    """One row a query token; the tokens of a request stand together, ``q_seq_lens`` of them.

    With more than one for any request the mask is added to the scores and nothing else keeps a token from the keys
    behind it; otherwise there is no mask, whatever is given.
    """

    def __init__(
        self, head_num, scale_value, kv_head_num, kv_cache_quant_mode="DEFAULT", mask_mode="MASK_DEFAULT", mla_v_dim=0
    ):
        need(kv_cache_quant_mode == "DEFAULT" and mask_mode == "MASK_DEFAULT" and not mla_v_dim, "a mode not emulated")
        need(head_num % kv_head_num == 0, "head_num is no multiple of kv_head_num")
        self.heads, self.scale, self.kv_heads = head_num, scale_value, kv_head_num

    def __call__(
        self,
        query,
        key_cache,
        value_cache=None,
        block_tables=None,
        context_lens=None,
        antiquant_scale=None,
        antiquant_offset=None,
        attn_mask=None,
        q_seq_lens=None,
        alibi_mask=None,
    ):
        unused = [antiquant_scale, antiquant_offset, alibi_mask]
        need(all(x is None for x in unused), "an argument that is not emulated was given")
        need(query.dtype in HALF, f"query is {query.dtype}; float16 or bfloat16 are taken")
        need(key_cache.dtype == value_cache.dtype == query.dtype, "query and caches have different dtypes")
        need(query.ndim == 2 and query.shape[1] % self.heads == 0, f"query {query.shape} is not [T, heads * dim]")
        tokens, dim = query.shape[0], query.shape[1] // self.heads
        need(key_cache.shape == value_cache.shape, "the caches differ in shape")
        need(tuple(key_cache.shape[2:]) == (self.kv_heads, dim), f"cache {key_cache.shape} is not [.., .., kv, dim]")
        for name, given in (("block_tables", block_tables), ("context_lens", context_lens), ("q_seq_lens", q_seq_lens)):
            need(given is not None and given.dtype == ms.int32, f"{name} has to be int32")
        tables, lengths, steps = values(block_tables), values(context_lens), values(q_seq_lens)
        need(tables.ndim == 2 and lengths.shape == steps.shape == tables.shape[:1], "one row and length a request")
        need(steps.sum() == tokens and (steps >= 1).all(), f"q_seq_lens {steps} are not of {tokens} query tokens")
        blocks, block_size = key_cache.shape[:2]
        need((lengths >= steps).all(), f"context_lens {lengths} are less than q_seq_lens {steps}")
        need((lengths <= tables.shape[1] * block_size).all(), f"context_lens {lengths} leave the block table")
        hidden = np.zeros((tokens, lengths.max()), np.float32)
        if (steps > 1).any():
            need(attn_mask is not None, "several query tokens without a mask see each other's future")
            need(attn_mask.dtype == query.dtype, f"attn_mask is {attn_mask.dtype}, query is {query.dtype}")
            need(attn_mask.ndim == 2 and attn_mask.shape[0] == tokens, f"attn_mask {attn_mask.shape} is not [T, S]")
            need(attn_mask.shape[1] >= lengths.max(), f"attn_mask covers {attn_mask.shape[1]} keys of {lengths.max()}")
            hidden = values(attn_mask)
        out, first = np.zeros((tokens, self.heads, dim), np.float32), 0
        rows, keys, vals = values(query).reshape(tokens, self.heads, dim), values(key_cache), values(value_cache)
        for table, length, step in zip(tables, lengths, steps):
            used = table[: -(-length // block_size)]
            need(((used >= 0) & (used < blocks)).all(), "block_tables names a block outside the cache")
            k, v = (x[used].reshape(-1, self.kv_heads, dim)[:length] for x in (keys, vals))
            part = slice(first, first + step)
            q = rows[part].reshape(step, self.kv_heads, -1, dim)
            scores = np.einsum("sngd,tnd->sngt", q, k) * np.float32(self.scale) + hidden[part, None, None, :length]
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[part] = np.einsum("sngt,tnd->sngd", weights, v).reshape(step, self.heads, dim)
            first += step
        return ms.Tensor(out.reshape(query.shape)).astype(query.dtype)


class ApplyRotaryPosEmb:
    """cos_format 2 only: pairs (i, i + D/2) turn by angles that are given for each row."""

    def __init__(self, cos_format=0):
        need(cos_format == 2, f"cos_format {cos_format}: only 2 is emulated")

    def __call__(self, query, key, cos, sin, position_ids):
        need(query.dtype in HALF, f"query is {query.dtype}; float16 or bfloat16 are taken")
        need(query.dtype == key.dtype == cos.dtype == sin.dtype, "query, key, cos and sin have different dtypes")
        need(query.ndim == key.ndim == 2, f"query {query.shape} and key {key.shape} are not [T, H]")
        need(cos.shape == sin.shape and cos.ndim == 2, f"cos {cos.shape} and sin {sin.shape} are not [T, D]")
        need(cos.shape[0] == query.shape[0] == key.shape[0], "one row of angles for each row")
        need(position_ids.dtype == ms.int32 and position_ids.ndim == 1, "position_ids is not int32 [n]")
        return tuple(self._turned(x, values(cos), values(sin)) for x in (query, key))

    @staticmethod
    def _turned(x, cos, sin):
        rows, dim = values(x), cos.shape[1]
        need(rows.shape[1] % dim == 0, f"rows of {rows.shape[1]} are no multiple of {dim}")
        heads = rows.reshape(len(rows), -1, dim)
        other = np.concatenate([-heads[..., dim // 2 :], heads[..., : dim // 2]], -1)
        return ms.Tensor((heads * cos[:, None] + other * sin[:, None]).reshape(rows.shape)).astype(x.dtype)
