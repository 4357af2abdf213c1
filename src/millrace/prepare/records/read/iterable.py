"""Records that Python gives: dicts one after the other, or a Hugging Face ``Dataset``.

They cannot be read by workers, nor be known again without reading them. So they are read here, and become parts whose
names are hashes of what they hold: a call that continues reads them again, but writes only what is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from millrace.errors import ConfigError, SourceError
from millrace.prepare.parts import write_part
from millrace.prepare.quarantine import QUARANTINE
from millrace.prepare.records.formats.arrow_columns import batch_chunks, free_lengths, outline_columns
from millrace.prepare.records.formats.arrow_files import class_labels, plain_batch
from millrace.prepare.records.formats.format import SAMPLE, Chunk, Outline, Source
from millrace.prepare.records.formats.members import record_chunks
from millrace.prepare.records.options import RecordOptions
from millrace.prepare.records.read.part import NAME, UNREADABLE, PartDone, PartFiles, key_column, quarantine_line
from millrace.prepare.records.read.schema import Schema, build_schema, converted
from millrace.store import platform
from millrace.store.layout import Column, dtype_name

BATCH = 1000  # rows of a dataset at a time


class Spool:
    """What was read of an iterable: its schema, and the names of its parts in order."""

    def __init__(self, folder: Path | None, options: RecordOptions) -> None:
        self._folder, self._options = folder, options
        self._identity = xxhash.xxh3_128()
        self.keys: list[str] = []
        self.num_records = 0
        self.schema: Schema
        self.notes: list[str] = []
        self.classes: Mapping[str, Sequence[str]] = {}
        self.sizes: list[int] = []
        self._refused: list[bytes] = []  # lines about records that were left out since the last part
        self._first_refused = ""

    def read(self, records: Iterable[Any]) -> Spool:
        """Reads all records, and writes them as parts if there is a folder."""
        self._options.check_format("given by Python")
        kind = Dataset if is_dataset(records) else Dicts
        given: Dataset | Dicts = kind(records, self._refuse, self._options)
        outline = given.outline()
        self.classes = outline.classes
        source = Source(path=NAME, size=0, mtime_ns=0, ends="", location="", format="iterable")
        self.schema, self.notes = build_schema([(source, outline)], self._options, is_loose=True)
        waiting: list[Chunk] = []
        num_bytes = 0
        for chunk in given.chunks(self.schema.wanted):
            stored = converted(chunk, self.schema, self._refuse)
            waiting += stored
            num_bytes += sum(some.num_bytes for some in stored)
            if num_bytes >= self._options.part_bytes:
                self._write(waiting)
                waiting, num_bytes = [], 0
        if waiting or self._refused:
            self._write(waiting)
        return self

    def _refuse(self, place: str, problem: str) -> None:
        """Stops at a record that cannot be used, or lists it."""
        if self._options.on_error == "stop":
            raise SourceError(f"{NAME}, {place}: {problem}; fix it, or go on with --on-error skip", source=NAME)
        self._refused.append(quarantine_line(NAME, place, problem))
        self._first_refused = self._first_refused or f"{NAME}, {place}: {problem}"

    def _write(self, chunks: Sequence[Chunk]) -> None:
        """One part, named by what it holds."""
        state = xxhash.xxh3_128(repr(self.schema.columns).encode())
        state.update(repr(key_column(self._options, self.schema.columns)).encode())
        for chunk in chunks:
            for arrays in (chunk.columns, chunk.offsets):
                for array in arrays.values():
                    state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        state.update(b"".join(self._refused))
        key = state.hexdigest()
        self._identity.update(key.encode())
        self.num_records += sum(chunk.num_records for chunk in chunks)
        self.sizes.append(sum(chunk.num_bytes for chunk in chunks))
        if self._folder is not None:
            with platform.writing(self._folder):
                platform.make_dir(self._folder / "parts")
            write_part(
                self._folder, key, PartDone, lambda place: self._fill(place, len(self.keys), key, chunks), durable=False
            )
        self.keys.append(key)
        self._refused = []

    def _fill(self, place: Path, number: int, key: str, chunks: Sequence[Chunk]) -> PartDone:
        with contextlib.closing(PartFiles(place, self.schema.columns)) as files:
            for chunk in chunks:
                files.add(chunk, key_column(self._options, self.schema.columns))
            if self._refused:
                files.spill(QUARANTINE).write_bytes(b"".join(self._refused))
            return files.finish(number, key, {UNREADABLE: len(self._refused)}, None, self._first_refused)

    @property
    def source(self) -> Source:
        """All of it, as a plan names it."""
        return Source(
            path=NAME, size=self.num_records, mtime_ns=0, ends=self._identity.hexdigest(), location="", format="iterable"
        )  # fmt: skip


Refuse = Callable[[str, str], None]


class Dicts:
    """Dicts one after the other."""

    def __init__(self, records: Iterable[Any], refuse: Refuse, options: RecordOptions) -> None:
        self._refuse, self._options = refuse, options
        self._records = self._flat(records)
        # Copies: the caller may fill the same buffers for the next record.
        self._head = [
            (place, {name: _copy(value) for name, value in record.items()})
            for place, record in islice(self._records, SAMPLE)
        ]
        if not self._head:
            raise SourceError(f"{NAME} are none: the iterable is empty", source=NAME)

    def _flat(self, records: Iterable[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, record in enumerate(records):
            if isinstance(record, Mapping):
                yield f"record {number}", flat(record)
            else:
                problem = f"it is {type(record).__name__}; expected a dict with a value for each column"
                self._refuse(f"record {number}", problem)

    def outline(self) -> Outline:
        return outline_records([record for _, record in self._head], is_skipping=self._options.on_error == "skip")

    def chunks(self, wanted: Mapping[str, Column]) -> Iterator[Chunk]:
        return record_chunks(chain(self._head, self._records), wanted, self._options, self._refuse)


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


class Dataset:
    """A ``Dataset`` of Hugging Face, as Arrow batches; images stay bytes."""

    def __init__(self, dataset: Any, refuse: Refuse, options: RecordOptions) -> None:
        if not len(dataset):
            raise SourceError(f"{NAME} are none: the dataset is empty", source=NAME)
        self._tables = dataset.with_format("arrow")
        self._refuse, self.options, self.detail = refuse, options, b""

    def outline(self) -> Outline:
        batch = plain_batch(self._tables[: min(SAMPLE, len(self._tables))].combine_chunks().to_batches()[0])
        schema = self._tables.data.schema
        return Outline(
            outline_columns(batch.schema, self.options.columns), [(0, -1, 0)], free_lengths(batch), class_labels(schema)
        )

    def chunks(self, wanted: Mapping[str, Column]) -> Iterator[Chunk]:
        self.wanted = wanted
        batches = (
            plain_batch(batch)
            for table in self._tables.iter(batch_size=BATCH)
            for batch in table.combine_chunks().to_batches()
        )
        return batch_chunks(batches, 0, NAME, self)

    def refuse(self, source: str, place: str, problem: str) -> None:
        self._refuse(place, problem)


def is_dataset(records: Any) -> bool:
    return hasattr(records, "with_format") and hasattr(records, "features") and hasattr(records, "data")


def flat(record: Mapping[Any, Any]) -> dict[str, Any]:
    """A record with the values of dicts in it under ``name.key``."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": item for key, item in flat(value).items()}
        else:
            found[str(name)] = value
    return found


def outline_records(records: Sequence[Mapping[str, Any]], *, is_skipping: bool = False) -> Outline:
    """The columns of the first records: arrays and lists are rows, texts and numbers one item each.

    Where records that do not fit are skipped, a column whose values differ in kind is like that of the first record.
    """
    columns: dict[str, Column] = {}
    lengths = {}
    for name in records[0]:
        values = [record[name] for record in records if name in record]
        try:
            columns[name] = _column(name, values)
        except ConfigError:
            if not is_skipping or len(values) < 2:
                raise
            columns[name] = _column(name, values[:1])
        if columns[name].axis is not None and not isinstance(values[0], (bytes, bytearray, memoryview)):
            with contextlib.suppress(TypeError):  # of a value without a length, which is refused later
                lengths[name] = np.array([len(value) for value in values], np.int64)
    return Outline(columns, [(0, -1, 0)], lengths)


def _column(name: str, values: Sequence[Any]) -> Column:
    if isinstance(values[0], str):
        return Column("string", per="record")
    if isinstance(values[0], (bytes, bytearray, memoryview)):
        return Column("uint8", axis=name)
    try:
        arrays = [np.asarray(value) for value in values]
        # An empty list says nothing about its type.
        typed = [array for array in arrays if array.size or array.dtype.kind not in "fO"] or arrays
        result = np.result_type(*{array.dtype for array in typed})
        if result.kind == "f" and all(array.dtype.kind in "iu" for array in typed):
            raise ConfigError("numbers below 0 and from 2^63, which no integer type holds together")
        dtype = dtype_name(result)
        if dtype == "string":
            raise ConfigError("a list of texts")
    except (TypeError, ValueError, ConfigError) as problem:
        error = "lists in it are not equally long" if "inhomogeneous" in str(problem) else problem
        raise ConfigError(
            f"column {name!r} holds {type(values[0]).__name__}, which cannot be stored ({error}); give numbers, texts, bytes, "
            "or arrays of numbers"
        ) from problem
    shape = typed[0].shape
    if typed[0].dtype.kind == "O":
        raise ConfigError(
            f"column {name!r} holds {type(values[0]).__name__}; give numbers, texts, bytes or arrays of numbers"
        )
    return Column(dtype, per="record") if not shape else Column(dtype, shape[1:], axis=name)
