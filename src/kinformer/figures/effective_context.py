"""The relative gain of each step to a longer context, the picture behind a relative effective context length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kinformer.evaluation.recl import THRESHOLD, Recl
from kinformer.figures.style import FAINT, QUIET, SERIES, bare, figure, save, spread


def plot(names: Sequence[str], contexts: Sequence[int], curves: Sequence[Recl], path: Path) -> None:
    """Draw the gain in percent of perplexity against the context that a step
    leads to, one line per model; PNG or SVG."""
    with figure(6.4, 4.0) as drawn:
        axes = drawn.subplots()
        bare(axes, "left", "bottom")
        axes.grid(axis="y", color=FAINT, linewidth=0.7)
        axes.axhline(100 * THRESHOLD, color=QUIET, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.annotate(
            "least gain that counts", (contexts[-1], 100 * THRESHOLD), (0, 2), textcoords="offset points", color=QUIET,
            ha="right", va="bottom", fontsize=7.5,
        )  # fmt: skip
        for index, curve in enumerate(curves):
            gains = [100 * gain for gain in curve.gains]
            axes.plot(contexts[1:], gains, color=SERIES[index % len(SERIES)], linewidth=1.6, marker="o", markersize=3)
        axes.set_xlabel("context (tokens)")
        axes.set_ylabel("gain over one step shorter (% of perplexity)")
        low, high = axes.get_ylim()
        heights = [(100 * item.gains[-1] - low) / (high - low) for item in curves]
        for index, (name, curve, height) in enumerate(zip(names, curves, spread(heights, 0.055), strict=True)):
            axes.annotate(
                f"{name}: RECL {'at least ' if curve.at_least else ''}{curve.length}",
                (1.02, height),
                xycoords="axes fraction",
                color=SERIES[index % len(SERIES)],
                va="center",
            )
        drawn.tight_layout()
        save(drawn, path)
