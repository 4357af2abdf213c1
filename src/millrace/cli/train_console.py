"""What ``millrace train`` prints: lines that stay, and a progress line that is replaced on a terminal."""

from __future__ import annotations

import os
import shutil
import sys


class TrainConsole:
    """Writes to standard output; where that is no terminal every progress line stays."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._width = 0  # of the progress line that stands there

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

    def _write(self, text: str, end: str) -> None:
        start = "\r" if self._width else ""
        try:
            sys.stdout.write(start + text.ljust(self._width) + end)
            sys.stdout.flush()
        except OSError:  # nobody reads any more (`| head`), or no room for the log: the training goes on, quietly
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
