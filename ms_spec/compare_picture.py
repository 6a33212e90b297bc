"""A comparison as a picture: how much faster each method is, and how far its drafts are accepted."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

from ms_spec.comparison import Figures, baseline_of
from ms_spec.errors import ConfigError

DPI = 150
# Okabe and Ito's colours, which people with colour blindness can tell apart; plain decoding is grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#B8A800", "#000000")
MARKERS = "osD^vPX"
GREY = "#8C8C8C"
ROOM = 1.3
"""Of the longest bar: what the axis of speed-ups has beside it for the numbers."""


def require_matplotlib() -> None:
    """Raises ConfigError where there is no matplotlib that works."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"--plot: needs matplotlib ({reason}); run: pip install 'matplotlib>=3.9,<4', or leave --plot out"
        ) from None


def size(count: int) -> tuple[int, int]:
    """Width and height in pixels of the picture of ``count`` methods."""
    return 12 * DPI, round(max(4.5, 2.0 + 0.45 * count) * DPI)


def draw(title: str, subtitle: str, figures: Sequence[Figures]) -> Any:
    """A matplotlib Figure, whatever the user's own settings of matplotlib are."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    base = baseline_of([one.method for one in figures])
    drafting = [one.method.name for one in figures if one.method.config is not None]
    looks = {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(drafting)}
    width, height = size(len(figures))
    with style.context("default"):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, layout=layout)
        FigureCanvasAgg(figure)
        figure.suptitle(f"{title}\n{subtitle}", fontsize=12, parse_math=False)
        left, right = figure.subplots(1, 2)
        _speed(left, figures, looks, base.name)
        _positions(right, figures, looks)
    return figure


def _speed(axes: Any, figures: Sequence[Figures], looks: dict[str, tuple[str, str]], base: str) -> None:
    """Bars of the speed-up, the first method on top."""
    values = [one.speedup or 0.0 for one in figures]
    names = [one.method.name for one in figures]
    axes.axvline(1, color="0.4", linewidth=1, linestyle="--", zorder=1)
    bars = axes.barh(
        range(len(figures)), values, 0.62, color=[looks.get(name, (GREY, ""))[0] for name in names], zorder=2
    )
    labels = ["nothing decoded" if one.speedup is None else f"{one.speedup:.2f}x" for one in figures]
    speeds = ["" if one.speedup is None else f"\n{one.tokens_per_second:.1f} tokens/s" for one in figures]
    background = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.bar_label(bars, labels, padding=5, fontsize=11, bbox=background, zorder=3)
    axes.set_yticks(range(len(figures)), map("".join, zip(names, speeds)), fontsize=10)
    axes.set_ylim(len(figures) - 0.4, -0.6)
    axes.set_xlim(0, max(*values, 1.0) * ROOM)
    axes.set_xlabel(f"speed-up over {base}, decode phase", fontsize=10)
    axes.set_title("Speed", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _positions(axes: Any, figures: Sequence[Figures], looks: dict[str, tuple[str, str]]) -> None:
    """Lines of the share of drafts that were accepted, by position."""
    axes.set_title("Acceptance by draft position", fontsize=11)
    axes.set_ylim(-0.04, 1.04)
    axes.set_yticks([i / 5 for i in range(6)], [f"{20 * i}%" for i in range(6)])
    axes.set_xlabel("position in the draft", fontsize=10)
    axes.set_ylabel("accepted, of the steps with drafts", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    longest = 1
    for one in figures:
        rates = one.metrics.acceptance_rate_per_position
        if rates:
            colour, marker = looks[one.method.name]
            axes.plot(
                range(1, len(rates) + 1),
                rates,
                color=colour,
                marker=marker,
                markersize=6,
                linewidth=1.8,
                label=one.method.name,
                clip_on=False,
            )
            longest = max(longest, len(rates))
    axes.set_xlim(0.7, longest + 0.3)
    axes.set_xticks(range(1, longest + 1, -(-longest // 12)))
    if axes.lines:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=10)
    else:
        axes.text(0.5, 0.5, "nothing was drafted", transform=axes.transAxes, ha="center", va="center", color="0.4")
        axes.set_xticks([])


def png(title: str, subtitle: str, figures: Sequence[Figures]) -> bytes:
    """The picture as a PNG of :func:`size`."""
    from matplotlib import style

    out = io.BytesIO()
    with style.context("default"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a model's name in letters the font lacks
        draw(title, subtitle, figures).savefig(out, format="png", dpi=DPI)
    return out.getvalue()
