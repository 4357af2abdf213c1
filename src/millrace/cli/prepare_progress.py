"""Progress of ``prepare``: a bar on a terminal, a plain line every few seconds otherwise."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from millrace.cli.printing import print_note, size
from millrace.prepare.progress import SURVEYS

EVERY_S, FIRST_S = 5.0, 1.0  # between two lines, and before the first
NOUNS = {"read": "part", "measure": "entity group", "write": "shard"}  # of the stages of a table
SEPARATOR = ", "
AROUND = 7 + 1 + 1 + 4 + 1 + 7 + 1  # characters of a line besides bar and facts: stage, per cent, time left


class TextProgress:
    """Called as (stage, done, total, facts); stage "read" counts bytes, "lines" parts, "write" shards.

    Stages "find" and "survey" count files before that; how many there are is not known while they are found (total 0).
    A call whose facts say that a stage ``begins`` holds what an earlier run did of it. Before all stages
    come "note", for the user to read, and "room": bytes of disk that may be needed, and that are free.
    """

    def __init__(self) -> None:
        self._started = self._stage_began = time.monotonic()
        self._said = self._started - EVERY_S + min(FIRST_S, EVERY_S)
        self._bar: Any = None
        self._task: Any = None
        self._stage = ""
        self._done = 0  # when this stage began: an earlier run may have done some of it
        self._before: Mapping[str, Any] = {}

    def __enter__(self) -> TextProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            console = Console(stderr=True)
            columns = (
                TextColumn("{task.description}"),
                BarColumn(_bar_width(console.width)),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[facts]}", markup=False),
            )
            self._bar = Progress(*columns, console=console, transient=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int, facts: Mapping[str, Any]) -> None:
        if stage == "note":
            print_note(f"note: {facts['note']}")
            return
        if stage == "room":
            if done > total:
                print_note(f"about {size(done)} of disk may be needed, {size(total)} are free; it may not be enough")
            return
        if stage != self._stage:
            if self._bar is not None and self._stage in SURVEYS:
                self._bar.remove_task(self._task)
            begins = facts.get("begins", False)
            self._stage, self._started = stage, time.monotonic() if begins else self._stage_began
            self._done, self._before = (done, facts) if begins else (0, {})
            if self._bar is not None:
                self._task = self._bar.add_task(stage, total=total or None, facts="")
        self._stage_began = time.monotonic()  # the next stage begins at the last call of this one
        if stage in SURVEYS:
            shown = [f"{done:,} files"]
        else:
            shown = [f"{size(done)} sent"] if stage == "push" else self._facts(stage, done, facts)
        if self._bar is not None:
            width = self._bar.console.width
            text = fit_facts(shown, width - _bar_width(width) - AROUND)
            self._bar.update(self._task, completed=done, facts=text)
        elif time.monotonic() - self._said >= EVERY_S:
            self._said = time.monotonic()
            left = (time.monotonic() - self._started) * (total - done) / max(done - self._done, 1)
            when = f", about {left:.0f} s left" if done > self._done else ""
            share = [f"{done / max(total, 1):.0%}"] if total or stage not in SURVEYS else []
            print_note(f"{stage}: {SEPARATOR.join([*share, *shown])}{when if share else ''}")

    def _facts(self, stage: str, done: int, facts: Mapping[str, Any]) -> list[str]:
        """Facts to show, the most important first."""
        if stage == "lines":
            return [f"{facts['lines']:,} lines compared"]
        if stage != "read":
            return [f"{done:,} shard{'s' * (done != 1)}"]
        files = f"{facts['files']:,} of {facts['all_files']:,} files"
        num_bytes, num_tokens = (facts[name] - self._before.get(name, 0) for name in ("bytes", "tokens"))
        if not num_bytes:  # too early for rates
            return [files, f"{size(memory())} memory"]
        seconds = max(time.monotonic() - self._started, 1e-9)
        repeats = facts["repeats"] / max(facts["documents"] + facts["repeats"], 1)
        return [
            files,
            f"{num_bytes / seconds / 1e6:.1f} MB/s",
            f"{thousands(num_tokens / seconds)} tokens/s",
            f"{size(memory())} memory",
            f"{repeats:.1%} repeats",
            f"{size(facts['bytes'])} of text",
        ]


class TableProgress(TextProgress):
    """Called as (stage, done, total, facts): parts read, groups of entities measured, shards written."""

    _rows = 0

    def _facts(self, stage: str, done: int, facts: Mapping[str, Any]) -> list[str]:
        seconds = max(time.monotonic() - self._started, 1e-9)
        if stage == "write":
            self._rows += facts["rows"]
        rows = facts.get("rows", 0) if stage == "read" else self._rows
        rate = [f"{rows:,} rows", f"{rows / seconds:,.0f} rows/s"] if rows else []
        search = [f"pass {facts['quartiles']} for quartiles"] if "quartiles" in facts else []
        return [f"{done:,} {NOUNS[stage]}{'s' * (done != 1)}", *rate, *search, f"{size(memory())} memory"]


class RecordProgress(TextProgress):
    """Called as (stage, done, total, facts): bytes read, shards written."""

    def _facts(self, stage: str, done: int, facts: Mapping[str, Any]) -> list[str]:
        if stage != "read":
            return [f"{done:,} shard{'s' * (done != 1)}"]
        seconds = max(time.monotonic() - self._started, 1e-9)
        records = facts["records"] - self._before.get("records", 0)
        rate = [f"{thousands(records / seconds)} records/s"] if records else []
        return [f"{facts['records']:,} records", *rate, f"{size(memory())} memory"]


def _bar_width(width: int) -> int:
    """The width of the bar on a terminal of this width."""
    return max(6, min(40, width // 8))


def fit_facts(facts: Sequence[str], width: int) -> str:
    """As many facts as fit, in their order; one that is too long is skipped for shorter ones."""
    shown, left = [], width + len(SEPARATOR)
    for fact in facts:
        if len(fact) + len(SEPARATOR) <= left:
            shown.append(fact)
            left -= len(fact) + len(SEPARATOR)
    return SEPARATOR.join(shown)


def thousands(number: float) -> str:
    """12345.6 -> '12.3K', 3400000 -> '3.4M'."""
    for unit, each in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= each:
            return f"{number / each:.1f}{unit}"
    return f"{number:.0f}"


def memory() -> float:
    """Resident memory of this process and its workers."""
    import psutil

    try:
        me = psutil.Process(os.getpid())
    except psutil.Error:  # no /proc: the peak of this process alone
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total
