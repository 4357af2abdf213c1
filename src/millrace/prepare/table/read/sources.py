"""The files of a table, and how they are cut into parts: small files together, large ones by row groups."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from millrace.errors import ConfigError, SourceError
from millrace.prepare.files import Found, find_files
from millrace.prepare.functions import load_function
from millrace.prepare.kind import Context
from millrace.prepare.quarantine import Skips
from millrace.prepare.table.notes import unused_note
from millrace.prepare.table.options import FILE_NAME, TableOptions
from millrace.prepare.table.read import table_file
from millrace.prepare.table.read.arrow_types import type_of, without_null_types
from millrace.prepare.table.read.csv_files import csv_schema
from millrace.prepare.table.read.outlines import FileOutline, outline_files, skipped_note
from millrace.prepare.table.read.schema import Schema, agree
from millrace.prepare.table.read.table_file import TableSource, arrow, native, partition_type
from millrace.prepare.table.read.where import check, expression

PART_BYTES = 32 << 20  # of decoded columns, about
LARGE_GROUP_BYTES = 128 << 20  # row groups above this are named: reading one needs memory for its columns


class Inputs(NamedTuple):
    """Files, folders and patterns to read, and patterns of files to leave out."""

    paths: Sequence[str]
    exclude: Sequence[str] = ()


class RowGroups(msgspec.Struct, frozen=True):
    """Some row groups of one Parquet file, or a whole CSV file (without groups)."""

    source: int
    groups: tuple[int, ...] = ()


class Survey(msgspec.Struct, frozen=True):
    """What is known of all files before any work."""

    sources: tuple[TableSource, ...]
    schema: Schema
    parts: tuple[tuple[RowGroups, ...], ...]
    num_rows: int  # as the footers state; CSV files state none
    pruned: int  # rows of row groups that cannot hold what --where asks for
    notes: tuple[str, ...]
    skipped: int = 0  # files that cannot be used
    skips: Skips = Skips()  # their rows


def find_tables(inputs: Inputs, context: Context) -> Found:
    """The files, but for those of the run itself."""
    places: Any = {"avoid": context.own_folders, "stage": context.sources}
    return find_files(
        inputs.paths,
        table_file.format_of,
        "Parquet or CSV",
        **places,
        exclude=inputs.exclude,
        count_found=context.count_found,
    )


def survey(found: Found, options: TableOptions, watched: Callable[[Iterable[Any], int], Iterable[Any]]) -> Survey:
    """Reads all footers and headers, and agrees on a schema. ``watched`` gives files one by one, with progress."""
    arrow()
    sources = table_file.with_partitions(found.files, options.delimiter, options.encoding, options.decimal)
    if FILE_NAME in options.entity:
        _refuse_equal_stems(sources)
    outlines, skipped, skips = outline_files(sources, options, watched)
    transform = load_function(options.transform, "--transform")
    if not any(outline.has_rows for outline in outlines):
        which = "the only file," if len(outlines) == 1 else f"each of the {len(outlines)} files, such as"
        raise SourceError(f"{which} {outlines[0].source.file.path!r}, holds no rows; give files with rows")
    if transform is None:
        _type_csv(outlines, options)
    known = [outline for outline in outlines if outline.schema is not None]
    schemas = {outline.source.file.path: _full_schema(outline, transform, options.transform) for outline in known}
    partitions = {name for outline in outlines for name, _ in outline.source.partition}
    guessed = {outline.source.file.path for outline in known if transform is None and outline.source.format == "csv"}
    schema = agree(list(schemas.items()), options, partitions, guessed)
    rows = sum(rows for outline in outlines for _, rows, _ in outline.groups)
    if options.where:
        _select(outlines, schemas, schema, options)
    left = sum(rows for outline in outlines for _, rows, _ in outline.groups)
    parts, notes = _cut(outlines, None if transform is not None else set(schema.role.needed))
    if skipped:
        notes.append(skipped_note(list(skipped.values())))
    if options.features is None and (note := unused_note(schemas.values(), schema.role)):
        notes.append(note)
    if empty := [outline.source.file.path for outline in outlines if not outline.has_rows]:
        note = f"{len(empty)} files hold no rows, such as {empty[0]!r}"
        if options.strict:
            raise SourceError(f"{note}; remove them, or leave --strict out", source=empty[0])
        notes.append(note)
    if unread := sum(not outline.is_wanted for outline in outlines):
        notes.append(f"CSV files not read, since --where rules out their paths: {unread:,}")
    used = tuple(outline.source for outline in outlines)
    return Survey(used, schema, parts, left, rows - left, (*found.notes, *notes), len(skipped), skips)


def _refuse_equal_stems(sources: Sequence[TableSource]) -> None:
    known: dict[str, str] = {}
    for source in sources:
        if source.stem in known:
            raise ConfigError(
                f"{known[source.stem]!r} and {source.file.path!r} would be one entity, {source.stem!r}; "
                "name the column that holds it with --entity, or rename one file"
            )
        known[source.stem] = source.file.path


def _type_csv(outlines: Sequence[FileOutline], options: TableOptions) -> None:
    pyarrow = arrow()
    known = [outline for outline in outlines if outline.schema is not None]
    fields = (field for outline in known if outline.source.format != "csv" for field in outline.schema)
    whole = {field.name: field.type for field in fields if pyarrow.types.is_integer(field.type)}
    for outline in known:
        if outline.source.format == "csv":
            outline.schema = csv_schema(outline.schema, options, whole)


def _full_schema(outline: FileOutline, transform: Callable[[Any], Any] | None, name_of: str | None) -> Any:
    """The schema with the columns of the path, after the user's function."""
    source, schema = outline.source, outline.schema
    pyarrow = arrow()
    schema = schema.remove_metadata()
    for name, value in source.partition:
        if name in schema.names:
            raise SourceError(f"{source.file.path!r}: column {name!r} is in the file and in its path; rename one")
        schema = schema.append(pyarrow.field(name, partition_type(value)))
    if transform is None:
        return schema
    try:
        result = transform(schema.empty_table())
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"--transform {name_of} raised {type(error).__name__}: {error} (on a table without rows, with the columns of "
            f"{source.file.path!r}); it is asked for its columns that way: fix it"
        ) from error
    if not isinstance(result, pyarrow.Table):
        raise ConfigError(
            f"--transform gave {type(result).__name__} for a table without rows; it must give an Arrow table"
        )
    return result.schema.remove_metadata()


def _path_expression(source: TableSource) -> Any:
    """What the path says of every row of the file, as an expression; None where it says nothing."""
    from pyarrow import compute

    field: Any = compute.field
    equals = (field(name).is_null() if value is None else field(name) == value for name, value in source.partition)
    return functools.reduce(operator.and_, equals) if source.partition else None


def _select(outlines: Sequence[FileOutline], schemas: Mapping[str, Any], schema: Schema, options: TableOptions) -> None:
    """Leaves out row groups and CSV files in which ``--where`` can find no row."""
    assert options.where is not None
    types = {name: type_of(text) for name, text in schema.types.items()}
    plain = {path: without_null_types(kind, types) for path, kind in schemas.items()}
    for kind in set(plain.values()):
        check(options.where, kind)
    for outline in outlines if options.transform is None else ():
        source = outline.source
        if outline.groups:
            outline.groups = _matching_groups(outline, options.where, plain[source.file.path])
        elif source.format == "csv" and outline.has_rows and source.partition:
            outline.is_wanted = _may_match(source, options.where, plain[source.file.path])


def _matching_groups(outline: FileOutline, where: str, schema: Any) -> list[tuple[int, int, int]]:
    """The row groups that may hold a row that is asked for, by their statistics and by the file's path."""
    from pyarrow import dataset

    wanted = expression(where, {column.name: column.type for column in schema})
    with native(outline.source) as raw:
        fragment = dataset.ParquetFileFormat().make_fragment(raw, partition_expression=_path_expression(outline.source))
        numbers = {group.id for piece in fragment.split_by_row_group(wanted, schema) for group in piece.row_groups}
    return [group for group in outline.groups if group[0] in numbers]


def _may_match(source: TableSource, where: str, schema: Any) -> bool:
    """Whether a CSV file may hold a row that is asked for, by its path alone: it states no statistics."""
    from pyarrow import dataset, fs

    form, here = dataset.CsvFileFormat(), fs.LocalFileSystem()
    fragment = form.make_fragment("never opened", here, partition_expression=_path_expression(source))
    wanted = expression(where, {column.name: column.type for column in schema})
    return any(True for _ in dataset.FileSystemDataset([fragment], schema, form, here).get_fragments(filter=wanted))


def _cut(
    outlines: Sequence[FileOutline], columns: set[str] | None
) -> tuple[tuple[tuple[RowGroups, ...], ...], list[str]]:
    """Parts of about equal size, in the order of the sources; notes on row groups that need much memory."""
    parts: list[tuple[RowGroups, ...]] = []
    units: dict[int, list[int]] = {}  # row groups by source
    weight, large = 0, []

    def close() -> None:
        nonlocal weight
        if units:
            parts.append(tuple(RowGroups(source, tuple(groups)) for source, groups in units.items()))
            units.clear()
        weight = 0

    for number, outline in enumerate(outlines):
        source, schema = outline.source, outline.schema
        width = 0 if schema is None else _row_bytes(schema, columns)
        pieces: list[tuple[tuple[int, ...], int]] = [((k,), rows * width) for k, rows, _ in outline.groups if rows]
        if source.format == "csv" and outline.has_rows and outline.is_wanted:
            pieces = [((), source.file.size)]
        # A hash decides whether a part begins with a file, the more likely the larger it is. So a file that is added or
        # removed changes only the parts around it.
        if int(source.file.ends[:12], 16) % PART_BYTES < sum(num_bytes for _, num_bytes in pieces):
            close()
        for groups, num_bytes in pieces:
            if source.format == "parquet" and num_bytes > LARGE_GROUP_BYTES:
                large.append(f"row group {groups[0]} of {source.file.path!r} ({num_bytes >> 20} MiB decoded)")
            if weight and weight + num_bytes > PART_BYTES:
                close()
            units.setdefault(number, []).extend(groups)
            weight += num_bytes
    close()
    notes = []
    if large:
        notes.append(
            f"{len(large)} row groups are larger than {LARGE_GROUP_BYTES >> 20} MiB, such as {large[0]}: "
            "reading one may take more memory than promised; write smaller ones"
        )
    return tuple(parts), notes


def _row_bytes(schema: Any, columns: set[str] | None) -> int:
    """Bytes of a decoded row, about: a footer states only the size of encoded columns."""
    sizes = [_item_bytes(field.type) for field in schema if columns is None or field.name in columns]
    return max(1, sum(sizes))


def _item_bytes(kind: Any) -> int:
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:  # text: by its place in a dictionary, or a short one
        return 8
