"""What commands about training print: lines that stay, a progress line that is replaced on a terminal, JSON at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from millrace.errors import ConfigError


class TrainConsole:
    """Writes to a stream; where that is no terminal every progress line stays."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
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
            self._stream.write(start + text.ljust(self._width) + end)
            self._stream.flush()
        except OSError:  # nobody reads any more (`| head`), or no room for the log: the training goes on, quietly
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def summary(run: Path, stopped_by: int) -> dict[str, Any]:
    """What a program wants to know of a run that has ended."""
    from millrace.train.checkpoint import Checkpoints
    from millrace.train.metrics import read_metrics

    lines, checkpoints = read_metrics(run), Checkpoints(run / "checkpoints")
    latest, best = checkpoints.named("latest"), checkpoints.named("best")
    last = {key: next((line[key] for line in reversed(lines) if key in line), None) for key in ("loss", "val_loss")}
    step = 0 if latest is None else checkpoints.read(latest).step
    return {"run": str(run), "step": step, **last, "latest": latest, "best": best, "stopped_by": stopped_by}


@contextlib.contextmanager
def training_extras() -> Iterator[None]:
    """Around imports of the trainer: says which extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise ConfigError(f"this needs {error.name}: pip install 'millrace[torch]'") from error
