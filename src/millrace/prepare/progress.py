"""Progress of a preparation that Python calls: one line on stderr where a person reads it, else nothing.

The commands have progress bars of their own (``cli/prepare_progress.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from millrace.terminal import printable

Progress = Callable[[str, int, int, Mapping[str, Any]], None]  # stage, done, total, facts
EVERY = 100  # files between two calls of the stages that count files
# Before there is a plan. How many files there are is not known while they are found: ``total`` is 0.
SURVEYS = {"find": "finding files", "survey": "looking into files"}
STAGES = SURVEYS | {
    "lines": "finding repeats",
    "read": "reading",
    "fit": "scaling",
    "write": "writing",
    "push": "sending",
}


def is_watched(stream: TextIO | None) -> bool:
    """Whether a person reads a stream: it is a terminal, or we are in a notebook."""
    return stream is not None and (stream.isatty() or "ipykernel" in sys.modules)


def default_progress() -> Progress:
    """What a preparation calls if it is given no ``progress``."""
    return ProgressLine(sys.stderr) if is_watched(sys.stderr) else lambda *_: None


class ProgressLine:
    """One line that shows the stage and how far it is; notes stay above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._shown = stream, ""

    def __call__(self, stage: str, done: int, total: int, facts: Mapping[str, Any]) -> None:
        if stage == "note":
            self._replace(printable(f"note: {facts['note']}") + "\n")
        elif stage in STAGES and (total or stage in SURVEYS):
            text = f"{STAGES[stage]}: " + (f"{min(done / total, 1):.0%}" if total else f"{done:,}")
            if text != self._shown:
                self._replace(text)
                self._shown = text
            if stage in ("write", "push") and done >= total:
                self._replace(f"{text}\n")

    def _replace(self, text: str) -> None:
        start = "\r" if self._shown else ""
        self._stream.write(start + text.rstrip("\n").ljust(len(self._shown)) + "\n" * text.endswith("\n"))
        self._stream.flush()
        self._shown = ""
