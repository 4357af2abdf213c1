"""Progress of a preparation that Python calls: one line on stderr where a person looks, nothing elsewhere.

The commands have progress bars of their own (``cli/text_progress.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

STAGES = {"lines": "finding repeats", "read": "reading", "fit": "scaling", "write": "writing"}


def is_watched(stream: TextIO | None) -> bool:
    """Whether a person reads a stream: it is a terminal, or this is the kernel of a notebook."""
    return stream is not None and (stream.isatty() or "ipykernel" in sys.modules)


def default_progress() -> Callable[[str, int, int, Mapping[str, Any]], None]:
    """What a preparation calls where it was given no ``progress``."""
    return ProgressLine(sys.stderr) if is_watched(sys.stderr) else lambda *_: None


class ProgressLine:
    """The stage and how far it is, in one line that is replaced; notes stay."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._shown = stream, ""

    def __call__(self, stage: str, done: int, total: int, facts: Mapping[str, Any]) -> None:
        if stage == "note":
            self._replace(f"note: {facts['note']}\n")
        elif stage in STAGES and total:
            text = f"{STAGES[stage]}: {min(done / total, 1):.0%}"
            if text != self._shown:
                self._replace(text)
                self._shown = text
            if stage == "write" and done >= total:
                self._replace(f"{text}\n")

    def _replace(self, text: str) -> None:
        start = "\r" if self._shown else ""
        self._stream.write(start + text.rstrip("\n").ljust(len(self._shown)) + "\n" * text.endswith("\n"))
        self._stream.flush()
        self._shown = ""
