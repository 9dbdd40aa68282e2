"""Loss and accuracy over the steps, as the picture that goes into the model card."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def draw_curves(lines: Sequence[dict[str, Any]], place: str) -> None:
    """Draw the lines of ``metrics.jsonl``, of training and of every evaluation set, into a PNG."""
    # no pyplot: it would keep a window system and global state
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        _draw(axes, lines, metric)
    figure.savefig(place, dpi=110)


def _draw(axes: Axes, lines: Sequence[dict[str, Any]], metric: str) -> None:
    names = {name: None for line in lines for name in line if name.split("_")[-1] == metric}
    for name in names:
        points = [(line["step"], line[name]) for line in lines if name in line]
        # evaluations are few: a mark each
        style = "o-" if name.startswith("eval_") else "-" if len(points) > 1 else "o"
        axes.plot(*zip(*points, strict=True), style, label=name, linewidth=1.2, markersize=3.5)
    axes.set_xlabel("step")
    axes.set_title(metric)
    axes.grid(alpha=0.3)
    if names:
        axes.legend(frameon=False)
