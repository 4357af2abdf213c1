"""What a report is made of: sections of plain blocks, which html.py draws and the command line prints.

A block holds numbers and texts as they are. Nothing in it is HTML, so nothing in it can be mistaken for HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Facts:
    """Names and values, one to a line."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """The first row is the heading."""

    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Bars:
    """A count for each name."""

    title: str
    names: list[str]
    counts: list[float]
    note: str = ""


@dataclass(frozen=True)
class Histogram:
    """``counts[k]`` values lie between ``edges[k]`` and ``edges[k + 1]``."""

    title: str
    edges: list[float]
    counts: list[int]
    note: str = ""
    highest: float | None = None  # of the values; the last edge can lie beyond it


@dataclass(frozen=True)
class Lines:
    """Curves over the same x. ``marks`` are vertical lines at an x, ``percent`` shows y as per cent."""

    title: str
    x_name: str
    curves: dict[str, tuple[list[float], list[float]]]
    marks: list[float] = field(default_factory=list)
    percent: bool = False
    note: str = ""


@dataclass(frozen=True)
class Timeline:
    """Rows of spans ``(kind, start_s, stop_s)``, one below the other on one axis of time. A kind has a colour."""

    title: str
    kinds: list[str]
    rows: Sequence[tuple[str, Sequence[tuple[str, float, float]]]]


@dataclass(frozen=True)
class Passages:
    """Texts with a title each. A passage has pieces; a document ends between two pieces."""

    passages: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Pictures:
    """Captions and PNG files."""

    pictures: list[tuple[str, bytes]]


@dataclass(frozen=True)
class Note:
    """A sentence or two."""

    text: str


Block = Facts | Table | Bars | Histogram | Lines | Timeline | Passages | Pictures | Note


@dataclass(frozen=True)
class Section:
    """A heading, a sentence that says how to read it, and blocks."""

    title: str
    about: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """A page: its title, what was read for it, and its sections."""

    title: str
    subtitle: str
    sections: list[Section]


def plain(report: Report) -> dict[str, Any]:
    """The report as JSON takes it; pictures are left out, their captions stay."""
    return {
        "title": report.title,
        "subtitle": report.subtitle,
        "sections": [
            {"title": section.title, "about": section.about, "blocks": [_plain(block) for block in section.blocks]}
            for section in report.sections
        ],
    }


def _plain(block: Block) -> dict[str, Any]:
    if isinstance(block, Pictures):
        return {"block": "pictures", "captions": [caption for caption, _ in block.pictures]}
    return {"block": type(block).__name__.lower(), **vars(block)}
