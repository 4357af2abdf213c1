"""The first look at every file of a table: its columns, its row groups, and whether it can be used at all.

Every file is looked at before any work. Those that cannot be used are told together, or skipped where that is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from millrace.errors import SourceError
from millrace.native import num_cores
from millrace.prepare.table.options import FILE_NAME, TableOptions
from millrace.prepare.table.read.csv_files import check_texts, look_at_csv
from millrace.prepare.table.read.table_file import TableSource, arrow, native
from millrace.prepare.table.read.where import columns_of

MAX_REASONS = 20  # files that are named in one message


class Outline(msgspec.Struct):
    """One file's schema and its row groups as (number, rows, bytes)."""

    schema: Any  # None: there is nothing in the file, not even names
    groups: list[tuple[int, int, int]]
    pruned: int = 0
    has_rows: bool = True
    is_wanted: bool = True  # False: its path says that --where asks for none of its rows


def look_at_all(
    sources: Sequence[TableSource], options: TableOptions
) -> tuple[list[TableSource], list[Outline], list[str]]:
    """The files that can be used, what was seen of them, and why others are skipped; without ``skip`` these are refused."""

    def look(source: TableSource) -> Outline | SourceError:
        try:
            return _look(source, options)
        except SourceError as error:
            return error

    if len(sources) < 8:
        found = [look(source) for source in sources]
    else:
        with ThreadPoolExecutor(min(8, num_cores())) as pool:
            found = list(pool.map(look, sources))
    errors = [seen for seen in found if isinstance(seen, SourceError)]
    reasons = _reasons(sources, found, options)
    if errors and (options.on_error == "stop" or len(reasons) == len(sources)):
        if len(reasons) == 1:
            raise errors[0]
        raise SourceError(
            f"{len(reasons):,} of {len(sources):,} files cannot be used: {_listed(list(reasons.values()))}; fix them, leave them "
            "out with --exclude, or skip them with --on-error skip", source=sources[min(reasons)].file.path,
        )  # fmt: skip
    gone = reasons if options.on_error == "skip" and len(reasons) < len(sources) else {}
    kept = [(source, seen) for k, (source, seen) in enumerate(zip(sources, found, strict=True)) if k not in gone]
    return [source for source, _ in kept], [seen for _, seen in kept if isinstance(seen, Outline)], list(gone.values())


def skipped_note(reasons: Sequence[str]) -> str:
    many = f"{len(reasons):,} file{'s' * (len(reasons) > 1)}"
    return f"{many} skipped (--on-error skip): {_listed(reasons)}"


def _listed(reasons: Sequence[str]) -> str:
    more = f" | and {len(reasons) - MAX_REASONS:,} more" if len(reasons) > MAX_REASONS else ""
    return " | ".join(reasons[:MAX_REASONS]) + more


def _reasons(
    sources: Sequence[TableSource], found: Sequence[Outline | SourceError], options: TableOptions
) -> dict[int, str]:
    """Why files cannot be used, by number: they cannot be read, or lack a column that was named and others have."""
    reasons = {k: str(seen) for k, seen in enumerate(found) if isinstance(seen, SourceError)}
    if options.transform is not None:
        return reasons
    columns = {
        k: {*seen.schema.names, *(name for name, _ in sources[k].partition)}
        for k, seen in enumerate(found)
        if isinstance(seen, Outline) and seen.schema is not None
    }
    known = set().union(*columns.values())
    where = columns_of(options.where) if options.where else []
    named = dict.fromkeys(
        (*options.entity, options.time, *(options.features or ()), *options.target, *options.static, *options.categorical, *where)
    )  # fmt: skip
    for k, names in columns.items():
        missing = [name for name in named if name in known and name not in names and name != FILE_NAME]
        if missing:
            what = f"column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}"
            reasons[k] = f"{sources[k].file.path!r} lacks {what}"
    return dict(sorted(reasons.items()))


def _look(source: TableSource, options: TableOptions) -> Outline:
    pyarrow = arrow()
    path = source.file.path
    if source.file.size == 0:
        return Outline(None, [], has_rows=False)  # no schema to compare; told in a note
    try:
        if source.format == "csv":
            is_plain = options.transform is None
            schema, has_rows = look_at_csv(source, is_plain=is_plain)
            if is_plain and schema is not None:
                check_texts(source, schema, options)
            return Outline(schema, [], has_rows=has_rows)
        from pyarrow import parquet

        with native(source) as raw, parquet.ParquetFile(raw) as file:
            return _look_at_groups(path, source.file.size, file)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SourceError(
            f"{path!r} is not readable as {source.format}: {first_line}; copy or write it again", source=path
        ) from error


def _look_at_groups(path: str, size: int, file: Any) -> Outline:
    groups = [file.metadata.row_group(k) for k in range(file.metadata.num_row_groups)]
    look = Outline(file.schema_arrow, [(k, group.num_rows, group.total_byte_size) for k, group in enumerate(groups)])
    look.has_rows = any(rows for _, rows, _ in look.groups)
    for k, rows, num_bytes in look.groups:
        # A footer that claims what the file cannot hold is damaged, or made to exhaust memory.
        if rows < 0 or num_bytes < 0 or num_bytes > max(size, 1) * 10_000 + (1 << 20):
            raise SourceError(
                f"{path!r}: row group {k} claims {rows} rows in {num_bytes} bytes, but the file has {size}; write it again",
                source=path,
            )
    for k, group in enumerate(groups):
        values = group.column(0).num_values if group.num_columns else 0
        if group.num_columns and group.num_rows > values:
            raise SourceError(
                f"{path!r}: row group {k} claims {group.num_rows} rows, but its first column has {values}; "
                "write it again", source=path,
            )  # fmt: skip
    return look
