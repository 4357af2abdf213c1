"""The report of a training run, from what its folder says: metrics.jsonl, feed.jsonl, run.json.

A run may be going on, killed, or made by another version: lines that cannot be read are left out, and unknown numbers are drawn.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError, StoreError
from millrace.report.blocks import Facts, Lines, Note, Report, Section, Table
from millrace.report.escape import number
from millrace.store.plain_file import open_file, read_plain
from millrace.store.strict_json import load_json

METRICS, STARTS, RUN = "metrics.jsonl", "feed.jsonl", "run.json"
POINTS = 400  # of a curve
MOST_LINE_BYTES = 1 << 20
MOST_NAMES = 64
MAIN = {"loss", "val_loss", "samples_per_s", "tokens_per_s", "wait", "step_s"}
DULL = {"step", "eta_s", "stall_s", "write_s"}


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is that of a training run."""
    return any((Path(path) / name).is_file() for name in (METRICS, RUN))


def run_report(path: str | os.PathLike[str]) -> Report:
    """Loss, speed and data wait of a run, its starts and its verdicts."""
    folder = Path(path)
    if not is_run(folder):
        raise ConfigError(f"{folder} is not the folder of a training run (it has no {METRICS}); give what --run was")
    numbers = _Numbers(folder / METRICS)
    starts = [entry for entry in _lines(folder / STARTS) if isinstance(entry.get("step"), int)]
    marks = [float(entry["step"]) for entry in starts[1:]]
    last = numbers.last_step
    title, subtitle = (
        f"{folder}: a training run",
        f"{numbers.num_lines:,} line{'s' * (numbers.num_lines != 1)} of {METRICS}, up to step {last:,}.",
    )
    sections = [_summary(folder, numbers, starts), _curves(numbers, marks), _starts(starts)]
    return Report(title, subtitle, [*_verdicts(numbers), *sections])


class _Judged(NamedTuple):
    """A row of the table of verdicts."""

    first: int  # step
    last: int
    said: str
    remedy: str
    lines: int
    others: int  # of these lines, those that said something else

    def says(self, other: _Judged) -> bool:
        return (self.said, self.remedy) == (other.said, other.remedy)


class _Numbers:
    """Every number of metrics.jsonl by its name, as steps and values; and what it says in words about a verdict."""

    def __init__(self, path: Path) -> None:
        self.curves: dict[str, tuple[array[float], array[float]]] = {}
        self.verdicts: list[_Judged] = []
        self.num_lines = self.last_step = 0
        for line in _lines(path):
            step = line.get("step")
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
                continue
            self.num_lines, self.last_step = self.num_lines + 1, max(self.last_step, step)
            if isinstance(said := line.get("verdict"), str):
                self._judged(step, said, str(line.get("remedy") or ""))
            for name, value in line.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._add(name, step, value)

    def _judged(self, step: int, said: str, remedy: str) -> None:
        """Lines that say the same as the one before share a row, also across one line that says something else."""
        row = _Judged(step, step, said, remedy, 1, 0)
        rows = self.verdicts
        if len(rows) > 1 and rows[-1].lines == 1 and rows[-2].says(row):
            others = rows.pop()
            rows[-1] = rows[-1]._replace(lines=rows[-1].lines + 1, others=rows[-1].others + others.others + 1)
        if rows and rows[-1].says(row):
            before = rows.pop()
            row = before._replace(last=step, lines=before.lines + 1)
        self.verdicts = [*rows[-9:], row]

    def _add(self, name: str, step: int, value: float) -> None:
        if name not in self.curves and len(self.curves) >= MOST_NAMES:
            return
        xs, ys = self.curves.setdefault(name, (array("d"), array("d")))
        try:
            xs.append(step)
            ys.append(value)
        except OverflowError:  # a whole number beyond any float
            xs.pop()

    def last(self, name: str) -> float | None:
        return self.curves[name][1][-1] if self.curves.get(name, ((), ()))[1] else None

    def thin(self, name: str) -> tuple[list[float], list[float]]:
        """A curve of at most ``POINTS`` points, each the mean of its neighbours."""
        xs, ys = (np.asarray(values) for values in self.curves[name])
        if len(xs) <= POINTS:
            return xs.tolist(), ys.tolist()
        return tuple([float(part.mean()) for part in np.array_split(values, POINTS)] for values in (xs, ys))  # type: ignore[return-value]


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of a file of JSON lines, without the last line if it is being written, or if it has no end."""
    with (
        contextlib.suppress(StoreError),
        open_file(str(path), follow=True) as (fd, _),
        open(fd, "rb", closefd=False) as file,
    ):
        while (line := file.readline(MOST_LINE_BYTES)).endswith(b"\n"):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, Mapping):
                yield value


def _summary(folder: Path, numbers: _Numbers, starts: list[Mapping[str, Any]]) -> Section:
    facts = [("last step", f"{numbers.last_step:,}"), ("starts", f"{max(len(starts), 1):,}")]
    for name, key in (("last loss", "loss"), ("last val_loss", "val_loss")):
        if (value := numbers.last(key)) is not None:
            facts.append((name, f"{value:.4f}"))
    if (val := numbers.curves.get("val_loss")) and len(val[1]):
        best = int(np.nanargmin(val[1])) if not all(map(math.isnan, val[1])) else 0
        facts.append(("best val_loss", f"{val[1][best]:.4f} at step {val[0][best]:,.0f}"))
    if (wait := numbers.curves.get("wait")) and len(wait[1]):
        share = float(np.mean(wait[1]))
        meaning = "the model limits the run" if share < 0.05 else "training often waits for data"
        facts.append(("waiting for data", f"{share:.1%} of the time: {meaning}"))
    try:
        values = load_json(read_plain(str(folder / RUN), follow=True), RUN)
        facts += [(key, str(values[key])) for key in ("device", "ranks", "threads") if key in values]
        facts += _stores(values)
    except (StoreError, KeyError, TypeError):
        pass
    return Section("Summary", "", [Facts(facts)])


def _stores(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The store of a run, or each source of a mixture with its weight; only the first has its fingerprint there."""
    first = f"{values['store']['path']}, fingerprint {values['store']['fingerprint']}"
    sources = values.get("config", {}).get("data", {}).get("sources", [])
    if len(sources) < 2:
        return [("store", first)]
    paths = [first, *(str(source["store"]) for source in sources[1:])]
    return [
        (f"source {k}", f"{path}, weight {source['weight']:g}")
        for k, (path, source) in enumerate(zip(paths, sources, strict=True), 1)
    ]


def _curves(numbers: _Numbers, marks: list[float]) -> Section:
    about = "Each point is a line of metrics.jsonl, or the mean of several. A dashed line is where the run was started again."
    drawn = []
    losses = {
        name: numbers.thin(key) for name, key in (("train", "loss"), ("val", "val_loss")) if key in numbers.curves
    }
    if losses:
        drawn.append(Lines("Loss", "step", losses, marks))
    rate = "tokens_per_s" if "tokens_per_s" in numbers.curves else "samples_per_s"
    if rate in numbers.curves:
        drawn.append(
            Lines(f"{rate.removesuffix('_per_s').capitalize()} per second", "step", {rate: numbers.thin(rate)}, marks)
        )
    if "wait" in numbers.curves:
        note = "share of the time; below 5% is good"
        drawn.append(Lines("Waiting for data", "step", {"wait": numbers.thin("wait")}, marks, percent=True, note=note))
    if "step_s" in numbers.curves:
        drawn.append(Lines("Seconds of a step", "step", {"step_s": numbers.thin("step_s")}, marks))
    others = [name for name in numbers.curves if name not in MAIN | DULL]
    drawn += [Lines(name, "step", {name: numbers.thin(name)}, marks) for name in sorted(others)[:24]]
    return Section("Curves", about, list(drawn) or [Note("No numbers are there yet.")])


def _starts(starts: list[Mapping[str, Any]]) -> Section:
    table: list[tuple[str, ...]] = [("start", "first step", "samples before it", "batch")]
    for k, entry in enumerate(starts[-50:], max(len(starts) - 50, 0)):
        cells = [number(v) if isinstance(v := entry.get(key), int) else str(v) for key in ("step", "position", "batch")]
        table.append((f"{k + 1}", *cells))
    return Section(
        "Starts",
        "The run began once and was continued at each later start, at exactly the next sample.",
        [Table(table)],
    )


def _verdicts(numbers: _Numbers) -> list[Section]:
    if not numbers.verdicts:
        return []
    table: list[tuple[str, ...]] = [("steps", "verdict", "what to change")]
    for first, last, said, remedy, lines, others in numbers.verdicts:
        doubt = f" ({others:,} of {lines:,} lines said otherwise)" if others else ""
        table.append((f"{first:,}" if first == last else f"{first:,} to {last:,}", said + doubt, remedy))
    return [Section("Verdict", "What limits the run, the newest last.", [Table(table)])]
