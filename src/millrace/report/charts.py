"""Charts as SVG inside a page: bars, histograms, lines. No script, no font, nothing from outside.

Colours come from the classes of the page's style, so that a chart follows its light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from millrace.report.blocks import Bars, Histogram, Lines, Timeline
from millrace.report.escape import label, number, numbers, visible

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 34  # room for the axes
MAX_NAME = 20  # characters of a bar's name


def bars(block: Bars) -> str:
    """Horizontal bars, each with its name before it and its count behind it."""
    step, left, right = 22, 142, 52
    height = step * len(block.names) + 8
    top = max(block.counts, default=0) or 1
    parts = []
    for k, (name, count) in enumerate(zip(block.names, block.counts, strict=True)):
        y, width = 4 + step * k, max((WIDTH - left - right) * count / top, 1)
        shown = f"{label(name, MAX_NAME)}<title>{visible(name)}</title>"
        parts.append(
            f'<text class="name" x="{left - 8}" y="{y + 14}" text-anchor="end">{shown}</text>'
            f'<rect class="bar" x="{left}" y="{y + 2}" width="{width:.1f}" height="{step - 6}" rx="2"/>'
            f'<text class="tick" x="{left + width + 5:.1f}" y="{y + 14}">{number(count)}</text>'
        )
    return _svg(block.title, "".join(parts), WIDTH, height)


def histogram(block: Histogram) -> str:
    """Upright bars over an axis of values."""
    edges, counts = block.edges, block.counts
    low, high, top = edges[0], edges[-1], max(counts, default=0) or 1
    span = (high - low) or 1.0
    base = HEIGHT - BOTTOM
    parts = [_y_axis(0, top, whole=True)]
    for k, count in enumerate(counts):
        x, right = (LEFT + _inner() * (edge - low) / span for edge in (edges[k], edges[k + 1]))
        tall = (base - TOP) * count / top
        parts.append(
            f'<rect class="bar" x="{x:.1f}" y="{base - tall:.1f}" width="{max(right - x - 1, 0.5):.1f}" height="{tall:.1f}">'
            f"<title>{number(edges[k])} to {number(edges[k + 1])}: {count:,}</title></rect>"
        )
    return _svg(block.title, "".join([*parts, _x_axis(low, high)]))


def lines(block: Lines) -> str:
    """Curves over an axis; dashed vertical lines are marks."""
    curves = {
        name: [p for p in zip(*xy, strict=True) if all(map(math.isfinite, p))] for name, xy in block.curves.items()
    }
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)
    if block.percent:
        y_low, y_high = 0.0, max(y_high, 0.05)
    x_span, y_span, base = (x_high - x_low) or 1.0, (y_high - y_low) or 1.0, HEIGHT - BOTTOM
    parts = [_y_axis(y_low, y_high, percent=block.percent), _x_axis(x_low, x_high, block.x_name)]
    for mark in block.marks:
        if x_low <= mark <= x_high:
            x = LEFT + _inner() * (mark - x_low) / x_span
            parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{base}"/>')
    for k, curve in enumerate(curves.values()):
        places = [
            (LEFT + _inner() * (x - x_low) / x_span, base - (base - TOP) * (y - y_low) / y_span) for x, y in curve
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="curve c{k % 4}" points="{path}"/>')
        if len(places) < 40:
            parts += [f'<circle class="dot c{k % 4}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in places]
    return _svg(block.title, "".join(parts))


def timeline(block: Timeline) -> str:
    """A row of coloured spans for each name, on one axis of milliseconds."""
    step, left, wide = 14, 60, 1000
    last = 1000 * max((stop for _, spans in block.rows for _, _, stop in spans), default=0) or 1.0
    base, parts = 4 + step * len(block.rows), []
    by_ms = (wide - left - RIGHT) / last
    for value in _ticks(0, last, 10):
        x = left + value * by_ms
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{base}"/>'
            f'<text class="tick" x="{x:.1f}" y="{base + 14}" text-anchor="middle">{number(value)}</text>'
        )
    for k, (name, spans) in enumerate(block.rows):
        y = 2 + step * k
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 10}" text-anchor="end">{label(name, 12)}</text>')
        for kind, start, stop in spans:
            x, width = left + 1000 * start * by_ms, max(1000 * (stop - start) * by_ms, 0.3)
            parts.append(
                f'<rect class="f{block.kinds.index(kind) % 6}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{step - 3}">'
                f"<title>{label(kind, 40)}: {1000 * (stop - start):.3f} ms</title></rect>"
            )
    named = f'<text class="tick" x="{(left + wide) / 2:.0f}" y="{base + 28}" text-anchor="middle">milliseconds</text>'
    return _svg(block.title, "".join([*parts, named]), wide, base + 32)


def _inner() -> int:
    return WIDTH - LEFT - RIGHT


def _y_axis(low: float, high: float, *, percent: bool = False, whole: bool = False) -> str:
    base, parts = HEIGHT - BOTTOM, []
    values = [value for value in _ticks(low, high, 4) if not whole or value == int(value)]
    for value, named in zip(values, numbers(values), strict=True):
        y = base - (base - TOP) * (value - low) / ((high - low) or 1.0)
        text = f"{value:.1%}" if percent else named
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        )
    return "".join(parts)


def _x_axis(low: float, high: float, name: str = "") -> str:
    base, parts = HEIGHT - BOTTOM, []
    values = _ticks(low, high, 5)
    for value, named in zip(values, numbers(values), strict=True):
        x = LEFT + _inner() * (value - low) / ((high - low) or 1.0)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 15}" text-anchor="middle">{named}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    if name:
        parts.append(
            f'<text class="tick" x="{LEFT + _inner() / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{label(name, 40)}</text>'
        )
    return "".join(parts)


def _ticks(low: float, high: float, count: int) -> Sequence[float]:
    """Round numbers between two ends.

    >>> _ticks(0, 97, 4)
    [0, 20, 40, 60, 80]
    """
    if not math.isfinite(high - low) or high <= low:
        return [low]
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * by for by in (1, 2, 5, 10) if unit * by >= rough * 0.75)
    first = math.ceil(low / step - 1e-9)
    ticks = [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]
    return [int(tick) if tick == int(tick) else tick for tick in ticks]


def _svg(title: str, inside: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    named = label(title, 200)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{named}">{inside}</svg>'
