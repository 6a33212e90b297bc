"""The shapes that graphs are compiled for: batches of n requests, of w = K + 1 columns. Imports no MindSpore."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ms_spec.models.ops.limits import MAX_WIDTH


def _powers_of_two(last: int) -> tuple[int, ...]:
    """1, 2, 4, ... and ``last`` itself."""
    return tuple(sorted({1 << i for i in range(last.bit_length()) if 1 << i <= last} | {last}))


@dataclass(frozen=True)
class Buckets:
    """Batch sizes and widths, each ascending. Every pair of them is one graph."""

    batches: tuple[int, ...]
    widths: tuple[int, ...]

    @classmethod
    def for_device(
        cls,
        device: str,
        max_num_seqs: int,
        num_speculative_tokens: int,
        capture_sizes: Sequence[int] | None = None,
        variable_width: bool = False,
    ) -> Buckets:
        """The buckets of a configuration.

        On CPU dead rows cost nothing, so the extremes suffice. On Ascend they are computed: powers of two.

        Args:
            device: "CPU" or "Ascend".
            max_num_seqs: most requests in a step.
            num_speculative_tokens: K; 0 without speculation.
            capture_sizes: rows (requests x (K + 1)) of each batch, instead of the default. The largest batch is
                added when they do not reach it, and sizes beyond the first that does are left out.
            variable_width: drafts vary in length, so that widths between 1 and K + 1 are worth a graph (Ascend).

        Raises:
            ValueError: K + 1 is beyond what Ascend takes, or a capture size is no multiple of K + 1.
        """
        width = num_speculative_tokens + 1
        ascend = device.lower() == "ascend"
        if ascend and width > MAX_WIDTH:
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens}: Ascend verifies at most {MAX_WIDTH} tokens "
                f"of a request at once; use {MAX_WIDTH - 1} or fewer"
            )
        if capture_sizes is not None:
            batches = _from_capture_sizes(capture_sizes, width, max_num_seqs)
        else:
            batches = _powers_of_two(max_num_seqs) if ascend else tuple(sorted({1, max_num_seqs}))
        between = _powers_of_two(width) if ascend and variable_width else ()
        return cls(batches, tuple(sorted({1, width, *between})))

    def pick(self, n: int, w: int) -> tuple[int, int]:
        """The smallest bucket that holds n requests of w columns.

        Raises:
            ValueError: none does.
        """
        i, j = bisect_left(self.batches, n), bisect_left(self.widths, w)
        if i == len(self.batches) or j == len(self.widths):
            raise ValueError(
                f"{n} requests of {w} tokens are more than the largest bucket, {self.batches[-1]} of {self.widths[-1]}"
            )
        return self.batches[i], self.widths[j]


def _from_capture_sizes(sizes: Sequence[int], width: int, max_num_seqs: int) -> tuple[int, ...]:
    if not sizes:
        raise ValueError("cudagraph_capture_sizes=[]: name at least one size, or leave the field out")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % width:
            below = int(size) // width * width if isinstance(size, (int, float)) else 0
            nearest = f"{below} or {below + width}" if below > 0 else f"{width}"
            raise ValueError(
                f"cudagraph_capture_sizes={list(sizes)}: {size!r} is no positive multiple of "
                f"num_speculative_tokens + 1 = {width}; the nearest is {nearest}"
            )
    batches = sorted({size // width for size in sizes} | {max_num_seqs})
    # A graph beyond the first that holds everybody would never run.
    return tuple(batches[: bisect_left(batches, min(b for b in batches if b >= max_num_seqs)) + 1])
