"""The device operations that networks are written in.

A backend is a namespace of Cells with the names below. Each Cell owns its parameters in the layout that its device
likes and says in ``weights`` where they come from. All of them work on *rows*: R = n * w rows, one a token, n
requests of w columns. ``Rows`` makes the bundle ``rows`` that the other Cells take:

====  =============  ======================================================================================
 0    token          int32 [R]
 1    position       int32 [R], absolute
 2    request        int32 [R], 0 .. n-1
 3    cell           int32 [R], request * w + column: where the row stands in the [n, w] grid
 4    count          int32 [1]: rows from here on are dead
 5    block_tables   int32 [n, B]
 6..  the backend's own, among them what each row may look at
====  =============  ======================================================================================

Backends that compact put the live rows first; the others leave each row at its cell and set ``count`` to R.

What requests ask of their logits before they are sampled from comes as another bundle, ``shaping``:

====  =============  ======================================================================================
 0    penalties      float32 [n, 3]: repetition (1: none), frequency, presence (0: none)
 1    asked          int32 [n, A], a column for each of ``ASKED``
 2    bias           float32 [S, V], by slot: what is added where ``asked`` says so; -inf forbids an id
 3    bad_words      int32 [S, W, M], by slot: ids at the end of M places, -1 in front of them
 4    history        int32 [S, L], by slot: the ids at positions below ``start``
 5    slot           int32 [n]
 6    tokens         int32 [n, w]: the ids at the positions from ``start`` on, -1: none
 7    start          int32 [n]
====  =============  ======================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

ASKED = ("num_prompt_tokens", "biased", "num_bad_words", "logprobs", "prompt_logprobs")
"""What each column of ``asked`` says: a number, or 1 for yes."""


@dataclass(frozen=True)
class Geometry:
    """Shape of one attention layer and of its paged cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    max_len: int
    rms_norm_eps: float
    qk_norm: bool

    @property
    def qkv(self) -> int:
        """Width of a row's queries, keys and values together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class Backend(Protocol):
    """Constructors of the operations. ``dtype`` is how weights are stored; activations are the backend's choice."""

    name: str
    host_bounds: bool
    """True where attention lengths are read by the host at launch, so that ``Rows`` needs upper bounds from it."""
    chunks: tuple[int, ...]
    """Prompt lengths, rising, that are worth a prefill graph; longer prompts take several calls."""

    def Rows(self, max_len: int, block_size: int) -> Any:
        """(tokens int32 [n, w] (-1: none), start int32 [n], block_tables int32 [n, B], bounds int32 [R],
        end int32 [n] = max_len) -> rows.

        Rows at positions from ``end`` on are dead, as if they had no token; it is at most max_len.
        ``bounds``: where ``host_bounds``, upper bounds of the number of positions that each row looks at.
        """

    def Block(self) -> Any:
        """(rows) -> rows, in which every live row sees the positions up to its request's last live row in this grid.

        So all rows of a request in one grid see each other, and what was cached before them.
        """

    def TakeRows(self) -> Any:
        """(x [R, H], rows, cells int32 [n2, w2], to_rows) -> [R2, H], R2 = n2 * w2: rows moved to another grid.

        Live row r of ``to_rows`` gets the row of x that stands at cell ``cells.flat[to_rows.cell[r]]`` of the first
        grid, or zeros where that cell is dead, or is none (below 0, or R and more). Dead rows may hold anything.
        """

    def Embedding(self, vocab: int, hidden: int, dtype: str) -> Any:
        """(rows) -> float [R, hidden]."""

    def Norm(self, size: int, eps: float, tied: Any = None) -> Any:
        """(x [R, size], rows) -> [R, size]: RMS norm. ``weights(source)`` reads ``source.weight``.

        ``tied``: a NormLinear whose norm it is, too.
        """

    def Linear(self, out: int, inner: int, dtype: str, bias: bool = False, tied: Any = None) -> Any:
        """(x [R, inner], rows) -> [R, out]: a linear map. ``weights(*sources)``: their ``.weight`` and ``.bias``.

        ``tied``: an Embedding, NormLinear or Linear whose matrix it shares.
        """

    def NormLinear(self, out: int, hidden: int, eps: float, dtype: str, bias: bool = False, tied: Any = None) -> Any:
        """(x [R, hidden], rows) -> [R, out]: RMS norm, then a linear map.

        ``tied``: an Embedding, NormLinear or Linear whose matrix it shares.
        """

    def Head(self, out: int, hidden: int, eps: float, dtype: str, bias: bool = False, tied: Any = None) -> Any:
        """(x [R, hidden], rows) -> logits [R, out]: a NormLinear to the whole vocabulary."""

    def NormGatedLinear(self, out: int, hidden: int, eps: float, dtype: str, bias: bool = False) -> Any:
        """(x [R, hidden], rows) -> [R, out]: RMS norm, then silu(gate) * up."""

    def LinearAdd(self, out: int, inner: int, dtype: str, bias: bool = False) -> Any:
        """(x [R, inner], residual [R, out], rows) -> [R, out]: a linear map added to the residual."""

    def Attention(self, geometry: Geometry, cos: Any, sin: Any) -> Any:
        """(qkv [R, (heads + 2 kv_heads) * head_dim], rows) -> [R, heads * head_dim].

        Norms q and k where the geometry says so, rotates them, writes k and v to the cache, attends to all positions
        up to the row's own (after ``Block``: to the request's last). Owns ``k_cache`` and ``v_cache``. Its method
        ``writer()`` makes a Cell (kv [R, 2 kv_heads * head_dim], rows) -> int32 [1] (the number of rows) that does
        the same to keys and values, in the same caches, and attends to nothing; only for an Attention that stands
        alone, see ``Writer`` for fused layers.
        """

    def fuse(self, layers: list[Any], total: Callable[[], Any] | None = None) -> list[Any]:
        """Cells that do what the decoder layers do, all of one shape, in fewer operations where that is faster.

        Layers are called with (x, rows), or, where ``qkv`` has no norm, with (z, residual, rows). ``total``: makes what
        adds up the workers' parts of a layer's half, (part [R, H], residual [R, H], rows) -> [R, H]; None: there is one
        worker.
        """

    def join(self, layers: list[Any]) -> Any:
        """(x [R, hidden], rows) -> [R, hidden]: neighbours of one ``fuse`` in turn, in fewer operations where
        that is faster. Weights are theirs."""

    def AddParts(self) -> Any:
        """(parts [N * R, M], residual [R, M], rows) -> [R, M]: the sum of N workers' rows, in the order of the workers
        and in float32, then the residual."""

    def JoinParts(self, size: int, width: int) -> Any:
        """(parts [N * R, M], rows) -> [R, width]: the columns of N = ``size`` workers beside each other, the first
        ``width`` <= N * M of them."""

    def Writer(self, layers: list[Any]) -> Any:
        """(kv [R, L * 2 kv_heads * head_dim], rows) -> int32 [1]: the ``writer()`` of L layers at once.

        ``layers``: all that one ``fuse`` gave.
        """

    def Pick(self) -> Any:
        """(x [R, H], rows) -> (x [1, H], rows): the last live row of a prefill chunk, as rows of their own."""

    def WriteHistory(self) -> Any:
        """(history int32 [S, L], slot [n], start [n], tokens [n, w], count [n]) -> length int32 [n] = start + count.

        Writes ``tokens`` to ``history[slot, start:]`` in place. What stands at or behind ``length`` means nothing.
        """

    def ReadCarry(self) -> Any:
        """(history int32 [S, L], carry int32 [S, 1 + K] by slot: how many ids of ``history`` count, and the drafts of
        those that follow (-1: none), slot int32 [n], tokens int32 [n, w], start int32 [n], carried int32 [n], uniforms
        float32 [n, w + K]) -> tokens, start, uniforms of the same shapes.

        Where ``carried`` is 0 they are what they were. Elsewhere ``start`` becomes the place of the last id that
        counts, ``tokens`` that id and its drafts, as many as there were tokens, and the w uniforms that are for
        ``start`` and behind it come first. Ids at positions from L - 1 on become -1.
        """

    def Probs(self) -> Any:
        """(logits [R, V], rows, sampling [n, 4], banned [n, E], banned_until [n], shaping = None) -> float32 [R, V]."""

    def Argmax(self) -> Any:
        """(logits [R, V], rows) -> int32 [n, w]: the lowest id of the largest logit.

        -1 in dead cells, and for rows with a NaN, a +inf or nothing but -inf.
        """

    def InverseCDF(self) -> Any:
        """(p [R, V], rows, u [n, w]) -> int32 [n, w]; -1 in dead cells and where p sums to 0."""

    def Match(self, width: int) -> Any:
        """(logits [R, V], rows, drafts [n, w - 1], sampling [n, 4], banned [n, E], banned_until [n], u [n, w],
        shaping = None) -> (emitted int32 [n, w] (-1 behind the end), num_emitted int32 [n], num_accepted int32 [n]).

        Draws a token for each of the w = ``width`` columns by its u, and keeps drafts as long as they are those tokens.
        """

    def Logprobs(self, most: int, column: int) -> Any:
        """(logits [R, V], rows, tokens int32 [n, w], asked int32 [n, A]) -> float32 [n, w, 2 + 2 N], N = min(most, V).

        Of each cell whose request has ``asked[:, column]`` set and that has a token: its log-probability by the logits
        as they are, its rank, and the N most likely ids with their log-probabilities.
        """

    def Entropy(self) -> Any:
        """(logits [R, V], rows) -> float32 [n, w], nats."""

    def Grid(self) -> Any:
        """(x [R, V], rows) -> [n, w, V]; zeros in dead cells."""

    def NgramLookup(self, min_n: int, max_n: int, num_drafts: int) -> Any:
        """(history int32 [S, L], slot [n], length [n], limit [n]) -> (drafts int32 [n, K], counts int32 [n])."""

    def Stamp(self) -> Any:
        """(x int32) -> (x, int32 [2]): x, and when it passed: seconds modulo 2^31 and nanoseconds of a monotonic clock.

        The clock is CLOCK_MONOTONIC on the cpu backend; the others return zeros.
        """
