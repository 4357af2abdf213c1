"""What a format of records offers, and the chunks in which it gives them.

A format finds out what a file holds (``outline``), says where it may be cut, and reads a slice of it as chunks: arrays
with offsets, as the store has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from millrace.distribution import install_command
from millrace.errors import ConfigError, MillraceError, SourceError
from millrace.prepare.files import InputFile
from millrace.prepare.records.options import RecordOptions
from millrace.prepare.runs import copy_runs, offsets_of
from millrace.ragged import Array, Int64s
from millrace.store.layout import Column

CHUNK_BYTES = 16 << 20  # what is read at a time, about
SAMPLE = 256  # records of a source whose lengths say which columns share an axis


class Source(InputFile, frozen=True, kw_only=True):
    """One file with records, or a folder of files that are a record each."""

    format: str
    split: str | None = None  # where the folders name it
    members: tuple[str, ...] = ()  # of a folder: paths of its files, as the system knows them
    sizes: tuple[int, ...] = ()  # of these files
    keys: tuple[str, ...] = ()
    label: int = 0


class Outline(NamedTuple):
    """What a source holds. A row column of no particular axis names its own: lists that are equally long may share one."""

    columns: dict[str, Column]
    pieces: Sequence[tuple[int, int, int]]  # start, stop and bytes of what can be read on its own
    lengths: Mapping[str, Int64s] = {}  # by axis: the lengths of the first records
    classes: Mapping[str, Sequence[str]] = {}  # by column: the names of its numbers
    detail: bytes = b""  # what the format wants back when it reads
    notes: tuple[str, ...] = ()


class Chunk(NamedTuple):
    """Some records. Texts are bytes, with offsets under the name of their column; so ``ShardWriter`` takes them."""

    columns: dict[str, Array]
    offsets: dict[str, Int64s]
    num_records: int
    where: Callable[[int], str] = "record {}".format  # the place of a record in its source, for messages

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.columns.values())

    def part(self, first: int, last: int, columns: Mapping[str, Column]) -> Chunk:
        """Records [first, last), in the same memory."""
        arrays = {}
        for name, array in self.columns.items():
            axis = axis_of(name, columns[name])
            start, stop = (first, last) if axis is None else self.offsets[axis][[first, last]].tolist()
            arrays[name] = array[start:stop]
        offsets = {axis: array[first : last + 1] - array[first] for axis, array in self.offsets.items()}
        return Chunk(arrays, offsets, last - first, lambda k: self.where(first + k))

    def take(self, are_kept: Array, columns: Mapping[str, Column]) -> Chunk:
        """Some of the records."""
        if are_kept.all():
            return self
        edges = np.flatnonzero(np.diff(are_kept, prepend=False, append=False)).reshape(-1, 2)
        arrays = {}
        for name, array in self.columns.items():
            axis = axis_of(name, columns[name])
            inside = edges if axis is None else self.offsets[axis][edges]
            arrays[name] = copy_runs(np.ascontiguousarray(array), np.ascontiguousarray(inside))
        offsets = {axis: offsets_of(np.diff(array)[are_kept]) for axis, array in self.offsets.items()}
        places = np.flatnonzero(are_kept)
        return Chunk(arrays, offsets, len(places), lambda k: self.where(int(places[k])))


class Reading(Protocol):
    """How slices are read: what is wanted of them, and where records go that cannot be used."""

    options: RecordOptions
    wanted: Mapping[str, Column]  # of the source, by its names
    detail: bytes

    def refuse(self, source: str, place: str, problem: str) -> None:
        """Raises, or with ``--on-error skip`` notes that a record is left out."""


class Format(Protocol):
    """One format. Formats have no state: any process may read any slice."""

    name: str
    endings: tuple[str, ...]
    expected: str  # for messages
    is_loose: bool = False  # whether numbers may be integers in one file and floats in another

    def sources(self, files: Sequence[Source], options: RecordOptions) -> tuple[list[Source], list[str]]:
        """The sources that these files are, in their order, and notes."""
        return list(files), []

    def outline(self, source: Source, options: RecordOptions) -> Outline:
        """What a source holds, from as few of its bytes as possible."""

    def narrow(self, source: Source, start: int, stop: int) -> Source:
        """The source with what is needed for this slice alone."""
        return source

    def chunks(self, source: Source, start: int, stop: int, reading: Reading) -> Iterator[Chunk]:
        """The records of a slice, in order."""


def axis_of(name: str, column: Column) -> str | None:
    """The axis of a column's items; a text is an axis of bytes."""
    return name if column.dtype == "string" else column.axis


def need(module: str, extra: str, what: str) -> Any:
    """A library that a format needs."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what} needs {module.partition('.')[0]}; {install_command(extra)}") from error


def unreadable(source: InputFile, what: str, error: BaseException | str) -> SourceError:
    said = str(error).partition("\n")[0]
    return SourceError(
        f"{source.path!r} is not readable {what}: {said}; copy it again, or leave it out with --exclude",
        source=source.path,
    )


@contextmanager
def named(source: InputFile, what: str) -> Iterator[None]:
    """Names the file in whatever a library raises while it reads it: they raise many kinds for damaged bytes."""
    try:
        yield
    except (MillraceError, MemoryError):
        raise
    except Exception as error:
        raise unreadable(source, what, error) from error
