"""Store: rows and records as read-only arrays, whatever they lie in.

The same type for millrace's own format (reader.py), foreign layouts (foreign.py) and arrays in memory
(memory.py); they differ only in the ``Shards`` behind it. Views and feeds read stores through this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from millrace.errors import ConfigError, StoreCorrupt, did_you_mean
from millrace.lazy import attachment, cached_property
from millrace.ragged import Array, Int64s
from millrace.store.columns import ColumnArray
from millrace.store.folder import Folder
from millrace.store.layout import Layout
from millrace.store.manifest import Cuts, Manifest, digest
from millrace.store.offsets import MAX_JOINED, Offsets
from millrace.store.shards import Shards
from millrace.store.text_columns import DictionaryColumn, StringColumn
from millrace.store.times import read_times
from millrace.terminal import printable


class _Columns(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise KeyError(f"column {name!r} is unknown{did_you_mean(name, self)}; the store has {', '.join(self)}")


class Store:
    """Columns of rows and records, read-only and usable by many processes at once.

    ``columns`` maps names to arrays over all shards; ``offsets`` says which rows are whose record.
    A store pickles as its path and snapshot, so that sending it to a worker costs nothing.
    """

    condition: str | None = None  # what its records were chosen by, and which those are of the whole store
    chosen: Int64s | None = None

    def __init__(
        self,
        *,
        layout: Layout,
        counts: Int64s,
        shards: Shards,
        name_of: Callable[[int], str],
        kind: str,
        meta: Mapping[str, Any],
        splits: tuple[str, ...],
        split_of: Int64s,
        fingerprint: str | Callable[[], str],
        reopen: tuple[Callable[..., Store], tuple[Any, ...]],
        cuts: Cuts | None = None,
        path: str | None = None,
        manifest: Manifest | None = None,
        folder: Folder | None = None,
    ) -> None:
        self.layout, self.kind, self.path, self.manifest = layout, kind, path, manifest
        self.meta: Mapping[str, Any] = MappingProxyType(dict(meta))
        self.root: Store = self
        self.split_name: str | None = None
        self.time_cuts: Cuts | None = cuts
        self._splits, self._split_of = splits, split_of
        self._counts, self._ids = counts, np.arange(len(counts))
        self._shards, self._name_of = shards, name_of
        self._fingerprint, self._reopen, self._folder = fingerprint, reopen, folder

    # What there is.

    @property
    def num_records(self) -> int:
        return int(self._starts[-1, 0])

    @property
    def num_rows(self) -> int:
        """Rows of the primary axis."""
        return int(self._starts[-1, 1])

    @property
    def num_shards(self) -> int:
        return len(self._counts)

    @property
    def num_bytes(self) -> int:
        return int(self.layout.file_bytes(self._counts).sum())

    @property
    def axes(self) -> tuple[str, ...]:
        return self.layout.axes

    def axis_rows(self, axis: str) -> int:
        return int(self._starts[-1, self._axis(axis)])

    @property
    def lookahead(self) -> int:
        """How many batches ahead a feed names the files it will read (``Shards.expect``)."""
        return self._shards.lookahead

    def describe_tier(self) -> str | None:
        """How files came from where the store lies (``Shards.describe``)."""
        return self._shards.describe()

    @property
    def is_limited(self) -> bool:
        """Whether only the files of a batch or two can be mapped at once (``Shards.is_limited``)."""
        return self._shards.is_limited

    @property
    def splits(self) -> tuple[str, ...]:
        """The names ``split`` knows: by time where the store has cuts, else sets of shards."""
        if self.split_name is not None:
            return ()
        return self.time_cuts.splits if self.time_cuts is not None else self._splits

    @cached_property
    def fingerprint(self) -> str:
        """What the store's contents are, whatever its path; checkpoints compare it."""
        return self._fingerprint() if callable(self._fingerprint) else self._fingerprint

    # The data.

    @cached_property
    def columns(self) -> Mapping[str, ColumnArray | StringColumn | DictionaryColumn]:
        """Every column by name; nothing is read before it is indexed."""
        return MappingProxyType(_Columns({name: self._column(name) for name in self.layout.columns}))

    def _column(self, name: str) -> ColumnArray | StringColumn | DictionaryColumn:
        column = self.layout.columns[name]
        file = self.layout.file_of[name]
        spec = self.layout.files[file]
        starts, decode = self._starts[:, spec.counter], column.dtype == "bfloat16"
        array = ColumnArray(self._shards, self._ids, file, starts, spec.dtype, spec.tail, decode=decode)
        if column.dtype == "string":
            return StringColumn(name, array, lambda: self.axis_index(name))
        if column.dtype == "dictionary":
            return DictionaryColumn(name, array, column.values or ())
        return array

    @property
    def offsets(self) -> Int64s:
        """Records of the primary axis: rows ``offsets[i]:offsets[i + 1]`` are record i."""
        return self.axis_offsets(self.layout.primary)

    def axis_offsets(self, axis: str) -> Int64s:
        """The offsets of one axis over all shards, kept: 8 bytes for each record where they lie in several shards."""
        return self.axis_index(axis).joined

    def axis_index(self, axis: str) -> Offsets:
        """The offsets of one axis where the shards have them; they are mapped, and take no memory for each record."""
        k = self._axis(axis)
        index = self._indexes.get(axis)
        if index is None:
            index = self._indexes[axis] = self._make_index(k)
        return index

    @cached_property
    def _indexes(self) -> dict[str, Offsets]:
        return {}

    def kept_table(self, what: str, make: Callable[[], Int64s]) -> Int64s:
        """A table that follows from what this store holds, kept in the cache of this machine; one in memory makes it anew."""
        if self.root.path is None:
            return make()
        from millrace.store.kept_tables import kept_table

        return kept_table(digest("table", self.fingerprint, what), make)

    def record_spans(self, axis: str | None = None) -> tuple[Int64s, Int64s]:
        """Where the rows of each record begin and end on an axis, by default the primary one."""
        offsets = self.axis_offsets(axis or self.layout.primary)
        return offsets[:-1], offsets[1:]

    def _make_index(self, k: int) -> Offsets:
        firsts, rows = self._starts[:, 0], self._starts[:-1, k]
        lengths = np.diff(firsts).tolist()
        own = ((int(shard), length) for shard, length in zip(self._ids, lengths, strict=True))
        pieces: Iterator[Any] = (self._shards.rows(shard, k - 1, 0, length + 1) for shard, length in own)
        if len(lengths) == 1:
            return Offsets.of(next(pieces))
        if self.num_records > MAX_JOINED and not self._shards.is_limited:
            return Offsets(list(pieces), firsts, rows)
        joined = np.zeros(self.num_records + 1, np.int64)
        for piece, first, row in zip(pieces, firsts.tolist(), rows.tolist(), strict=False):
            np.add(piece[1:], row, out=joined[first + 1 : first + len(piece)])
        joined.flags.writeable = False
        return Offsets.of(joined)

    @cached_property
    def _starts(self) -> Int64s:
        """(shards + 1, 1 + axes): the first record and row of each shard."""
        return np.concatenate((np.zeros((1, self._counts.shape[1]), np.int64), np.cumsum(self._counts, axis=0)))

    def _axis(self, axis: str) -> int:
        if axis not in self.layout.axes:
            raise ConfigError(f"axis {axis!r} is unknown; this store has {', '.join(self.layout.axes)}")
        return 1 + self.layout.place_of[axis]

    # Text.

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer the store was prepared with."""
        described = None if self.manifest is None else self.manifest.tokenizer
        if described is None or self._folder is None:
            raise ConfigError("this store keeps no tokenizer; only stores made by millrace prepare text do")
        return attachment("tokenizer")(self._folder, described)

    def encode(self, text: str) -> Array:
        """The ids of a text."""
        return self.tokenizer.encode(text)  # type: ignore[no-any-return]

    def decode(self, ids: Any) -> str:
        """The text of ids."""
        return self.tokenizer.decode(ids)  # type: ignore[no-any-return]

    # Series.

    @property
    def scaling(self) -> Any:
        """The ``Scaling`` the values were stored with: center and scale of each feature, and the statistics."""
        return self._scaling.scaling

    @cached_property
    def _scaling(self) -> Any:
        return attachment("scaling")(self)

    def scale(self, rows: Any, entity: Any = None) -> Array:
        """New rows (..., features) in original units as the store would hold them, float32.

        Where every entity has its own scaling, ``entity`` is a name, a record number, or one for each of the first axis.
        """
        return self._scaling.scale(rows, entity)  # type: ignore[no-any-return]

    def inverse(self, y: Any, features: Any = None, entity: Any = None) -> Array:
        """Scaled values (..., features), such as predictions, in original units, float64.

        ``features`` names or numbers those on the last axis; without, they are all features or the store's target.
        """
        return self._scaling.inverse(y, features, entity)  # type: ignore[no-any-return]

    def times(self, rows: Any = None) -> Array:
        """The times of some rows (default: all) as numpy datetime64, in the store's one unit ``meta["time"]["unit"]``.

        The column ``time`` counts that unit from 1970-01-01, in UTC where the source named a zone. Without a unit the
        source had plain numbers, and they are returned.

        >>> from millrace import from_arrays
        >>> arrays = {"values": [1.0, 2.0], "time": [19723, 19724]}
        >>> from_arrays(arrays, [0, 2], kind="series", meta={"time": {"unit": "D"}}).times([1]).tolist()
        [datetime.date(2024, 1, 2)]
        """
        return read_times(self, rows)

    # Where a row lies, for explanations.

    def shard_name(self, shard: int) -> str:
        return self._name_of(int(self._ids[shard]))

    def locate(self, rows: Int64s, axis: str | None = None) -> tuple[Int64s, Int64s]:
        """The shard of each row and its place in that shard."""
        starts = self._starts[:, self._axis(axis or self.layout.primary)]
        shards = np.searchsorted(starts, rows, side="right") - 1
        return shards, rows - starts[shards]

    def locate_records(self, records: Int64s) -> tuple[Int64s, Int64s]:
        """The shard of each record, empty ones too, and the first row of that shard."""
        shards = np.searchsorted(self._starts[:, 0], records, side="right") - 1
        return shards, self._starts[shards, 1]

    # Splits.

    def split(self, name: str) -> Store:
        """One split. Sets of shards are numbered from row 0; a split by time keeps this store's rows and has ``cuts``."""
        if name not in self.splits:
            if name == "train" and not self.splits and self.split_name in (None, "train"):
                return self
            known = f"this store has {', '.join(self.splits)}" if self.splits else "this is a split or has none"
            raise ConfigError(f"split {name!r} is unknown{did_you_mean(name, self.splits)}; {known}")
        chosen = None if self.time_cuts is not None else np.flatnonzero(self._split_of == self._splits.index(name))
        part = self._part(chosen, "split", name)
        part.split_name = name
        part._reopen = (Store.split, (self, name))
        return part

    def shard(self, number: int) -> Store:
        """One shard as a store whose records and rows count from 0: what a sample of a large store reads.

        >>> from millrace import from_arrays
        >>> from_arrays({"values": [1.0, 2.0]}, offsets=[0, 1, 2]).shard(0).num_records
        2
        """
        if not 0 <= number < self.num_shards:
            raise ConfigError(f"shard {number} is unknown; this store has {self.num_shards}, counted from 0")
        part = self._part(np.array([number]), "shard", self.shard_name(number))
        part._reopen = (Store.shard, (self, number))
        return part

    def shard_split(self, number: int) -> str | None:
        """The split that a shard belongs to; None where there are no splits, or splits by time."""
        if self.time_cuts is not None or not self._splits:
            return None
        return self._splits[int(self._split_of[number])]

    def _part(self, shards: Int64s | None, what: str, name: str) -> Store:
        """This store with some of its shards (default: all), known by another fingerprint."""
        part = object.__new__(Store)
        part.__dict__.update({key: value for key, value in self.__dict__.items() if key not in _CACHED})
        part._fingerprint = lambda: digest(what, self.fingerprint, name)
        if shards is not None:
            part._ids, part._counts, part._split_of = self._ids[shards], self._counts[shards], self._split_of[shards]
        return part

    @property
    def whole(self) -> Store:
        """The store (or split) whose rows these are; another one after ``where``."""
        return self

    def where(self, condition: str) -> Store:
        """The records for which a condition on record columns holds, numbered from 0. Rows keep their numbers.

        ``n_hits`` is how many rows of the column (or axis) ``hits`` a record has. Comparisons are joined by ``and``, ``or``,
        ``not`` and brackets; ``in (1, 2)`` takes several values. The text is parsed, never run.

        >>> from millrace import from_arrays
        >>> store = from_arrays({"hits": np.arange(6.0), "label": [3, 3, 1]}, offsets=[0, 1, 4, 6])
        >>> store.where("label == 3 and n_hits > 1").chosen.tolist()
        [1]
        """
        from millrace.store.selected import select

        return select(self, condition)

    @cached_property
    def cuts(self) -> tuple[Int64s, Int64s] | None:
        """For a split by time: where in each record it begins and ends, in rows of that record."""
        if self.time_cuts is None or self.split_name is None:
            return None
        k, name = self.time_cuts.splits.index(self.split_name), self.time_cuts.column
        zeros, rows = np.zeros(self.num_records, np.int64), np.diff(self.offsets)
        edges = np.column_stack((zeros, np.asarray(self.columns[name]), rows))
        falls = np.flatnonzero(np.any(edges[:, 1:] < edges[:, :-1], axis=1))
        if len(falls):  # a cut beyond its record would reach into the next
            raise StoreCorrupt(
                f"cuts of record {falls[0]} are {edges[falls[0], 1:-1].tolist()}; expected rising rows of its "
                f"{edges[falls[0], -1]}: prepare the store again", column=name,
            )  # fmt: skip
        return edges[:, k], edges[:, k + 1]

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen

    def __len__(self) -> int:
        return self.num_records

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a store is not iterable; make a view of it (Records, Windows, Blocks) or index its columns")

    def __repr__(self) -> str:
        where = printable(self.path or "in memory")
        split = f", split {self.split_name!r}" if self.split_name else ""
        columns = ", ".join(f"{name} {c.dtype}{list(c.shape) or ''}" for name, c in self.layout.columns.items())
        return f"<Store {where}{split}: {self.num_records:,} records, {self.num_rows:,} rows; {columns}>"


_CACHED = ("columns", "tokenizer", "_scaling", "_indexes", "_starts", "cuts", "fingerprint")
