"""Progress of ``prepare text``: a bar on a terminal, a plain line every few seconds otherwise."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from millrace.cli.console import size

EVERY_S = 5.0


class TextProgress:
    """Called as (stage, done, total, facts); stage "read" counts bytes, "lines" parts, "write" shards.

    Before them come "note", one for the user to read, and "room": bytes of disk that may be needed, and that are free.
    """

    def __init__(self) -> None:
        self._started = self._said = self._stage_began = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        self._stage = ""

    def __enter__(self) -> TextProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int, facts: Mapping[str, Any]) -> None:
        if stage == "note":
            sys.stderr.write(f"note: {facts['note']}\n")
            return
        if stage == "room":
            if done > total:
                sys.stderr.write(
                    f"about {size(done)} of disk may be needed, {size(total)} are free; it may not be enough\n"
                )
            return
        if stage != self._stage:
            self._stage, self._started = stage, self._stage_began
            if self._bar is not None:
                self._task = self._bar.add_task(stage, total=total, facts="")
        self._stage_began = time.monotonic()  # the next stage begins where the last call of this one was
        text = self._facts(stage, done, facts)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, facts=text)
        elif time.monotonic() - self._said >= EVERY_S:
            self._said = time.monotonic()
            left = (time.monotonic() - self._started) * (total - done) / max(done, 1)
            sys.stderr.write(f"{stage}: {done / max(total, 1):.0%}, {text}, about {left:.0f} s left\n")

    def _facts(self, stage: str, done: int, facts: Mapping[str, Any]) -> str:
        if stage == "lines":
            return f"{facts['lines']:,} lines compared"
        if stage != "read":
            return f"{done} shards"
        seconds = max(time.monotonic() - self._started, 1e-9)
        repeats = facts["repeats"] / max(facts["documents"] + facts["repeats"], 1)
        return (
            f"{facts['files']:,} of {facts['all_files']:,} files, {size(facts['bytes'])}, "
            f"{facts['bytes'] / seconds / 1e6:.1f} MB/s, {facts['tokens'] / seconds:,.0f} tokens/s, "
            f"{repeats:.1%} repeats, {size(memory())} memory"
        )


def memory() -> float:
    """Resident memory of this process and its workers."""
    import psutil

    me = psutil.Process(os.getpid())
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total
