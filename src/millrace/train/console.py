"""Where a run prints its progress: lines that stay, and one that is replaced."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO

from millrace.prepare.progress import is_watched
from millrace.terminal import printable

BLINK_S = 0.1  # least time between two notes: nobody reads faster


class Console:
    """Prints nothing, as it is: for ranks other than the first, and for programs without a terminal."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def show(self, text: str) -> None:
        """The progress line; on a terminal it replaces the one before."""

    def note(self, text: str) -> None:
        """Progress within a step: only on a terminal, and only now and then."""


class StreamConsole(Console):
    """Writes to a stream. If it is no terminal, every progress line stays."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._width = 0  # of the present progress line
        self._noted_at = -BLINK_S

    def say(self, text: str) -> None:
        self._write(printable(text), "\n")
        self._width = 0

    def show(self, text: str) -> None:
        if not self._is_terminal:
            self.say(text)
            return
        text = printable(text)[
            : max(20, shutil.get_terminal_size().columns - 1)
        ]  # a line that wraps cannot be replaced
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
        except OSError:  # the reader is gone (`| head`), or the disk is full: training goes on without output
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def console_for_python() -> Console:
    """The console of a call from Python: stderr if a person reads it, else nothing."""
    return StreamConsole(sys.stderr) if is_watched(sys.stderr) else Console()
