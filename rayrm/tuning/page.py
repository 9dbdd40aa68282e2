"""A sweep as one page that a browser opens without a network: figures, and a row a trial."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rayrm.config.schema import Distribution, LogUniform, SearchSection
from rayrm.training.storage import RunFolder
from rayrm.training.tracking import METRICS

PAGE = "report.html"
_COLOURS = "viridis"
_FEWEST = 6
"""A parabola goes through any three trials; importance is told from so many on."""
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em }
table { border-collapse: collapse; font-size: 13px }
td, th { padding: .25em .8em; text-align: left }
tr:nth-child(even) { background: #f4f4f4 } tr.best { font-weight: bold }
svg { max-width: 100%; height: auto }
.fine { color: #555; font-size: 13px }
"""
Row = Mapping[str, Any]


def write_page(folder: Path, search: SearchSection, rows: Sequence[Row], *, best: str) -> None:
    """Write ``report.html``.

    Args:
        folder: the sweep's.
        search: what was tried, and how it is judged.
        rows: of ``trials.csv``; at least one has a finite metric.
        best: name of the best trial.
    """
    judged = [row for row in rows if _is_number(row[search.metric])]
    judged.sort(key=lambda row: row[search.metric], reverse=search.mode == "max")
    rest = [row for row in rows if row not in judged]
    figures = [
        ("Every trial", _parallel(search, judged)),
        (f"{search.metric} over the steps", _over_steps(search, judged)),
        (f"Each field against {search.metric}", _against(search, judged)),
    ]
    shares = importance(search, judged)
    if shares:
        figures.append(("What mattered", _bars(shares)))
    sections = [f"<h2>{escape(title)}</h2>\n{_as_svg(figure)}" for title, figure in figures]
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(folder.name)}</title>
<style>{_STYLE}</style></head><body>
<h1>{escape(folder.name)}</h1>
<p>{len(rows)} trials; {escape(search.metric)}, {search.mode} is better; the best is
{escape(best)}. A trial that was stopped stands at its last evaluation.</p>
{chr(10).join(sections)}
<p class="fine">What mattered: the share of the variance of {escape(search.metric)} that a parabola
through a field's ranks explains, or the means of its values where they have no order; told from
{_FEWEST} trials on. With few trials it is a hint, and shares of fields add up to no whole.</p>
<h2>Trials</h2>
{_table(search, [*judged, *rest], best)}
</body></html>
"""
    RunFolder(str(folder)).write_text(PAGE, page)


def importance(search: SearchSection, rows: Sequence[Row]) -> dict[str, float]:
    """Return for each field the share of the metric's variance that it explains alone.

    Where values have an order, that is the coefficient of determination of a parabola in their
    ranks, so that an optimum in the middle counts; else that of the means by value.
    """
    metric = np.array([row[search.metric] for row in rows], dtype=float)
    if len(rows) < _FEWEST or np.ptp(metric) == 0:
        return {}
    total = ((metric - metric.mean()) ** 2).sum()
    shares: dict[str, float] = {}
    for field in search.space:
        places, _ = _places(search.space[field], [row[field] for row in rows])
        values, ranks = np.unique(places, return_inverse=True)
        if len(values) > 3:
            fitted = np.polyval(np.polyfit(ranks, metric, 2), ranks)
        else:
            fitted = np.array([metric[ranks == rank].mean() for rank in ranks])
        shares[field] = max(0.0, float(1 - ((metric - fitted) ** 2).sum() / total))
    return shares


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(value))


def _places(distribution: Distribution | None, values: Sequence[Any]) -> tuple[np.ndarray, Any]:
    """Return where values lie on an axis, and the label of a place where they are no numbers."""
    if all(_is_number(value) and not isinstance(value, bool) for value in values):
        numbers = np.array(values, dtype=float)
        return np.log10(numbers) if isinstance(distribution, LogUniform) else numbers, None
    names = sorted({str(value) for value in values})
    return np.array([names.index(str(value)) for value in values], dtype=float), names


def _parallel(search: SearchSection, rows: Sequence[Row]) -> Figure:
    """Draw a line a trial through an axis a field, its colour the metric."""
    fields = [*search.space, search.metric]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots()
    heights = np.zeros((len(rows), len(fields)))
    for column, field in enumerate(fields):
        values = [row[field] for row in rows]
        places, names = _places(search.space.get(field), values)
        low, high = places.min(), places.max()
        heights[:, column] = (places - low) / (high - low) if high > low else 0.5
        for end, at in ((places.argmin(), 0.0), (places.argmax(), 1.0)):
            shown = str(values[end]) if names else f"{values[end]:.3g}"
            if high > low or at:
                where = (column, at if high > low else 0.5)
                offset = (4, 5 if at else -10)
                axes.annotate(shown, where, offset, textcoords="offset points", fontsize=8)
        axes.axvline(column, color="0.7", linewidth=0.8)
    for line, colour in zip(heights, _colours(search, rows), strict=True):
        axes.plot(line, color=colour, linewidth=1.6, alpha=0.85)
    axes.set_xticks(range(len(fields)), fields)
    axes.set_yticks([])
    axes.set_frame_on(False)
    axes.margins(0.08)
    return figure


def _over_steps(search: SearchSection, rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots()
    for row, colour in zip(rows, _colours(search, rows), strict=True):
        lines = map(json.loads, RunFolder(row["run_dir"]).read_lines(METRICS))
        points = [(line["step"], line[search.metric]) for line in lines if search.metric in line]
        if points:
            end = "o-" if row["status"] == "finished" else "x--"
            axes.plot(*zip(*points, strict=True), end, color=colour, label=row["trial"], ms=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step (dashed: stopped or failed)")
    axes.grid(alpha=0.3)
    if len(rows) <= 16:
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _against(search: SearchSection, rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(10, 3.0), layout="constrained")
    panels: Any = figure.subplots(1, len(search.space), sharey=True, squeeze=False)
    for axes, (field, distribution) in zip(panels[0], search.space.items(), strict=True):
        _scatter(axes, search, rows, field, distribution)
    return figure


def _scatter(
    axes: Axes, search: SearchSection, rows: Sequence[Row], field: str, distribution: Distribution
) -> None:
    values = [row[field] for row in rows]
    places, names = _places(None, values)
    metric = [row[search.metric] for row in rows]
    axes.scatter(places, metric, c=_colours(search, rows), s=26)
    if names:
        axes.set_xticks(range(len(names)), names)
    elif isinstance(distribution, LogUniform):
        axes.set_xscale("log")
    axes.set_xlabel(field)
    axes.grid(alpha=0.3)


def _bars(shares: Mapping[str, float]) -> Figure:
    figure = Figure(figsize=(10, 0.6 + 0.4 * len(shares)), layout="constrained")
    axes = figure.subplots()
    ordered = sorted(shares.items(), key=lambda item: item[1])
    axes.barh([field for field, _ in ordered], [share for _, share in ordered], color="0.45")
    axes.set_xlim(0, 1)
    return figure


def _colours(search: SearchSection, rows: Sequence[Row]) -> Any:
    """Return a colour a trial: the brighter the better."""
    from matplotlib import colormaps

    metric = np.array([row[search.metric] for row in rows], dtype=float)
    better = metric if search.mode == "max" else -metric
    return colormaps[_COLOURS](Normalize()(better) * 0.9)


def _as_svg(figure: Figure) -> str:
    text = StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]


def _table(search: SearchSection, rows: Sequence[Row], best: str) -> str:
    names = ["trial", "status", *search.space, search.metric, "step", "seconds", "error"]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = [
        f"<tr{' class=best' if row['trial'] == best else ''}>"
        + "".join(f"<td>{escape(_shown(row[name]))}</td>" for name in names)
        + "</tr>"
        for row in rows
    ]
    return f"<table><tr>{head}</tr>\n{chr(10).join(lines)}\n</table>"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
