"""From the columns of the sources to those of the store: chosen, renamed, cast, and with the axes they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError, SourceError, did_you_mean
from millrace.prepare.records.formats.format import Chunk, Outline, Source
from millrace.prepare.records.options import OWN, RecordOptions, parse_dtype
from millrace.ragged import Array, Int64s
from millrace.store.layout import PRIMARY_AXIS, Column, Layout
from millrace.store.values import Normaliser

# A batch is a dict with these attributes too, so that no column of a feed may have their names.
OF_BATCHES = {*dir(dict), "positions", "samples", "valid", "num_samples", "micro", "to", "pin_memory"}
Found = Sequence[tuple[Source, Outline]]


class AxisMismatch(ConfigError):
    """Columns that were taken to share an axis do not."""


class Schema(NamedTuple):
    """How the chunks of a format become those of the store."""

    names: dict[str, str]  # of columns: in the source -> in the store
    wanted: dict[str, Column]  # by their names in the source, as it has them
    columns: dict[str, Column]  # of the store
    axes: dict[str, str]  # of the source -> of the store
    is_guessed: bool  # whether lists share axes because those of the first records are equally long

    def convert(self, chunk: Chunk) -> Chunk:
        """The chunk as it is stored."""
        values, columns, arrays = Normaliser(Layout(self.columns)), self.columns, {}
        offsets = self._offsets(chunk)
        for source, name in self.names.items():
            column, array = columns[name], chunk.columns[source]
            if column.dtype == "string":
                arrays[name], offsets[name] = _checked_text(name, array, chunk.offsets[source]), chunk.offsets[source]
            else:
                arrays[name] = values.cast(name, self._shaped(name, source, array, chunk))
        return Chunk(arrays, offsets, chunk.num_records, chunk.where)

    def _offsets(self, chunk: Chunk) -> dict[str, Int64s]:
        """Offsets by axis of the store. Columns that share an axis must be equally long in every record."""
        offsets: dict[str, Int64s] = {}
        first: dict[str, str] = {}
        for source, axis in self.axes.items():
            mine = chunk.offsets[source]
            if axis in offsets and not np.array_equal(offsets[axis], mine):
                lengths = [np.diff(offsets[axis]), np.diff(mine)]
                record = int(np.flatnonzero(lengths[0] != lengths[1])[0])
                problem = (
                    f"{chunk.where(record)}: {first[axis]!r} has {lengths[0][record]} items and {source!r} has "
                    f"{lengths[1][record]}, but they share the axis {axis!r}; name the columns that are equally long with "
                    "--axis NAME=COLUMNS, or give --axis own"
                )
                raise AxisMismatch(problem)
            offsets.setdefault(axis, mine)
            first.setdefault(axis, source)
        return offsets or {PRIMARY_AXIS: np.zeros(chunk.num_records + 1, np.int64)}

    def _shaped(self, name: str, source: str, array: Array, chunk: Chunk) -> Array:
        """A list of which every record has the same number, as one item per record."""
        column, given = self.columns[name], self.wanted[source]
        if column.per == "record" and given.axis is not None:
            lengths = np.diff(chunk.offsets[given.axis])
            expected = column.shape[: len(column.shape) - len(given.shape)]
            wrong = np.flatnonzero(lengths != np.prod(expected))
            if len(wrong):
                raise ConfigError(
                    f"column {name!r} has {lengths[wrong[0]]} items; --cast {name}={column.dtype}"
                    f"[{','.join(map(str, column.shape))}] expects {int(np.prod(expected))} in every record"
                )
            return array.reshape(chunk.num_records, *column.shape)
        return array


def _checked_text(name: str, data: Array, offsets: Int64s) -> Array:
    """Bytes of texts, refused where they are no UTF-8."""
    try:
        data.tobytes().decode()
        starts = data[offsets[:-1][offsets[:-1] < len(data)]]
        if np.any((starts & 0xC0) == 0x80):
            raise ValueError("a text begins within a character")
    except ValueError as error:
        raise ConfigError(f"column {name!r} is not valid UTF-8: {error}") from error
    return data


def build_schema(found: Found, options: RecordOptions, *, is_loose: bool) -> tuple[Schema, list[str]]:
    """The schema of all sources, and notes. A source that differs from the first is refused."""
    merged = _merge(found, options, is_loose=is_loose)
    chosen = list(merged) if options.columns is None else _chosen(merged, options.columns)
    names = {name: options.rename.get(name, name) for name in chosen}
    _check_known("--rename", options.rename, merged)
    _check_known("--cast", options.cast, names.values())
    if len(set(names.values())) != len(names):
        raise ConfigError(
            f"--rename gives two columns one name: {sorted(names.values())}; rename one of them otherwise"
        )
    wanted = {name: merged[name] for name in chosen}
    columns = {name: _cast(merged[source], name, options.cast.get(name)) for source, name in names.items()}
    axes, is_guessed = _share_axes(found, names, wanted, columns, options)
    columns = {
        name: column if column.axis is None else _on_axis(column, axes[column.axis]) for name, column in columns.items()
    }
    kept = {axis: own for axis, own in axes.items() if own in {column.axis for column in columns.values()}}
    try:
        Layout(columns)
    except ConfigError as error:
        if not columns:
            raise
        raise ConfigError(
            f"{error}; --rename OLD=NEW gives a column another name, --axis NAME=COLUMNS an axis"
        ) from error
    shared: dict[str, list[str]] = {}
    for name, column in columns.items():
        if column.axis is not None:
            shared.setdefault(column.axis, []).append(name)
    notes = [
        f"{', '.join(members)} share the axis {axis!r}: they are equally long in the first records; if not in all, give --axis own"
        for axis, members in shared.items()
        if is_guessed and len({merged_axis for merged_axis, own in kept.items() if own == axis}) > 1
    ]
    notes += [
        f"column {name!r} has a name of batches: batch[{name!r}] is the column; --rename {source}=NAME gives it another"
        for source, name in names.items()
        if name in OF_BATCHES
    ]
    return Schema(names, wanted, columns, kept, is_guessed), notes


def _merge(found: Found, options: RecordOptions, *, is_loose: bool) -> dict[str, Column]:
    """The columns of all sources; those of the first, where the others are alike."""
    first, merged = found[0][0], dict(found[0][1].columns)
    renamed = options.rename
    asked = None if options.columns is None else frozenset(options.columns)
    for source, outline in found[1:]:
        extra = [name for name in outline.columns if name not in merged and asked is None]
        missing = [name for name in merged if name not in outline.columns and (asked is None or name in asked)]
        for names, lacking, having in ((missing, source, first), (extra, first, source)):
            if names:
                raise _differs(
                    source, f"{lacking.path!r} has no column {names[0]!r}, which {having.path!r} has; choose columns "
                    "that all have with --columns, or leave files out with --exclude"
                )  # fmt: skip
        for name, column in outline.columns.items():
            known = merged.get(name)
            if known is None or known == column or (asked is not None and name not in asked):
                continue
            is_alike = (known.shape, known.axis) == (column.shape, column.axis)
            if is_alike and is_loose and {known.dtype, column.dtype} == {"int64", "float64"}:
                merged[name] = known if known.dtype == "float64" else column
            elif not is_alike or renamed.get(name, name) not in options.cast:
                remedy = f"give --cast {name}={column.dtype} to store one type" if is_alike else "leave out one of them"
                raise _differs(
                    source,
                    f"column {name!r} is {show(column)} in {source.path!r} and {show(known)} in {first.path!r}; {remedy}",
                )
    return merged


def _differs(source: Source, problem: str) -> SourceError:
    return SourceError(problem, source=source.path)


def show(column: Column) -> str:
    """A column for people: ``float32 x 6 per row``."""
    return f"{' x '.join(map(str, (column.dtype, *column.shape)))} per {column.per}"


def _chosen(merged: Mapping[str, Column], asked: Sequence[str]) -> list[str]:
    """Names as asked for; a name before a dot stands for all columns after it."""
    chosen: dict[str, None] = {}
    below: dict[str, list[str]] = {}  # by the part of a name before each of its dots
    for known in merged:
        for k, letter in enumerate(known):
            if letter == ".":
                below.setdefault(known[:k], []).append(known)
    for name in asked:
        mine = [name] if name in merged else below.get(name, [])
        if not mine:
            raise ConfigError(
                f"--columns: no column is called {name!r}{did_you_mean(name, merged)}; check the name, or leave --columns out"
            )
        chosen.update(dict.fromkeys(mine))
    return list(chosen)


def _check_known(flag: str, given: Mapping[str, Any], known: Any) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{flag}: no column is called {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}"
            )


def _cast(column: Column, name: str, dtype: str | None) -> Column:
    if dtype is None:
        return column
    if column.dtype == "string":
        raise ConfigError(f"--cast {name}={dtype}: this column is text; leave it out, or convert it in the source")
    wanted, shape = parse_dtype(dtype, name)
    if shape is None:
        return Column(wanted, column.shape, per=column.per, axis=column.axis)
    if column.axis is not None:
        return Column(wanted, shape if not column.shape else (*shape, *column.shape), per="record")
    if int(np.prod(shape)) != int(np.prod(column.shape)):
        raise ConfigError(f"--cast {name}={dtype}: every record has {column.shape}, which does not fit")
    return Column(wanted, shape, per="record")


def _on_axis(column: Column, axis: str) -> Column:
    return Column(column.dtype, column.shape, axis=axis)


def _share_axes(
    found: Found,
    names: Mapping[str, str],
    wanted: Mapping[str, Column],
    columns: Mapping[str, Column],
    options: RecordOptions,
) -> tuple[dict[str, str], bool]:
    """Axis of the source -> axis of the store; and whether lengths decided."""
    own = list(dict.fromkeys(column.axis for column in columns.values() if column.axis is not None))
    groups: dict[str, str] = {}  # axis of the source -> the first one that it shares rows with, or the name given
    is_guessed = False
    if isinstance(options.axis, dict):
        stored = {name: column.axis for name, column in columns.items()}
        for axis, members in options.axis.items():
            _check_known("--axis", dict.fromkeys(members), stored)
            for member in members:
                source_axis = stored[member]
                if source_axis is None:
                    raise ConfigError(f"--axis {axis}: {member!r} has one item per record, and no axis")
                groups[source_axis] = axis
    elif options.axis != OWN:
        is_guessed = True
        first: dict[tuple[bytes, ...], str] = {}  # by the lengths in all sources
        for axis in own:
            lengths = _lengths(found, axis)
            groups[axis] = axis if lengths is None else first.setdefault(lengths, axis)
    named = {axis: groups.get(axis, axis) for axis in own}
    is_single = len(set(named.values())) == 1 and not isinstance(options.axis, dict)
    if is_single:
        return dict.fromkeys(own, PRIMARY_AXIS), is_guessed
    return {axis: _stored_axis(target, names) for axis, target in named.items()}, is_guessed


def _stored_axis(axis: str, names: Mapping[str, str]) -> str:
    """A free axis is called like its column, also where that gets another name."""
    column = axis.removesuffix(".values")  # of lists in lists
    return names.get(axis) or names.get(column, column) + axis[len(column) :]


def _lengths(found: Found, axis: str) -> tuple[bytes, ...] | None:
    """How long the lists of an axis are in all records that were looked at; None where a source does not say."""
    each = [outline.lengths.get(axis) for _, outline in found]
    known = [lengths for lengths in each if lengths is not None]
    return tuple(np.asarray(lengths, np.int64).tobytes() for lengths in known) if len(known) == len(each) else None


def converted(chunk: Chunk, schema: Schema, refuse: Callable[[str, str], None]) -> list[Chunk]:
    """The chunk as it is stored. Records that do not fit go to ``refuse`` with their place, found by halving."""
    try:
        return [schema.convert(chunk)]
    except AxisMismatch:
        raise
    except ConfigError as error:
        if chunk.num_records == 1:
            refuse(chunk.where(0), str(error))
            return []
        half = chunk.num_records // 2
        halves = (chunk.part(0, half, schema.wanted), chunk.part(half, chunk.num_records, schema.wanted))
        return [stored for some in halves for stored in converted(some, schema, refuse)]
