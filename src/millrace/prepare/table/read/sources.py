"""The files of a table and how they are cut into parts: whole small files together, large ones by row groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from millrace.errors import ConfigError, SourceError
from millrace.prepare.files import Found, find_files
from millrace.prepare.functions import load_function
from millrace.prepare.table.notes import unused_note
from millrace.prepare.table.options import FILE_NAME, TableOptions
from millrace.prepare.table.read.csv_files import csv_schema
from millrace.prepare.table.read.outlines import Outline, look_at_all, skipped_note
from millrace.prepare.table.read.schema import Schema, agree, type_of, without_null_types
from millrace.prepare.table.read.table_file import (
    TableSource,
    arrow,
    format_of,
    native,
    partition_type,
    with_partitions,
)
from millrace.prepare.table.read.where import check, expression

PART_BYTES = 32 << 20  # of decoded columns, about
LARGE_GROUP_BYTES = 128 << 20  # row groups above this are named: reading one needs memory for its columns


class Inputs(NamedTuple):
    """What was given to read: files, folders and patterns, and patterns of what is left out."""

    paths: Sequence[str]
    exclude: Sequence[str] = ()


class RowGroups(msgspec.Struct, frozen=True):
    """Some row groups of one Parquet file, or a whole CSV file (none)."""

    source: int
    groups: tuple[int, ...] = ()


class Survey(msgspec.Struct, frozen=True):
    """What was found before any work."""

    sources: tuple[TableSource, ...]
    schema: Schema
    parts: tuple[tuple[RowGroups, ...], ...]
    num_rows: int  # that the footers state; CSV files state none
    pruned: int  # rows of row groups that cannot hold what --where asks for
    notes: tuple[str, ...]
    skipped: int = 0  # files that cannot be used


def find_tables(inputs: Inputs, avoid: Collection[Path] = ()) -> Found:
    """The files, but for those in folders to ``avoid``."""
    return find_files(
        inputs.paths, lambda path: format_of(path) is not None, "Parquet or CSV", avoid=avoid, exclude=inputs.exclude
    )


def survey(found: Found, options: TableOptions) -> Survey:
    """Reads all footers and headers, and agrees on a schema."""
    arrow()
    sources = with_partitions(found.files, options.delimiter, options.encoding, options.decimal)
    if FILE_NAME in options.entity:
        _refuse_equal_stems(sources)
    sources, looks, skipped = look_at_all(sources, options)
    transform = load_function(options.transform, "--transform")
    if not any(look.has_rows for look in looks):
        which = "the only file," if len(sources) == 1 else f"each of the {len(sources)} files, such as"
        raise SourceError(f"{which} {sources[0].file.path!r}, holds no rows; give files with rows")
    if transform is None:
        _type_csv(sources, looks, options)
    schemas = [
        (source.file.path, _after(look.schema, source, transform, options.transform))
        for source, look in zip(sources, looks, strict=True)
        if look.schema is not None
    ]
    schema = agree(schemas, options, {name for source in sources for name, _ in source.partition})
    types = {name: type_of(text) for name, text in schema.types.items()}
    pruned = 0
    if options.where:
        for kind in {kind for _, kind in schemas}:
            check(options.where, without_null_types(kind, types))
        if transform is None:
            named = {path: without_null_types(kind, types) for path, kind in schemas}
            for source, look in zip(sources, looks, strict=True):
                if look.groups:
                    pruned += _prune(source, look, options.where, named[source.file.path])
                elif source.format == "csv" and look.has_rows and source.partition:
                    look.is_wanted = _may_hold(source, options.where, named[source.file.path])
    columns = None if transform is not None else set(schema.role.needed)
    parts, notes = _cut(sources, looks, columns)
    if skipped:
        notes.append(skipped_note(skipped))
    if options.features is None and (told := unused_note([kind for _, kind in schemas], schema.role)):
        notes.append(told)
    empty = [source.file.path for source, look in zip(sources, looks, strict=True) if not look.has_rows]
    if empty:
        told = f"{len(empty)} files hold no rows, such as {empty[0]!r}"
        if options.strict:
            raise SourceError(f"{told}; remove them, or leave --strict out", source=empty[0])
        notes.append(told)
    if unread := sum(not look.is_wanted for look in looks):
        notes.append(f"CSV files not read, since --where rules out their paths: {unread:,}")
    rows = sum(rows for look in looks for _, rows, _ in look.groups)
    return Survey(tuple(sources), schema, parts, rows, pruned, (*found.notes, *notes), len(skipped))


def _refuse_equal_stems(sources: Sequence[TableSource]) -> None:
    known: dict[str, str] = {}
    for source in sources:
        if source.stem in known:
            raise ConfigError(
                f"{known[source.stem]!r} and {source.file.path!r} would be one entity, {source.stem!r}; "
                "name the column that holds it with --entity, or rename one file"
            )
        known[source.stem] = source.file.path


def _type_csv(sources: Sequence[TableSource], looks: Sequence[Outline], options: TableOptions) -> None:
    pyarrow = arrow()
    both = [(source.format, look) for source, look in zip(sources, looks, strict=True) if look.schema is not None]
    fields = (field for form, look in both if form != "csv" for field in look.schema)
    whole = {field.name: field.type for field in fields if pyarrow.types.is_integer(field.type)}
    for form, look in both:
        if form == "csv":
            look.schema = csv_schema(look.schema, options, whole)


def _after(schema: Any, source: TableSource, transform: Callable[[Any], Any] | None, name_of: str | None) -> Any:
    """The schema with the columns of the path, behind the user's function."""
    pyarrow = arrow()
    schema = schema.remove_metadata()
    for name, value in source.partition:
        if name in schema.names:
            raise SourceError(f"{source.file.path!r}: column {name!r} is in the file and in its path; rename one")
        schema = schema.append(pyarrow.field(name, partition_type(value)))
    if transform is None:
        return schema
    try:
        made = transform(schema.empty_table())
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"--transform {name_of} raised {type(error).__name__}: {error} (on a table without rows, with the columns of "
            f"{source.file.path!r}); it is asked for its columns that way: fix it"
        ) from error
    if not isinstance(made, pyarrow.Table):
        raise ConfigError(
            f"--transform gave {type(made).__name__} for a table without rows; it must give an Arrow table"
        )
    return made.schema.remove_metadata()


def _said_by_path(source: TableSource) -> Any:
    """What the path says of every row of the file, as an expression; None where it says nothing."""
    from pyarrow import compute

    field: Any = compute.field
    known: Any = None
    for name, value in source.partition:
        says = field(name).is_null() if value is None else field(name) == value
        known = says if known is None else known & says
    return known


def _prune(source: TableSource, look: Outline, where: str, schema: Any) -> int:
    """Drops the row groups whose statistics, or the file's path, say that no row of them is asked for; returns their rows."""
    from pyarrow import dataset

    wanted = expression(where, {column.name: column.type for column in schema})
    with native(source) as raw:
        fragment = dataset.ParquetFileFormat().make_fragment(raw, partition_expression=_said_by_path(source))
        kept = {group.id for piece in fragment.split_by_row_group(wanted, schema) for group in piece.row_groups}
    look.pruned = sum(rows for k, rows, _ in look.groups if k not in kept)
    look.groups = [group for group in look.groups if group[0] in kept]
    return look.pruned


def _may_hold(source: TableSource, where: str, schema: Any) -> bool:
    """Whether the path of a CSV file, which states no statistics, leaves rows to ask for."""
    from pyarrow import dataset, fs

    form, here = dataset.CsvFileFormat(), fs.LocalFileSystem()
    fragment = form.make_fragment("never open_index", here, partition_expression=_said_by_path(source))
    wanted = expression(where, {column.name: column.type for column in schema})
    return any(True for _ in dataset.FileSystemDataset([fragment], schema, form, here).get_fragments(filter=wanted))


def _cut(
    sources: Sequence[TableSource], looks: Sequence[Outline], columns: set[str] | None
) -> tuple[tuple[tuple[RowGroups, ...], ...], list[str]]:
    """Parts of about equal size, in the order of the sources; notes on row groups that need much memory."""
    parts: list[tuple[RowGroups, ...]] = []
    units: list[RowGroups] = []
    weight, large = 0, []

    def close() -> None:
        nonlocal weight
        if units:
            parts.append(tuple(units))
            units.clear()
        weight = 0

    for number, (source, look) in enumerate(zip(sources, looks, strict=True)):
        width = 0 if look.schema is None else _row_bytes(look.schema, columns)
        pieces: list[tuple[tuple[int, ...], int]] = [((k,), rows * width) for k, rows, _ in look.groups if rows]
        if source.format == "csv" and look.has_rows and look.is_wanted:
            pieces = [((), source.file.size)]
        if _begins_part(source, sum(num_bytes for _, num_bytes in pieces)):
            close()
        for groups, num_bytes in pieces:
            if source.format == "parquet" and num_bytes > LARGE_GROUP_BYTES:
                large.append(f"row group {groups[0]} of {source.file.path!r} ({num_bytes >> 20} MiB decoded)")
            if weight and weight + num_bytes > PART_BYTES:
                close()
            if groups and units and units[-1].source == number:
                units[-1] = RowGroups(number, (*units[-1].groups, *groups))
            else:
                units.append(RowGroups(number, groups))
            weight += num_bytes
    close()
    notes = []
    if large:
        notes.append(
            f"{len(large)} row groups are larger than {LARGE_GROUP_BYTES >> 20} MiB, such as {large[0]}: "
            "reading one may take more memory than promised; write smaller ones"
        )
    return tuple(parts), notes


def _begins_part(source: TableSource, num_bytes: int) -> bool:
    """Whether a part is cut before a file, by a hash of the file: the larger it is, the more likely.

    So files that are added or removed change the parts around them, and no others.
    """
    return int(source.file.ends[:12], 16) % PART_BYTES < num_bytes


def _row_bytes(schema: Any, columns: set[str] | None) -> int:
    """Bytes of a decoded row, about: a footer knows only what its columns take when they are encoded."""
    sizes = [_item_bytes(field.type) for field in schema if columns is None or field.name in columns]
    return max(1, sum(sizes))


def _item_bytes(kind: Any) -> int:
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:  # text: by its place in a dictionary, or a short one
        return 8
