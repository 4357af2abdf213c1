"""The files of a table and how they are cut into parts: whole small files together, large ones by row groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from millrace.errors import ConfigError, SourceError
from millrace.native import num_cores
from millrace.prepare.files import find_files
from millrace.prepare.functions import load_function
from millrace.prepare.table import csv_files
from millrace.prepare.table.options import FILE_NAME, TableOptions
from millrace.prepare.table.schema import Schema, agree, type_of, without_null_types
from millrace.prepare.table.source import TableSource, arrow, format_of, native, partition_type, with_partitions
from millrace.prepare.table.where import check, expression

PART_BYTES = 32 << 20  # of decoded columns, about
LARGE_GROUP_BYTES = 128 << 20  # row groups above this are named: reading one needs memory for its columns


class Inputs(NamedTuple):
    """What was given to read: files, folders and patterns, and patterns of what is left out."""

    paths: Sequence[str]
    exclude: Sequence[str] = ()


class Unit(msgspec.Struct, frozen=True):
    """Some row groups of one Parquet file, or a whole CSV file (none)."""

    source: int
    groups: tuple[int, ...] = ()


class Survey(msgspec.Struct, frozen=True):
    """What was found before any work."""

    sources: tuple[TableSource, ...]
    schema: Schema
    parts: tuple[tuple[Unit, ...], ...]
    num_rows: int  # that the footers state; CSV files state none
    pruned: int  # rows of row groups that cannot hold what --where asks for
    notes: tuple[str, ...]


class _Look(msgspec.Struct):
    """One file's schema and its row groups as (number, rows, bytes)."""

    schema: Any  # None: there is nothing in the file, not even names
    groups: list[tuple[int, int, int]]
    pruned: int = 0
    has_rows: bool = True
    is_wanted: bool = True  # False: its path says that --where asks for none of its rows


def survey(inputs: Inputs, options: TableOptions, avoid: Collection[Path] = ()) -> Survey:
    """Finds the files, but in folders to ``avoid``, reads all footers and agrees on a schema."""
    arrow()
    found = find_files(
        inputs.paths, lambda path: format_of(path) is not None, "Parquet or CSV", avoid=avoid, exclude=inputs.exclude
    )
    sources = with_partitions(found.files)
    if FILE_NAME in options.entity:
        _refuse_equal_stems(sources)
    looks = _look_at_all(sources)
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
    empty = [source.file.path for source, look in zip(sources, looks, strict=True) if not look.has_rows]
    if empty:
        told = f"{len(empty)} files hold no rows, such as {empty[0]!r}"
        if options.strict:
            raise SourceError(f"{told}; remove them, or leave --strict out", source=empty[0])
        notes.append(told)
    if skipped := sum(not look.is_wanted for look in looks):
        notes.append(f"CSV files not read, since --where rules out their paths: {skipped:,}")
    rows = sum(rows for look in looks for _, rows, _ in look.groups)
    return Survey(tuple(sources), schema, parts, rows, pruned, (*found.notes, *notes))


def _refuse_equal_stems(sources: Sequence[TableSource]) -> None:
    known: dict[str, str] = {}
    for source in sources:
        if source.stem in known:
            raise ConfigError(
                f"{known[source.stem]!r} and {source.file.path!r} would be one entity, {source.stem!r}; "
                "name the column that holds it with --entity, or rename one file"
            )
        known[source.stem] = source.file.path


def _look_at_all(sources: Sequence[TableSource]) -> list[_Look]:
    if len(sources) < 8:
        return [_look(source) for source in sources]
    with ThreadPoolExecutor(min(8, num_cores())) as pool:
        return list(pool.map(_look, sources))


def _look(source: TableSource) -> _Look:
    pyarrow = arrow()
    path = source.file.path
    if source.file.size == 0:
        return _Look(None, [], has_rows=False)  # no schema to compare; told in a note
    try:
        if source.format == "csv":
            schema, has_rows = csv_files.look_at_csv(source)
            return _Look(schema, [], has_rows=has_rows)
        from pyarrow import parquet

        with native(source) as raw, parquet.ParquetFile(raw) as file:
            metadata, schema = file.metadata, file.schema_arrow
            groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
            look = _Look(schema, [(k, group.num_rows, group.total_byte_size) for k, group in enumerate(groups)])
            look.has_rows = any(rows for _, rows, _ in look.groups)
            _check_claims(path, source.file.size, look)
            for k, group in enumerate(groups):
                values = group.column(0).num_values if group.num_columns else 0
                if group.num_columns and group.num_rows > values:
                    raise SourceError(
                        f"{path!r}: row group {k} claims {group.num_rows} rows, but its first column has {values}; "
                        "write it again", source=path,
                    )  # fmt: skip
            return look
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(
            f"{path!r} is not readable as {source.format}: {_first_line(error)}; copy or write it again", source=path
        ) from error


def _check_claims(path: str, size: int, look: _Look) -> None:
    """A footer that claims what the file cannot hold is damaged, or made to exhaust memory."""
    for k, rows, num_bytes in look.groups:
        if rows < 0 or num_bytes < 0 or num_bytes > max(size, 1) * 10_000 + (1 << 20):
            raise SourceError(
                f"{path!r}: row group {k} claims {rows} rows in {num_bytes} bytes, but the file has {size}; write it again",
                source=path,
            )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _type_csv(sources: Sequence[TableSource], looks: Sequence[_Look], options: TableOptions) -> None:
    pyarrow = arrow()
    both = [(source.format, look) for source, look in zip(sources, looks, strict=True) if look.schema is not None]
    fields = (field for form, look in both if form != "csv" for field in look.schema)
    whole = {field.name: field.type for field in fields if pyarrow.types.is_integer(field.type)}
    for form, look in both:
        if form == "csv":
            look.schema = csv_files.typed(look.schema, options, whole)


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
            f"{source.file.path!r}); it is asked for its columns that way: mend it"
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


def _prune(source: TableSource, look: _Look, where: str, schema: Any) -> int:
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
    fragment = form.make_fragment("never opened", here, partition_expression=_said_by_path(source))
    wanted = expression(where, {column.name: column.type for column in schema})
    return any(True for _ in dataset.FileSystemDataset([fragment], schema, form, here).get_fragments(filter=wanted))


def _cut(
    sources: Sequence[TableSource], looks: Sequence[_Look], columns: set[str] | None
) -> tuple[tuple[tuple[Unit, ...], ...], list[str]]:
    """Parts of about equal size, in the order of the sources; notes on row groups that need much memory."""
    parts: list[tuple[Unit, ...]] = []
    units: list[Unit] = []
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
                units[-1] = Unit(number, (*units[-1].groups, *groups))
            else:
                units.append(Unit(number, groups))
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
