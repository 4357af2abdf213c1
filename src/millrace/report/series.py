"""What a report says about a table: features before and after scaling, missing values, entities, windows, times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millrace.errors import MillraceError
from millrace.ragged import Array
from millrace.report.blocks import Block, Lines, Note, Section, Table
from millrace.report.escape import number
from millrace.report.sample import Sample, histogram, present
from millrace.store.times import has_times, show_times
from millrace.view.windows import Windows

ROWS = 256  # of an entity
MOST_BYTES = 64 << 20
FEATURES = 16  # that are drawn
WINDOWS = 6
SHAPES = ((48, 12), (16, 4), (4, 1))  # lookback and horizon of them: the first that fits into a split


def sections(sample: Sample, made: Mapping[str, Any]) -> list[Section]:
    features = _Features(sample)
    found = [features.section(made)] if features.names else []
    lengths = histogram("Rows of an entity", sample.lengths())
    return [*found, _windows(sample), Section("Entities", f"From {sample.said()}.", present([lengths])), _times(sample)]


class _Features:
    """Stored and original values of some rows of the sample."""

    def __init__(self, sample: Sample) -> None:
        self.sample, store = sample, sample.store
        self.column = "values" if "values" in store.layout.columns else _first_row_column(store)
        width = (
            store.layout.columns[self.column].shape[0] if self.column and store.layout.columns[self.column].shape else 1
        )
        named: Any = store.meta.get("features")
        is_named = isinstance(named, (list, tuple)) and len(named) == width
        self.names = (
            [str(name) for name in named] if is_named else [f"feature {k}" for k in range(width)] if self.column else []
        )
        self.is_scaled = store.manifest is not None and store.manifest.scaling is not None
        nothing: tuple[Array, Array] = np.empty((0, 0)), np.empty((0, 0))
        self.stored, self.original = self._read(width) if self.column else nothing

    def _read(self, width: int) -> tuple[Array, Array]:
        most = max(1, min(ROWS, MOST_BYTES // max(16 * width * self.sample.num_contents, 1)))
        stored: list[Array] = [np.empty((0, width))]
        original: list[Array] = [np.empty((0, width))]
        for piece in self.sample.pieces:
            starts, stops = piece.store.record_spans()
            for record in piece.contents.tolist():
                first = int(starts[record] + stops[record]) // 2 - most // 2  # the middle of the entity
                first = max(first, int(starts[record]))
                rows = np.asarray(
                    piece.store.columns[self.column][first : min(first + most, int(stops[record]))], np.float64
                )
                stored.append(rows.reshape(-1, width))
                if self.is_scaled:
                    original.append(piece.store.inverse(stored[-1], features=range(width), entity=record))
        return np.concatenate(stored), np.concatenate(original if self.is_scaled else stored)

    def section(self, made: Mapping[str, Any]) -> Section:
        about = f"From {len(self.stored):,} rows of {self.sample.num_contents:,} of {self.sample.store.num_records:,} entities. "
        if len(self.names) > FEATURES:
            about += f"The first {FEATURES} of {len(self.names):,} features are drawn. "
        about += (
            "First in the units of the source (original), then as stored and as a model sees it (scaled)."
            if self.is_scaled
            else "Values are as stored."
        )
        blocks: list[Block] = [Table(self._table(made))]
        for k, name in enumerate(self.names[:FEATURES]):
            pair = [histogram(name, self.original[:, k], "original" if self.is_scaled else "")]
            pair += [histogram(name, self.stored[:, k], "scaled")] if self.is_scaled else []
            blocks += present(pair)
        return Section("Features", about, blocks)

    def _table(self, made: Mapping[str, Any]) -> Sequence[tuple[str, ...]]:
        report = made.get("report")
        counted = report.get("columns") if isinstance(report, Mapping) else None
        rows: list[tuple[str, ...]] = [
            ("feature", "mean", "std", "min", "max", "NaN or infinite", "missing in the source")
        ]
        for k, name in enumerate(self.names[:100]):
            values = self.original[:, k]
            finite = values[np.isfinite(values)]
            column = counted.get(name) if isinstance(counted, Mapping) else None
            missing = column.get("nulls") if isinstance(column, Mapping) else None
            with np.errstate(over="ignore", invalid="ignore"):  # the sum of values near the largest float
                shown = (
                    [number(float(f(finite))) for f in (np.mean, np.std, np.min, np.max)] if len(finite) else [""] * 4
                )
            share = f"{1 - len(finite) / len(values):.1%}" if len(values) else ""
            rows.append((name, *shown, share, f"{missing:,}" if isinstance(missing, int) else "not recorded"))
        return rows


def _first_row_column(store: Any) -> str:
    columns = store.layout.columns.items()
    return next((n for n, c in columns if c.axis == store.layout.primary and len(c.shape) < 2 and n != "time"), "")


def _windows(sample: Sample) -> Section:
    for lookback, horizon in SHAPES:
        drawn: list[Block] = []
        for piece in sample.pieces:
            has_cuts = "train" in piece.store.splits and piece.store.time_cuts is not None
            part = piece.store.split("train") if has_cuts else piece.store
            try:
                view = Windows(part, lookback=lookback, horizon=horizon)
            except MillraceError:
                continue
            places: Any = np.linspace(0, len(view) - 1, WINDOWS + 2).astype(int)[1:-1] if len(view) else []
            drawn += [_window(view, int(i), part) for i in places]
        if drawn:
            break
    about = f"A window as a model gets it: {lookback} rows of x, then {horizon} rows of y, which it should predict. Scaled values."
    none = Note(f"No entity that was read has the {lookback + horizon} rows of such a window in its split.")
    return Section("Example windows", about, drawn[:: max(1, len(drawn) // WINDOWS)][:WINDOWS] or [none])


def _window(view: Any, i: int, store: Any) -> Lines:
    item, start = view[i], int(view.spans(np.array([i])).starts[0])
    record = int(np.searchsorted(store.record_spans()[1], start, side="right"))
    who = store.columns["name"][record] if "name" in store.layout.columns else f"entity {record:,}"
    features, target = list(store.meta.get("features") or []), store.meta.get("target")
    first = target[0] if isinstance(target, (list, tuple)) and target else features[0] if features else "feature 0"
    k = features.index(first) if first in features and item["x"].shape[1] == len(features) else 0
    x, y = item["x"][:, k].astype(float).tolist(), item["y"][:, 0].astype(float).tolist()
    curves: dict[str, tuple[list[float], list[float]]] = {
        f"x: {first}": (list(range(len(x))), x),
        "y: target": (list(range(len(x), len(x) + len(y))), y),
    }
    return Lines(f"{who}", "row of the window", curves, note=f"window {i:,}")


def _times(sample: Sample) -> Section:
    """The first and last time of each split, over the sampled entities."""
    store, about = (
        sample.store,
        f"First and last rows of {sample.num_contents:,} of {sample.store.num_records:,} entities.",
    )
    if not has_times(store):
        return Section("Times", "", [Note("The rows have no times.")])
    ends: dict[str, list[Array]] = {}
    counts: dict[str, int] = {}
    for piece in sample.pieces:
        starts, stops = (edge[piece.contents] for edge in piece.store.record_spans())
        names = piece.store.splits if store.time_cuts is not None else (store.shard_split(piece.number) or "all",)
        for name in names:
            first, last = starts, stops
            if store.time_cuts is not None and (cuts := piece.store.split(name).cuts) is not None:
                first, last = starts + cuts[0][piece.contents], starts + cuts[1][piece.contents]
            some = last > first
            counts[name] = counts.get(name, 0) + int((last - first)[some].sum())
            if some.any():
                rows = np.concatenate((first[some], last[some] - 1))
                ends.setdefault(name, []).append(piece.store.times(rows))
    table: list[tuple[str, ...]] = [("split", "first time", "last time", "rows of these entities")]
    for name, found in ends.items():
        times = np.concatenate(found)
        low, high = show_times(store, np.array([times.min(), times.max()]))
        table.append((name, str(low), str(high), f"{counts[name]:,}"))
    return Section("Times of the splits", about, [Table(table)])
