"""What requests change in their logits, and log-probabilities, in plain MindSpore operators for every device.

Float32, row by row. ``shaping`` and ``asked`` are described in :mod:`ms_spec.models.ops.interface`.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from ms_spec.models.ops.constants import numbers
from ms_spec.models.ops.plain_rows import at_cells

_INF = float("inf")


def _context(history, slot, tokens, start):
    """int32 [n, L]: the id at each position of each request, as far as this step knows it."""
    known, width = ops.gather(history, slot, 0), tokens.shape[1]
    column = numbers(known.shape[1]) - start.reshape(-1, 1)
    new = ops.gather_elements(tokens, 1, ops.clamp(column, 0, width - 1).astype(ms.int32))
    inside = ops.logical_and(column >= 0, column < width)
    return ops.select(inside, new, known)


class Shape(nn.Cell):
    """(logits float32 [R, V], rows, shaping) -> float32 [R, V]: what each request wants its logits to be.

    The request's row of ``bias`` is added. The logit of an id that stands in the prompt or has been generated is
    divided by the repetition penalty if it is positive and multiplied by it otherwise; the frequency penalty is taken
    from it for each time that the id has been generated, the presence penalty once if it has been at all. The drafts in
    front of a row count as generated. Last, the final ids of bad words become -inf where the ids in front of them have
    just been generated.
    """

    def construct(self, logits, rows, shaping):
        penalties, asked, bias, bad_words, history, slot, tokens, start = shaping
        request, position = rows[2], rows[1].reshape(-1, 1)
        own_slot, own = ops.gather(slot, request, 0), ops.gather(asked, request, 0)
        added = ops.gather(bias, own_slot, 0)
        x = logits + ops.select(own[:, 1:2] > 0, added, ops.zeros_like(added))
        context = _context(history, slot, tokens, start)
        counts = self.committed(context, start, asked[:, :1], x.shape[1])
        counts = ops.gather(counts, request, 0)
        new, first = ops.gather(tokens, request, 0), ops.gather(start, request, 0).reshape(-1, 1)
        x = self.penalised(x, counts, new, first, position, own[:, :1], ops.gather(penalties, request, 0))
        words, context = ops.gather(bad_words, own_slot, 0), ops.gather(context, request, 0)
        return self.without_bad_words(x, words, context, position, own[:, :1], own[:, 2:3])

    def committed(self, context, start, prompt, vocab):
        """How often each id stands in front of the step's tokens, [n, 2 (V + 1)]: in the output, then in the prompt."""
        place, width = numbers(context.shape[1]), vocab + 1  # the last of each half takes what does not count
        index = ops.select(place < start.reshape(-1, 1), context, ops.full_like(context, vocab))
        index = index + (place < prompt).astype(ms.int32) * width
        counts = ops.zeros((context.shape[0], 2 * width), ms.float32)
        return ops.tensor_scatter_elements(counts, index, ops.ones_like(index).astype(ms.float32), 1, "add")

    def penalised(self, x, counts, new, first, position, prompt, penalties):
        vocab, width = x.shape[1], x.shape[1] + 1
        place = first + numbers(new.shape[1])
        seen = ops.logical_and(place <= position, new >= 0)  # each row sees the step's tokens up to its own
        index = ops.select(seen, new, ops.full_like(new, vocab)) + (place < prompt).astype(ms.int32) * width
        counts = ops.tensor_scatter_elements(counts, index, ops.ones_like(index).astype(ms.float32), 1, "add")
        times, in_prompt = counts[:, :vocab], counts[:, width : width + vocab]
        repetition, frequency, presence = penalties[:, 0:1], penalties[:, 1:2], penalties[:, 2:3]
        weaker = ops.select(x > 0, x / repetition, x * repetition)
        x = ops.select(times + in_prompt > 0, weaker, x)
        return x - frequency * times - presence * (times > 0).astype(ms.float32)

    def without_bad_words(self, x, words, context, position, prompt, count):
        vocab, length = x.shape[1], words.shape[2]
        ahead, last = words[:, :, : length - 1], words[:, :, length - 1]
        place = position - (length - 2) + numbers(length - 1)
        recent = ops.gather_elements(context, 1, ops.clamp(place, 0, context.shape[1] - 1).astype(ms.int32))
        recent = ops.select(place >= prompt, recent, ops.full_like(recent, -2)).expand_dims(1)
        same = ops.logical_or(ahead < 0, ahead == recent).all(2)
        banned = ops.logical_and(same, ops.logical_and(numbers(words.shape[1]) < count, last >= 0))
        return without(x, ops.select(banned, last, ops.full_like(last, vocab)))


def without(x, ids):
    """x float32 [R, V] with -inf at ids int32 [R, B]; V stands for none."""
    spare = ops.zeros((x.shape[0], x.shape[1] + 1), ms.float32)  # the last column takes what is no id
    spare = ops.tensor_scatter_elements(spare, ids, ops.ones_like(ids).astype(ms.float32), 1)
    return x.masked_fill(spare[:, : x.shape[1]] > 0, -_INF)


class Logprobs(nn.Cell):
    """(logits float32 [R, V], rows, tokens int32 [n, w], asked int32 [n, A]) -> float32 [n, w, 2 + 2 N].

    Of each cell whose request has ``asked[:, column]`` set: the natural logarithm of the probability that the model
    gives its token, at temperature 1 and with nothing changed; how many ids are at least as likely; the N = ``most``
    most likely ids (all, if there are fewer), and the logarithms of their probabilities. Other cells mean nothing.
    """

    def __init__(self, most: int, column: int) -> None:
        super().__init__()
        del column  # asked for or not, the work is the same
        self.most = most

    def construct(self, logits, rows, tokens, asked):
        n, w = tokens.shape
        most = min(self.most, logits.shape[1])
        top = ops.amax(logits, 1, keepdims=True)
        total = ops.exp(logits - top).sum(1, keepdims=True)
        # The CPU's log has other bits for what is left over after whole vectors, so each row gets a whole one.
        total = ops.log(ops.broadcast_to(total, (total.shape[0], 16)))[:, :1]
        token = ops.maximum(ops.gather(tokens.reshape(-1), rows[3], 0), 0).reshape(-1, 1)
        own = ops.gather_elements(logits, 1, token)
        rank = (logits >= own).astype(ms.float32).sum(1, keepdims=True)
        found: tuple = (own - top - total, rank)
        if most:
            values, ids = ops.topk(logits, most)
            found = (*found, ids.astype(ms.float32), values - top - total)
        return at_cells(ops.cat(found, 1), rows, n * w, 0.0).reshape(n, w, 2 + 2 * most)
