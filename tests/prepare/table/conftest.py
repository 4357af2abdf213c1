"""A slow and plain twin of ``prepare table``: pandas, loops and scikit-learn on the original frame.

A frame here has ``name`` (the entity), ``t`` (its time as a number), features and categories, in source order. ``write``
puts it into files of some layout and gives back the frame in the order in which those files are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler

import millrace as mr
from millrace.prepare.table.read import chunks, part, sources
from millrace.prepare.table.settle import clean, fit, index, index_files
from millrace.prepare.table.write import shards
from millrace.scaling import scaler

START = 1_577_836_800  # 2020-01-01, a Wednesday
KINDS = {
    "float64": pa.float64(), "float32": pa.float32(), "float16": pa.float16(), "int64": pa.int64(), "int16": pa.int16(),
    "uint8": pa.uint8(), "bool": pa.bool_(), "decimal": pa.decimal128(20, 3),
}  # fmt: skip
LAYOUTS = ("file", "many", "spread", "hive", "columns", "mixed")
STORED = {  # what the store holds of second t; Parquet knows no seconds and keeps milliseconds
    "timestamp[s]": lambda t: t, "timestamp[ms]": lambda t: t * 10**3, "timestamp[us, tz=UTC]": lambda t: t * 10**6,
    "timestamp[ns, tz=Asia/Tokyo]": lambda t: t * 10**9, "date32": lambda t: t // 86400, "int64": lambda t: t,
    "int32": lambda t: t - START, "float64": lambda t: (t - START) / 8,
}  # fmt: skip
SEPARATORS = {"csv": ",", "tsv": "\t", "csv.gz": ","}
NAMES = ("A", "B", "10", "9", "été", "b c", "Z|z", "x=1", "日本", "a'b", "ß%", "NULL")


@dataclasses.dataclass
class Entity:
    """What must be stored of one entity: rows in order of time, NaN where nothing was observed."""

    name: str
    time: np.ndarray
    values: np.ndarray
    labels: list[tuple[str | None, ...]]
    cuts: list[int] = dataclasses.field(default_factory=list)

    def split(self, k: int) -> slice:
        edges = [0, *self.cuts, len(self.time)]
        return slice(edges[k], edges[k + 1])


def random_frame(
    seed: int,
    *,
    rows: int = 60,
    names: Sequence[str] = NAMES[:5],
    kinds: Sequence[str] = ("float64", "float32", "int64"),
    missing: float = 0.1,
    infinite: float = 0.02,
    categories: int = 0,
    step: int = 60,
    repeats: bool = False,
) -> pd.DataFrame:
    """Entities with rows at irregular multiples of ``step``, in no order."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"name": rng.choice(list(names), rows)})
    places = [rng.integers(0, 3 * rows) for _ in range(rows)] if repeats else rng.permutation(3 * rows)[:rows]
    frame["t"] = START + step * np.array(places, np.int64)
    for k, kind in enumerate(kinds):
        values = rng.normal(rng.normal(0, 50), rng.uniform(0.5, 20), rows)
        if kind in ("int64", "int16"):
            values = np.round(values)
        elif kind in ("uint8", "bool"):
            values = rng.integers(0, 2 if kind == "bool" else 200, rows).astype(float)
        elif kind == "decimal":
            values = np.round(values, 3)
        elif kind in ("float32", "float16"):
            values = values.astype(kind).astype(np.float64)
        if kind.startswith("float") and infinite:
            values = np.where(rng.random(rows) < infinite, rng.choice([np.inf, -np.inf], rows), values)
        frame[f"f{k}"] = np.where(rng.random(rows) < missing, np.nan, values)
    for k in range(categories):
        labels = rng.choice(["red", "green", "größe", ""][: 3 if k == 0 else 4], rows).astype(object)
        labels[rng.random(rows) < missing] = None
        frame[f"c{k}"] = labels
    return frame


def to_arrow(frame: pd.DataFrame, kinds: dict[str, str], time: str = "timestamp[ms]") -> pa.Table:
    """The frame with the types that its files have; ``kinds`` are those of the features."""
    columns: dict[str, Any] = {}
    for name, column in frame.items():
        if name in kinds:
            columns[name] = _numbers(column.to_numpy(np.float64), kinds[name])
        elif name == "t":
            columns[name] = _times(column, time)
        elif column.dtype == np.int64:
            columns[name] = pa.array(column.to_numpy())
        else:
            columns[name] = pa.array(
                [None if value is None or value != value else value for value in column], pa.string()
            )
    return pa.table(columns)


def _times(column: pd.Series, time: str) -> pa.Array:
    if time == "date32":
        return pa.array((column // 86400).to_numpy(np.int32)).cast(pa.date32())
    if time == "int32":
        return pa.array((column - START).to_numpy(np.int32))
    if time == "float64":
        return pa.array((column - START).to_numpy(np.float64) / 8)
    if time == "int64":
        return pa.array(column.to_numpy())
    unit, _, zone = time[10:-1].partition(", tz=")
    return pa.array(column.to_numpy()).cast(pa.timestamp("s", zone or None)).cast(pa.timestamp(unit, zone or None))


def _numbers(values: np.ndarray, kind: str) -> pa.Array:
    gone = np.isnan(values)
    if kind == "decimal":
        made = [None if is_gone else Decimal(f"{value:.3f}") for value, is_gone in zip(values, gone, strict=True)]
        return pa.array(made, KINDS[kind])
    if kind.startswith("float"):  # half of what is missing is null, half is NaN
        mask = gone & (np.arange(len(values)) % 2 == 0)
        return pa.array(values.astype(kind), KINDS[kind], mask=mask)
    whole = np.where(gone, 0, values)
    return pa.array(whole.astype(bool if kind == "bool" else kind), KINDS[kind], mask=gone)


@dataclasses.dataclass
class Written:
    """Files, the options that read them, and the frame in the order of its rows in them."""

    paths: list[str]
    options: dict[str, Any]
    frame: pd.DataFrame


def write(
    frame: pd.DataFrame,
    folder: Path,
    *,
    layout: str = "many",
    form: str = "parquet",
    kinds: dict[str, str] | None = None,
    time: str = "timestamp[ms]",
    seed: int = 0,
    group_rows: int = 7,
) -> Written:
    """Puts the frame into files; the times of the frame that is returned are those of the store."""
    rng = np.random.default_rng(seed)
    if form != "parquet" and time.startswith("timestamp"):
        time = "timestamp[s]"
    kinds = {name: "float64" for name in frame if name.startswith("f")} if kinds is None else kinds
    pieces: dict[str, pd.DataFrame] = {}
    options: dict[str, Any] = {"time": "t"}
    if layout == "file":
        pieces = {f"{name}.{form}": mine.drop(columns="name") for name, mine in frame.groupby("name", sort=False)}
    elif layout == "hive":
        options["entity"] = "name"
        for name, mine in frame.groupby("name", sort=False):
            dealt = rng.integers(0, 2, len(mine))
            for k in np.unique(dealt):
                pieces[f"name={quote(name, safe='')}/{k}.{form}"] = mine[dealt == k].drop(columns="name")
    elif layout == "columns":
        options["entity"] = ["exchange", "number"]
        number = frame["name"].map({name: k for k, name in enumerate(dict.fromkeys(frame["name"]))})
        both = frame.assign(
            exchange=[f"ex{k % 2}" for k in number], number=number.astype(np.int64), name_=frame["name"]
        )
        frame = frame.assign(name=[f"ex{k % 2}|{k}" for k in number])
        pieces = {f"all.{form}": both.drop(columns=["name", "name_"])}
    elif layout == "mixed":
        options["entity"] = "name"
        ordered = frame.sort_values(["name", "t"], kind="stable")
        half = len(ordered) // 2
        pieces = {f"0.{form}": ordered[:half], f"1.{form}": ordered[half:]}
    else:
        options["entity"] = "name"
        files = 1 if layout == "many" else 4
        dealt = rng.integers(0, files, len(frame))
        pieces = {f"{k}.{form}": frame[dealt == k] for k in range(files) if (dealt == k).any()}
    order = []
    for path in sorted(pieces, key=os.fsencode):
        piece = pieces[path]
        order.append(piece.index)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        table = to_arrow(piece, kinds, time)
        if form == "parquet":
            parquet.write_table(table, folder / path, row_group_size=group_rows, use_dictionary=bool(rng.integers(2)))
        else:
            write_csv(table, folder / path, SEPARATORS[form])
    frame = frame.loc[np.concatenate(order)].reset_index(drop=True)
    for name in (name for name, kind in kinds.items() if kind == "decimal"):
        # Arrow's floats of decimals, which may be one unit in the last place beside Python's.
        floats = _numbers(frame[name].to_numpy(float), "decimal").cast(pa.float64()).to_numpy(zero_copy_only=False)
        np.testing.assert_allclose(floats, frame[name].to_numpy(float), rtol=4e-16)
        frame[name] = floats
    return Written([str(folder)], options, frame.assign(t=frame["t"].map(STORED[time])))


def write_csv(table: pa.Table, path: Path, separator: str = ",") -> None:
    with pa.output_stream(str(path), compression="gzip" if path.name.endswith(".gz") else None) as stream:
        csv.write_csv(table, stream, csv.WriteOptions(delimiter=separator))


def cleaned(
    frame: pd.DataFrame,
    features: Sequence[str],
    *,
    categorical: Sequence[str] = (),
    nulls: dict[str, str] | None = None,
    duplicates: str = "error",
    step: int | None = None,
    min_rows: int = 1,
) -> list[Entity]:
    """The rows of every entity after cleaning, one row at a time."""
    found = []
    dropping = [k for k, name in enumerate(features) if policy(nulls, name)[0] == "drop"]
    for name in sorted(set(frame["name"]), key=str.encode):
        mine = frame[frame["name"] == name]
        rows = [
            (t, [float(v) if np.isfinite(v) else np.nan for v in values], labels)
            for t, values, labels in zip(
                mine["t"], mine[list(features)].to_numpy(float).tolist(), _labels(mine, categorical), strict=True
            )
        ]
        rows.sort(key=lambda row: row[0])  # stable
        rows = _without_repeats(rows, duplicates)
        rows = [row for row in rows if not any(np.isnan(row[1][k]) for k in dropping)]
        if step is not None and rows:
            known = {row[0]: row for row in rows}
            nothing = ([np.nan] * len(features), (None,) * len(categorical))
            rows = [known.get(t, (t, *nothing)) for t in range(rows[0][0], rows[-1][0] + 1, step)]
        if len(rows) >= max(min_rows, 1):
            times, values, labels = zip(*rows, strict=True)
            found.append(Entity(name, np.array(times), np.array(values, float).reshape(len(rows), -1), list(labels)))
    return found


def _labels(frame: pd.DataFrame, categorical: Sequence[str]) -> list[tuple[str | None, ...]]:
    columns = [[None if v is None or v != v else str(v) for v in frame[name]] for name in categorical]
    return list(zip(*columns, strict=True)) if columns else [()] * len(frame)


def _without_repeats(rows: list[Any], how: str) -> list[Any]:
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        groups.setdefault(row[0], []).append(row)
    if how == "error":
        assert all(len(group) == 1 for group in groups.values())
    if how != "mean":
        return [group[-1 if how == "last" else 0] for group in groups.values()]
    return [(t, [_mean(cells) for cells in zip(*(row[1] for row in group), strict=True)], group[0][2])
            for t, group in groups.items()]  # fmt: skip


def _mean(cells: Sequence[float]) -> float:
    known = [cell for cell in cells if cell == cell]
    return sum(known) / len(known) if known else np.nan


def policy(nulls: dict[str, str] | None, name: str) -> tuple[str, float]:
    kind, _, value = (nulls or {}).get(name, (nulls or {}).get("*", "ffill")).partition(":")
    return kind, float(value or 0)


def filled(entity: Entity, features: Sequence[str], nulls: dict[str, str] | None, center: np.ndarray) -> np.ndarray:
    """What stands where nothing was observed, one cell at a time."""
    made = entity.values.copy()
    split = [sum(row >= cut for cut in entity.cuts) for row in range(len(made))]
    for k, name in enumerate(features):
        kind, constant = policy(nulls, name)
        known = [row for row in range(len(made)) if not np.isnan(entity.values[row, k])]
        for row in range(len(made)):
            if row in known:
                continue
            before = max((r for r in known if r < row), default=None)
            after = min((r for r in known if r > row), default=None)
            if kind == "value":
                made[row, k] = constant
            elif kind == "mask" or before is None:
                made[row, k] = center[k]
            else:
                low = entity.values[before, k]
                made[row, k] = low
                if kind == "interpolate" and after is not None and split[before] == split[after]:
                    share = (entity.time[row] - entity.time[before]) / (entity.time[after] - entity.time[before])
                    made[row, k] = low + share * (entity.values[after, k] - low)
    return made


def fitted(method: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Center and scale by scikit-learn; its rule for columns without values is NaN, ours 0 and 1."""
    if method == "none" or not len(values):
        return np.zeros(values.shape[1]), np.ones(values.shape[1])
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of columns without values
        if method == "standard":
            scaler = StandardScaler().fit(values)
            center, scale = scaler.mean_, scaler.scale_
        elif method == "minmax":
            scaler = MinMaxScaler().fit(values)
            center, scale = scaler.data_min_, 1 / scaler.scale_
        else:
            scaler = RobustScaler().fit(values)
            center, scale = scaler.center_, scaler.scale_
    empty = np.isnan(values).all(axis=0)
    return np.where(empty, 0, center), np.where(empty, 1, scale)


def read(store: mr.Store) -> dict[str, dict[str, Any]]:
    """Everything a store holds, by entity; in the order of its records."""
    names = np.asarray(store.columns["name"][:]).tolist()
    offsets = store.offsets[:].tolist()
    found: dict[str, dict[str, Any]] = {}
    for k, name in enumerate(names):
        found[name] = {
            column: np.asarray(
                store.columns[column][offsets[k] : offsets[k + 1]] if spec.axis else store.columns[column][k]
            )
            for column, spec in store.layout.columns.items()
            if column != "name"
        }
    return found


@dataclasses.dataclass(frozen=True)
class Twin:
    """Passed as one fixture, since test files cannot import each other."""

    START = START
    LAYOUTS = LAYOUTS
    NAMES = NAMES
    TIMES = tuple(STORED)
    KINDS = tuple(KINDS)
    Entity = Entity
    random_frame = staticmethod(random_frame)
    write = staticmethod(write)
    write_csv = staticmethod(write_csv)
    to_arrow = staticmethod(to_arrow)
    cleaned = staticmethod(cleaned)
    filled = staticmethod(filled)
    fitted = staticmethod(fitted)
    read = staticmethod(read)
    root: Path

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.root) as path:
            yield Path(path)

    @staticmethod
    @contextlib.contextmanager
    def small(
        *, slices: int = 7, chunk_rows: int = 11, batch_rows: int = 5, part_bytes: int = 1500, group_rows: int = 13
    ) -> Iterator[None]:
        """Everything that is cut by size is cut into small pieces."""
        with pytest.MonkeyPatch.context() as patch:
            for module in (index, index_files, clean, fit):
                patch.setattr(module, "slice_rows", lambda features: slices)
            patch.setattr(part, "SORT_BYTES", 96 * chunk_rows)
            patch.setattr(chunks, "CHUNK_ROWS", (batch_rows, batch_rows))
            patch.setattr(sources, "PART_BYTES", part_bytes)
            patch.setattr(fit, "GROUP_ROWS", group_rows)
            patch.setattr(shards, "MIN_SHARD", 1)
            patch.setattr(shards, "SHARDS", 5)
            patch.setattr(scaler, "_ROWS", 3)
            yield


@pytest.fixture(scope="session")
def twin(memory_folder: Path) -> Twin:
    return Twin(memory_folder)
