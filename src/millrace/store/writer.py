"""StoreWriter: append records or whole arrays, and a store is there when the ``with`` block ends.

Shards are cut where the next record would pass ``shard_bytes``, a rule of the records alone: the same
records make the same bytes however they were handed over.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import ConfigError, StoreError
from millrace.ragged import Array, Int64s
from millrace.store import manifest as manifests
from millrace.store.gc import sweep
from millrace.store.layout import Column, Layout, check_name
from millrace.store.manifest import KINDS, Cuts
from millrace.store.pending import Pending, part, pieces, record_bytes
from millrace.store.publish import Partial
from millrace.store.reader import read_base
from millrace.store.shard import ShardEntry, ShardWriter, shard_name
from millrace.store.snapshot import Base, append_fields
from millrace.store.strict_json import check_json
from millrace.store.values import Normaliser

SHARD_BYTES = 256 << 20
PENDING_BYTES = 4 << 20  # appended records are joined to about this many bytes before they are written


class StoreWriter:
    """Writes a store. It appears when the ``with`` block ends; after an exception there is none.

    ``append=True`` adds to an existing store as a new snapshot. ``resume=True`` continues a killed run: make
    the same calls again, and records that are on disk are skipped. ``splits`` fixes the order of splits.

    >>> import tempfile, millrace as mr
    >>> path = tempfile.mkdtemp()
    >>> columns = {"hits": mr.Column("float32", (2,)), "label": mr.Column("int64", per="record")}
    >>> with mr.StoreWriter(path, kind="records", columns=columns) as writer:
    ...     writer.append({"hits": np.ones((3, 2)), "label": 7})
    ...     writer.extend({"hits": np.zeros((5, 2)), "label": [1, 2]}, offsets=[0, 4, 5])
    >>> store = mr.open_store(path)
    >>> store.num_records, store.num_rows, store.columns["label"][:].tolist()
    (3, 8, [7, 1, 2])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Mapping[str, Column] | None = None,
        kind: str | None = None,
        splits: Sequence[str] = (),
        shard_bytes: int = SHARD_BYTES,
        meta: Mapping[str, Any] | None = None,
        cuts: Cuts | None = None,
        append: bool = False,
        resume: bool = False,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        out = self._out = Path(os.path.realpath(path))  # a link may lead there: the rename must not replace it
        self.fingerprint: str | None = None
        self._begun = self._closed = False
        self._keep_partial = resume
        self._shard_bytes = shard_bytes
        self._provenance = dict(provenance or {})
        self._open: dict[str, ShardWriter] = {}
        self._pending: dict[str, Pending] = {}
        self._next_numbers: dict[str, int] = {}  # of shards, by split
        self._skip: dict[str, int] = {}
        self._base: Base | None = None
        self._is_torn = False
        self._added: set[tuple[str, int]] = set()
        self._handed: set[tuple[str, int]] = set()  # shards given out by shard() and not yet added
        if not isinstance(shard_bytes, int) or shard_bytes < 1:
            raise ConfigError(f"shard_bytes={shard_bytes!r}; expected a number of bytes, 1 or more")
        if isinstance(splits, str):
            raise ConfigError(f"splits={splits!r}; expected a tuple of names, such as ({splits!r},)")
        check_json(self._provenance, "provenance")
        if append and (kind, cuts) != (None, None):
            raise ConfigError("kind= and cuts= cannot be changed by appending; leave them out")
        fields = {
            "kind": kind or "records",
            "columns": columns,
            "splits": splits,
            "meta": dict(meta or {}),
            "cuts": cuts,
        }
        if not append:
            self._describe(fields)
        self._partial = Partial(out, append=append)
        self._partial.acquire()
        try:
            if append:
                self._base = read_base(out)  # under the lock: what another append committed is in it
                self._describe(append_fields(fields, self._base.manifest, out))
            declared = {name: repr(column) for name, column in self._fields["columns"].items()}
            plan = {"kind": self._fields["kind"], "columns": declared, "shard_bytes": shard_bytes}
            self._partial.begin(plan, self._values.layout, self._base, resume=resume)
            if append:
                sweep(out, spare=self._partial.entries)
        except BaseException:
            self._give_up()
            raise
        self._begun = True
        for entry in (*self._partial.entries.values(), *self._partial.committed):
            self._skip[entry.split] = self._skip.get(entry.split, 0) + entry.records

    def _describe(self, fields: dict[str, Any]) -> None:
        if fields["kind"] not in KINDS:
            raise ConfigError(f"kind={fields['kind']!r}; expected one of {', '.join(KINDS)}")
        if not isinstance(fields["columns"], Mapping) or not fields["columns"]:
            raise ConfigError(f"columns={fields['columns']!r}; expected a dict with a Column for each name")
        for name, column in fields["columns"].items():
            if not isinstance(column, Column):
                raise ConfigError(f"column {name!r} is {column!r}; expected a Column, such as Column('float32')")
        for split in fields["splits"]:
            check_name(split, "split")
        layout = Layout(fields["columns"])
        if fields["cuts"] is not None:
            manifests.check_cuts(fields["cuts"], layout)
        check_json(fields["meta"], "meta")
        old = {} if self._base is None else self._base.manifest.columns
        self._values = Normaliser(layout, {name: entry.values or () for name, entry in old.items()})
        self._fields = fields

    def append(self, record: Mapping[str, Any], split: str = "train") -> None:
        """Adds one record: arrays of (rows, ...) for row columns, one value for record columns."""
        self._check_open(split)
        if not isinstance(record, Mapping):
            raise ConfigError(f"a record is {type(record).__name__}; expected a dict with a value for each column")
        arrays, lengths = self._values.record(record)  # also when skipped: dictionaries grow as they did
        if self._skipped(split, 1):
            return
        pending = self._pending.get(split)
        if pending is None:
            pending = self._pending[check_name(split, "split")] = Pending(self._values.layout)
        pending.add(arrays, lengths)
        if pending.num_bytes >= PENDING_BYTES:
            self._flush(split)

    def extend(self, columns: Mapping[str, Any], offsets: Any, split: str = "train") -> None:
        """Adds many records at once; ``offsets`` has one more than there are records (by axis if several)."""
        self._check_open(split)
        check_name(split, "split")
        self._flush(split)
        for number, (some, local) in enumerate(pieces(self._values.layout, columns, offsets)):
            try:
                arrays, checked = self._values.records(some, local)
            except ConfigError:
                self._is_torn = number > 0  # some of these records are written already
                raise
            skip = self._skipped(split, len(checked[self._values.layout.primary]) - 1)
            self._write(split, arrays, checked, skip)

    def shard(self, number: int, split: str = "train") -> ShardWriter:
        """A writer for one shard of its own; until its first write it pickles, so other processes may use it.

        Hand what its ``finish()`` returns to ``add``; the numbers give the order of the shards.
        """
        columns = self._values.layout.columns
        if undeclared := [name for name, own in columns.items() if own.dtype == "dictionary" and own.values is None]:
            raise ConfigError(f"dictionary columns {undeclared} need values= when several writers share a store")
        if split in self._open or split in self._pending:
            raise ConfigError(f"split {split!r} is being appended to; write it by shard() or by append(), not both")
        number += 0 if self._base is None else self._base.next_number(split)
        if number < 0 or (split, number) in self._added:
            raise ConfigError(f"shard {number} of split {split!r} was added or is negative; use each number once")
        self._handed.add((split, number))
        return ShardWriter(self._partial.shards, check_name(split, "split"), number, columns)

    def add(self, entry: ShardEntry) -> None:
        """Takes a finished shard into the store."""
        self._check_open()
        if shard_name(entry.split, entry.number) in self._partial.entries:
            self._skipped(entry.split, entry.records)  # a run that continues gives it again
        self._partial.add(entry)
        self._next_numbers.pop(entry.split, None)
        self._handed.discard((entry.split, entry.number))
        self._added.add((entry.split, entry.number))

    def commit(self) -> str:
        """Publishes the store and returns its fingerprint; the ``with`` block does this at its end."""
        self._check_open()
        if self._is_torn:
            raise ConfigError("an extend() was refused half-way, after some of its records: write the store again")
        if self._handed:
            names = sorted(shard_name(*handed) for handed in self._handed)
            raise ConfigError(f"shards {names} were given out but never added; add() what their finish() returned")
        if left := {split: count for split, count in self._skip.items() if count}:
            raise ConfigError(
                f"this run gave fewer records than the one it continues: {left} of those on disk did not come again; "
                "make the same calls, or remove the .partial folder to start over"
            )
        for split in list(self._pending):
            self._flush(split)
        for split in list(self._open):
            self._cut(split)
        self._fields["columns"] = self._values.columns()
        if self._base is not None and not self._partial.entries:
            self._partial.close(remove=True)
            self.fingerprint = self._base.manifest.fingerprint
        else:
            self._fields["splits"] = self._fields["splits"] or (() if self._partial.entries else ("train",))
            self.fingerprint = self._partial.publish(self._fields, self._base, self._provenance)
        self._closed = True
        return self.fingerprint

    def abort(self) -> None:
        """Leaves nothing, or with ``resume=True`` what the next run continues."""
        if self._closed or not self._partial.mine:
            return
        self._closed = True
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._partial.close, remove=not self._keep_partial)
            if self._begun and self._base is not None:
                last_first.callback(sweep, self._out, spare=self._partial.entries if self._keep_partial else ())
            for shard in self._open.values():
                last_first.callback(shard.abandon)

    def _give_up(self) -> None:
        """Aborts after an error; the user sees that error, whatever fails here."""
        with contextlib.suppress(OSError, StoreError):
            self.abort()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if kind is not None:
            self._give_up()
        elif not self._closed:
            try:
                self.commit()
            except BaseException:
                self._give_up()
                raise

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not getattr(self, "_closed", True) and self._begun and not _is_ending():
            self._give_up()  # dropped without an end: the lock must not outlive it

    def _check_open(self, split: str | None = None) -> None:
        if split is not None and any(handed == split for handed, _ in self._handed):
            raise ConfigError(f"split {split!r} is written by shard(); write it by shard() or by append(), not both")
        if self._closed:
            raise ConfigError("this StoreWriter is closed; open another, with append=True to add more")
        if not self._partial.mine:
            raise ConfigError("this StoreWriter belongs to the parent process; give a child the shard(number) to write")

    def _skipped(self, split: str, records: int) -> int:
        """How many of these records an earlier run already made durable."""
        skip = min(self._skip.get(split, 0), records)
        if skip:
            self._skip[split] -= skip
        return skip

    def _flush(self, split: str) -> None:
        pending = self._pending.pop(split, None)
        if pending is not None:
            self._write(split, *pending.join(), skip=0)

    def _write(self, split: str, arrays: dict[str, Array], offsets: dict[str, Int64s], skip: int) -> None:
        layout = self._values.layout
        num_records = len(offsets[layout.primary]) - 1
        ends = np.cumsum(record_bytes(layout, offsets))
        first = skip
        while first < num_records:
            shard = self._open.get(split)
            if shard is None:
                shard = self._open[split] = self._next_shard(split)
            done = int(ends[first - 1]) if first else 0
            room = self._shard_bytes - shard.num_bytes
            last = int(np.searchsorted(ends, done + room, side="right"))
            if last <= first:
                if shard.num_bytes:
                    self._cut(split)
                    continue
                last = first + 1  # a record larger than a shard has one to itself
            shard.write(*part(layout, arrays, offsets, first, last))
            shard.num_bytes += int(ends[last - 1]) - done
            first = last

    def _next_shard(self, split: str) -> ShardWriter:
        if split not in self._next_numbers:  # one look at all shards, not one for each
            start = 0 if self._base is None else self._base.next_number(split)
            mine = (entry.number for entry in self._partial.entries.values() if entry.split == split)
            self._next_numbers[split] = max(mine, default=start - 1) + 1
        number = self._next_numbers[split]
        self._next_numbers[split] += 1
        return ShardWriter(self._partial.shards, split, number, self._values.layout.columns)

    def _cut(self, split: str) -> None:
        self._partial.add(self._open.pop(split).finish())
