"""Texts and numbers on a page. Every string that comes from data passes ``visible`` on its way there."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from millrace.terminal import printable


def visible(text: object, *, keep: str = "") -> str:
    """HTML that shows the text and does nothing else, for elements and attributes.

    Markup is escaped. Characters that are invisible or that turn the reading direction become escapes such as ``\\\\u202e``,
    except those in ``keep``.

    >>> visible('<b title="x">') + visible("a\\u202eb")
    '&lt;b title=&quot;x&quot;&gt;a\\\\u202eb'
    """
    return html.escape(printable(str(text), keep), quote=True)


def label(text: object, width: int) -> str:
    """The text as ``visible`` shows it, cut in the middle to about ``width`` characters."""
    whole = str(text)
    if len(whole) > width:
        side = (width - 1) // 2
        whole = f"{whole[:side]}…{whole[-side:]}"
    return visible(whole)


def num_bytes(count: float) -> str:
    """1536 -> '1.5 KiB', as on the command line."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def numbers(values: Sequence[float]) -> list[str]:
    """``number`` of each, with more digits where two different ones would look the same.

    >>> numbers([10_820, 10_840]), numbers([0.5, 12_000])
    (['10,820', '10,840'], ['0.5', '12K'])
    """
    short = [number(value) for value in values]
    return short if len(set(short)) == len(set(values)) else [f"{value:,.10g}" for value in values]


def number(value: float) -> str:
    """A number for people: 1,234; 12.3M; 0.0012.

    >>> [number(value) for value in (0, 12, 1234, 56_789, 12_345_678, 0.00123, 1.5, 2e12, -3e-9)]
    ['0', '12', '1,234', '56.8K', '12.3M', '0.00123', '1.5', '2T', '-3e-09']
    """
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "K")):
        if unit <= size < 1e15:
            return f"{value / (1e3 if letter == 'K' else unit):.3g}{letter}"
    if size >= 1000 and size < 1e4:
        return f"{value:,.0f}"
    return f"{value:.3g}"
