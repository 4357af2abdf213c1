"""Where a run says how it goes: lines that stay, and one that is replaced."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Protocol, TextIO

from millrace.prepare.progress import is_watched

BLINK_S = 0.1  # between two notes: more are not read


class Console(Protocol):
    def say(self, text: str) -> None:
        """A line that stays."""

    def show(self, text: str) -> None:
        """The progress line: replaces the one before where it can."""

    def note(self, text: str) -> None:
        """Progress within a step of the run: only on a terminal, and only now and then."""


class Silent:
    """Says nothing: ranks other than the first, and Python programs that write to a file."""

    def say(self, text: str) -> None: ...

    def show(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...


class StreamConsole:
    """Writes to a stream; where that is no terminal every progress line stays."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._width = 0  # of the progress line that stands there
        self._noted_at = -BLINK_S

    def say(self, text: str) -> None:
        self._write(text, "\n")
        self._width = 0

    def show(self, text: str) -> None:
        if not self._is_terminal:
            self.say(text)
            return
        text = text[: max(20, shutil.get_terminal_size().columns - 1)]  # a line that wraps is not replaced
        self._write(text, "")
        self._width = len(text)

    def note(self, text: str) -> None:
        now = time.monotonic()
        if self._is_terminal and now - self._noted_at >= BLINK_S:
            self._noted_at = now
            self.show(text)

    def _write(self, text: str, end: str) -> None:
        start = "\r" if self._width else ""
        try:
            self._stream.write(start + text.ljust(self._width) + end)
            self._stream.flush()
        except OSError:  # nobody reads any more (`| head`), or no room for the log: the training goes on, quietly
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def console_for_python() -> Console:
    """What a call from Python shows: its progress on stderr where a person reads it, else nothing."""
    return StreamConsole(sys.stderr) if is_watched(sys.stderr) else Silent()
