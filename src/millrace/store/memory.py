"""Stores in memory: the same type as on disk, over arrays the caller has.

Small data needs no files; foreign layouts (foreign.py) are also this, over mapped arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from millrace.errors import ConfigError
from millrace.identity import canonical, digest
from millrace.ragged import Array, Int64s, Ragged, as_offsets
from millrace.store import platform
from millrace.store.layout import BLOCK_BYTES, Column, Layout
from millrace.store.manifest import KINDS, VERSION, Cuts, check_cuts
from millrace.store.shards import Shards
from millrace.store.store import Store
from millrace.store.strict_json import check_json
from millrace.store.values import Normaliser

if TYPE_CHECKING:
    import pandas


class ArrayShards(Shards):
    """Shards that are arrays already: ``arrays[shard][file]`` in the order of ``layout.files``."""

    def __init__(self, arrays: list[list[Array]]) -> None:
        self._arrays = arrays

    def rows(self, shard: int, file: int, start: int, stop: int, *, wait: bool = True) -> Array:
        return self._arrays[shard][file][start:stop]

    def array(self, shard: int, file: int, *, random: bool = False) -> Array:
        whole = self._arrays[shard][file]
        return platform.random_twin(whole) if random else whole

    def descriptor(self, shard: int, file: int) -> None:
        return None

    def will_need(self, files: Iterable[tuple[int, int]]) -> bool:
        return True  # they are there already


def array_store(
    layout: Layout,
    shards: list[tuple[str, list[Array]]],
    *,
    kind: str,
    meta: Mapping[str, Any] | None = None,
    splits: tuple[str, ...] = (),
    split_of: list[int] | None = None,
    cuts: Cuts | None = None,
    path: str | None = None,
    fingerprint: str | Callable[[], str] | None = None,
    reopen: tuple[Callable[..., Store], tuple[Any, ...]] | None = None,
) -> Store:
    """A store over arrays in storage dtypes; each shard is (name, arrays in the order of ``layout.files``)."""
    arrays = [[array.view() for array in files] for _, files in shards]
    for array in (array for files in arrays for array in files):
        array.flags.writeable = False
    rows = [[len(files[0]) - 1, *(int(files[k][-1]) for k in range(len(layout.axes)))] for files in arrays]
    counts = np.array(rows, np.int64).reshape(-1, 1 + len(layout.axes))
    own = split_of if split_of is not None else [0] * len(shards)
    columns = {name: repr(column) for name, column in layout.columns.items()}
    identity = {"version": VERSION, "kind": kind, "columns": columns, "splits": list(splits), "cuts": repr(cuts)}
    options: dict[str, Any] = {
        "kind": kind,
        "meta": dict(meta or {}),
        "splits": splits,
        "split_of": split_of,
        "cuts": cuts,
    }
    return Store(
        layout=layout, counts=counts, shards=ArrayShards(arrays), name_of=lambda shard: shards[shard][0], kind=kind,
        meta=meta or {}, splits=splits, split_of=np.array(own, np.int64), cuts=cuts, path=path,
        reopen=reopen or (partial(array_store, **options), (layout, shards)),
        fingerprint=fingerprint or (lambda: _fingerprint(identity, np.column_stack((own, counts)), arrays)),
    )  # fmt: skip


def _fingerprint(identity: dict[str, Any], shards: Int64s, arrays: list[list[Array]]) -> str:
    """The identity of the contents, by the rule of stores on disk."""
    hashes = []
    for file in (file for files in arrays for file in files):
        data = np.ascontiguousarray(file).reshape(-1).view(np.uint8).data
        hashes += [xxhash.xxh3_64_hexdigest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    return digest("memory", canonical(identity), shards.astype("<i8").tobytes(), "".join(hashes))


def from_arrays(
    columns: Mapping[str, Any],
    offsets: Any = None,
    *,
    per: Mapping[str, str] | None = None,
    kind: str = "records",
    meta: Mapping[str, Any] | None = None,
    cuts: Cuts | None = None,
) -> Store:
    """A store in memory over these arrays. They are not copied (offsets are): do not change them afterwards.

    An array as long as the rows is a row column; one as long as the records is a record column. If both fit, it is a
    row column unless ``per`` says otherwise. A ``Ragged`` brings its own axis. Without ``offsets`` all rows are one
    record.

    >>> store = from_arrays({"values": np.arange(12.0), "label": [0, 1, 1]}, offsets=[0, 5, 7, 12])
    >>> store.num_records, store.num_rows, store.columns["label"][1:].tolist()
    (3, 12, [1, 1])
    """
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r}; expected one of {', '.join(KINDS)}")
    given = {name: value if isinstance(value, Ragged) else _as_array(name, value) for name, value in columns.items()}
    if unknown := [name for name in per or {} if name not in given]:
        raise ConfigError(f"per= names {unknown}, which are not among the columns {list(given)}")
    plain = [len(value) for value in given.values() if not isinstance(value, Ragged)]
    ragged = {name: value for name, value in given.items() if isinstance(value, Ragged)}
    if offsets is not None:
        checked = as_offsets(offsets)
    elif ragged:
        checked = next(iter(ragged.values())).offsets
    elif plain:
        checked = np.array([0, plain[0]], np.int64)
    else:
        raise ConfigError("no columns; give at least one array")
    axes: dict[str, Int64s] = {"rows": checked}
    declared: dict[str, Column] = {}
    arrays: dict[str, Any] = {}
    for name, value in given.items():
        declared[name], arrays[name] = _declare(name, value, axes, (per or {}).get(name))
    layout = Layout(declared)
    if offsets is None and all(column.per == "record" for column in declared.values()):
        axes["rows"] = np.zeros(plain[0] + 1, np.int64)  # records without rows
    if offsets is not None and "rows" not in layout.axes:
        raise ConfigError("offsets= given, but no column has them: each is a Ragged or per record; leave offsets out")
    normaliser = Normaliser(layout)
    stored, all_offsets = normaliser.records(arrays, {axis: axes[axis] for axis in axes if axis in layout.axes})
    if cuts is not None:
        check_cuts(cuts, layout)
    if meta is not None:
        check_json(dict(meta), "meta")
    layout = Layout(normaliser.columns())
    # Offsets were checked and say where rows lie: a copy of them, which nobody writes into.
    files = [stored[file.column] if file.column else all_offsets[str(file.axis)].copy() for file in layout.files]
    return array_store(layout, [("memory", files)], kind=kind, meta=meta, cuts=cuts)


def _as_array(name: str, value: Any) -> Array:
    array = np.asarray(value)
    if array.dtype.kind in "US" and not isinstance(value, np.ndarray):
        array = np.asarray(value, object)  # numpy's own text drops NULs at the end, and makes text of numbers
    if array.ndim == 0:
        raise ConfigError(f"column {name!r} is the single value {value!r}; expected one item per row or record")
    return array.astype(object) if array.dtype.kind in "UT" else array


def _declare(name: str, value: Any, axes: dict[str, Int64s], per: str | None) -> tuple[Column, Any]:
    """The column a value makes, adding its axis where it brings one."""
    if isinstance(value, Ragged):
        shared = next((axis for axis, known in axes.items() if np.array_equal(known, value.offsets)), None)
        if shared is None:
            if name in axes:
                raise ConfigError(f"column {name!r} brings its own axis, but offsets= has that name; rename it")
            shared = name
            axes[name] = value.offsets
        return Column(value.values.dtype.newbyteorder("="), value.values.shape[1:], axis=shared), value.values
    rows, records = int(axes["rows"][-1]), len(axes["rows"]) - 1
    if per is None:
        if len(value) not in (rows, records):
            raise ConfigError(f"column {name!r} has {len(value)} items; expected {rows} (rows) or {records} (records)")
        per = "row" if len(value) == rows else "record"
    if value.dtype == object:
        return Column("string" if per == "record" else "dictionary", per=per), value
    return Column(value.dtype.newbyteorder("="), value.shape[1:], per=per), value


def from_pandas(
    frame: pandas.DataFrame, *, entity: str, time: str, features: list[str] | None = None, dtype: str = "float32"
) -> Store:
    """A series store in memory: one record per entity (by name), its rows by time, ``values`` in ``dtype``.

    ``features`` are the columns of ``values`` in order (default: every other numeric column). Nothing is
    scaled. Times that are dates are kept as int64 nanoseconds.
    """
    for column in (entity, time):
        if column not in frame.columns:
            raise ConfigError(f"column {column!r} is not in the frame; it has {', '.join(map(str, frame.columns))}")
        if frame[column].isna().any():
            row = int(frame[column].isna().to_numpy().argmax())
            raise ConfigError(f"column {column!r} has a missing value in row {row}; drop it")
    if not frame.columns.is_unique:
        raise ConfigError(f"two columns of the frame have one name: {', '.join(map(str, frame.columns))}; rename one")
    labels = features or [name for name in frame.select_dtypes("number").columns if name not in (entity, time)]
    if not labels:
        raise ConfigError("no numeric columns besides entity and time; give features=")
    names = frame[entity].astype(str).to_numpy(object)
    times, is_date = _times(frame[time])
    distinct, codes = np.unique(np.array([str(name).encode() for name in names], object), return_inverse=True)
    rows = np.lexsort((times, codes))
    offsets = np.concatenate(([0], np.cumsum(np.bincount(codes, minlength=len(distinct)))))
    columns = {
        "values": _values(frame, labels, dtype)[rows],
        "time": times[rows],
        "name": np.array([name.decode() for name in distinct], object),
    }
    meta = {"features": [str(label) for label in labels], "time": {"unit": "ns" if is_date else None}}
    per = {"values": "row", "time": "row", "name": "record"}
    return from_arrays(columns, offsets, per=per, kind="series", meta=meta)


def _times(column: pandas.Series[Any]) -> tuple[Array, bool]:
    """Times as numbers, and whether they were dates (then nanoseconds, in UTC where they have a zone)."""
    is_date = column.dtype.kind == "M"
    try:
        times = column.dt.as_unit("ns").astype("int64").to_numpy() if is_date else column.to_numpy()
    except ValueError as error:
        raise ConfigError(f"column {column.name!r} has a date beyond int64 nanoseconds: {error}") from error
    if times.dtype.kind not in "iuf":
        raise ConfigError(f"column {column.name!r} is {column.dtype}; expected numbers or dates (pandas.to_datetime)")
    return times, is_date


def _values(frame: pandas.DataFrame, labels: list[Any], dtype: str) -> Array:
    if unknown := [label for label in labels if label not in frame.columns]:
        raise ConfigError(f"features {unknown} are not in the frame; it has {', '.join(map(str, frame.columns))}")
    for label in labels:
        if frame[label].dtype.kind not in "iufb":
            raise ConfigError(f"feature {label!r} is {frame[label].dtype}; expected numbers")
    if dtype in ("float16", "float32", "float64"):
        values: Array = frame[labels].to_numpy(dtype)
        return values
    column = Column(dtype, (len(labels),))
    if column.storage.kind not in "iu" or dtype == "bfloat16":
        raise ConfigError(f"dtype={dtype!r}; expected a float or integer type of numpy")
    return Normaliser(Layout({"values": column})).cast("values", frame[labels].to_numpy())
