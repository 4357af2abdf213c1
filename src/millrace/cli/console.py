"""What commands print: aligned lines for people, JSON for machines, progress on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def print_line(text: str = "") -> None:
    sys.stdout.write(text + "\n")


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they are written as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def same_command(arguments: Sequence[str]) -> str:
    """What a person types to run these arguments again; the options of torchrun are theirs to fill in."""
    start = "torchrun ... -m -- millrace" if "TORCHELASTIC_RUN_ID" in os.environ else "millrace"
    return f"{start} {shlex.join(arguments)}"


def print_table(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> None:
    """Columns as wide as their content; the first row is the heading."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for row in rows:
        print_line((indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip())


def print_fields(fields: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        print_line(f"{name.ljust(width)}  {value}")


def size(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError


@contextlib.contextmanager
def byte_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, a plain line every few seconds otherwise; call it with bytes done."""
    if sys.stderr.isatty():
        with _bar(label, total) as step:
            yield step
    else:
        yield _PlainProgress(label, total)


@contextlib.contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda num_bytes: progress.update(task, advance=num_bytes)


class _PlainProgress:
    """Says how far it is at most every 5 seconds."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._lock, self._said = threading.Lock(), time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if time.monotonic() - self._said >= 5:
                self._said = time.monotonic()
                share = self._done / max(self._total, 1)
                sys.stderr.write(f"{self._label}: {share:.0%} of {size(self._total)}\n")
