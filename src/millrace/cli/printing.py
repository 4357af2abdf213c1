"""What commands print: tables for people, JSON for programs, progress on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from millrace.terminal import printable, quoted

LEAST = 24  # characters that are left of a cell cut to fit
MOST = 8000  # characters of a line on standard error, and of a cell


def print_line(text: str = "", keep: str = "") -> None:
    """Prints one line, whatever strings from data it holds; characters in ``keep`` stay as they are."""
    sys.stdout.write(printable(text, keep) + "\n")


def print_note(text: str) -> None:
    """Prints one line on standard error: an error, a note or progress."""
    sys.stderr.write(shorten(printable(text), MOST) + "\n")


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """The value with NaN and infinity as strings, since JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def same_command(arguments: Sequence[str]) -> str:
    """The command that runs these arguments again. Options of torchrun are left out as ``...``."""
    start = "torchrun ... -m -- millrace" if "TORCHELASTIC_RUN_ID" in os.environ else "millrace"
    return " ".join([start, *map(quoted, arguments)])


def print_table(
    rows: Sequence[Sequence[str]], *, indent: str = "  ", right: Container[str] = (), fit: str | None = None
) -> None:
    """Prints columns as wide as their content; the first row is the heading.

    Columns named in ``right`` are aligned to the right. Cells of the column ``fit`` are cut with an ellipsis to fit the
    terminal. In a file or a pipe nothing is cut.
    """
    heading = rows[0]
    cells = [[shorten(printable(cell), MOST) for cell in row] for row in rows]
    widths = [max(len(row[k]) for row in cells) for k in range(len(heading))]
    if fit in heading and (columns := terminal_columns()):
        place = heading.index(fit)
        rest = len(indent) + sum(widths) + 2 * (len(widths) - 1) - widths[place]
        widths[place] = min(widths[place], max(columns - rest, LEAST))
    for row in cells:
        aligned = [
            shorten(cell, width).rjust(width) if name in right else shorten(cell, width).ljust(width)
            for name, cell, width in zip(heading, row, widths, strict=True)
        ]
        print_line((indent + "  ".join(aligned)).rstrip())


def terminal_columns() -> int | None:
    """The width of the terminal; None if the output goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def shorten(text: str, width: int) -> str:
    """The text cut to ``width`` characters, with an ellipsis in the middle: both ends of a path matter.

    >>> shorten("docs/a/rather/long/path.txt", 20)
    'docs/a/r...path.txt'
    """
    if len(text) <= width:
        return text
    side = max(width - 3, 2) // 2
    return f"{text[:side]}...{text[-side:]}"


def several(names: Sequence[str], most: int, rest: str) -> str:
    """Names in a sentence: ``a, b and c``. Beyond ``most`` it gives their number, and ``rest`` says where to find them."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most:,} more ({rest})"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def plural(count: int, noun: str) -> str:
    """``1 shard``, ``2,000 shards``, ``3 entities``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun[:-1]}ies" if noun.endswith("y") else f"{count:,} {noun}s"


def size(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError


def print_transfer(verb: str, report: Any, *, as_json: bool) -> None:
    """What ``push``, ``pull`` or ``stage`` did."""
    if as_json:
        print_json({name: getattr(report, name) for name in report.__struct_fields__})
    elif not report.files:
        print_line(f"{report.target} holds this store already: fingerprint {report.fingerprint}")
    else:
        rest = report.files - report.sent_files
        kept = f"; {plural(rest, 'file')} were there already" if rest else ""
        what = f"{plural(report.sent_files, 'file')}, {size(report.sent_bytes)}"
        if report.codec is not None and report.stored_bytes:
            rate = size(int(report.sent_bytes / max(report.wall_s, 1e-9)))
            what += f" as {size(report.stored_bytes)} ({report.codec}, {report.sent_bytes / report.stored_bytes:.2f}x, {rate}/s)"
        print_line(f"{verb} {what} to {report.target}{kept}; fingerprint {report.fingerprint}")


@contextlib.contextmanager
def byte_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, else a line every 5 seconds. Call it with the bytes done."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(label, total=total)
            yield lambda num_bytes: progress.update(task, advance=num_bytes)
        return
    lock, done, printed_at = threading.Lock(), 0, time.monotonic()

    def step(num_bytes: int) -> None:
        nonlocal done, printed_at
        with lock:
            done += num_bytes
            if time.monotonic() - printed_at >= 5:
                printed_at = time.monotonic()
                print_note(f"{label}: {done / max(total, 1):.0%} of {size(total)}")

    yield step
