"""An outline of every file of a table, made before any work: its columns, its row groups, whether it can be used.

Files that cannot be used are listed together in one error, or skipped with ``--on-error skip``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from millrace.errors import SourceError
from millrace.native import num_cores
from millrace.prepare.quarantine import Skips, count_lines
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.read.csv_files import check_texts, look_at_csv, misfit_error
from millrace.prepare.table.read.table_file import TableSource, arrow, native
from millrace.prepare.table.read.where import columns_of

MAX_REASONS = 20  # files that are named in one message


class FileOutline(msgspec.Struct):
    """One file, its schema, and its row groups as (number, rows, bytes)."""

    source: TableSource
    schema: Any  # None: the file has not even a header
    groups: list[tuple[int, int, int]]
    has_rows: bool = True
    is_wanted: bool = True  # False: its path says that --where asks for none of its rows


def outline_files(
    sources: Sequence[TableSource],
    options: TableOptions,
    watched: Callable[[Iterable[Any], int], Iterable[Any]],
) -> tuple[list[FileOutline], dict[int, str], Skips]:
    """The files that can be used; by number why others are skipped, and their rows. Without ``skip`` these are refused."""

    def outline(source: TableSource) -> FileOutline | SourceError:
        try:
            return _outline(source, options)
        except SourceError as error:
            return error

    if len(sources) < 8:
        outlines = [outline(source) for source in sources]
    else:
        with ThreadPoolExecutor(min(8, num_cores())) as pool:
            outlines = list(watched(pool.map(outline, sources), len(sources)))
    errors = [error for error in outlines if isinstance(error, SourceError)]
    reasons = _reasons(outlines, options)
    if errors and (options.on_error == "stop" or len(reasons) == len(sources)):
        if len(reasons) == 1:
            raise errors[0]
        raise SourceError(
            f"{len(reasons):,} of {len(sources):,} files cannot be used: {_list_reasons(list(reasons.values()))}; fix them, leave "
            "them out with --exclude, or skip them with --on-error skip", source=sources[min(reasons)].file.path,
        )  # fmt: skip
    skipped = reasons if options.on_error == "skip" and len(reasons) < len(sources) else {}
    usable = [one for k, one in enumerate(outlines) if isinstance(one, FileOutline) and k not in skipped]
    rows = [_num_rows(sources[k], outlines[k]) for k in skipped]
    return usable, skipped, Skips(sum(rows), sum(rows), next(iter(skipped.values()), ""))


def _num_rows(source: TableSource, outline: FileOutline | SourceError) -> int:
    """About how many rows a file has that is skipped."""
    if isinstance(outline, FileOutline) and outline.groups:
        return sum(rows for _, rows, _ in outline.groups)
    if source.format != "csv":
        return 1
    return count_lines(lambda: arrow().input_stream(os.fsencode(source.file.location).decode(), compression="detect"))


def skipped_note(reasons: Sequence[str]) -> str:
    many = f"{len(reasons):,} file{'s' * (len(reasons) > 1)}"
    return f"{many} skipped (--on-error skip): {_list_reasons(reasons)}"


def _list_reasons(reasons: Sequence[str]) -> str:
    more = f" | and {len(reasons) - MAX_REASONS:,} more" if len(reasons) > MAX_REASONS else ""
    return " | ".join(reasons[:MAX_REASONS]) + more


def _reasons(outlines: Sequence[FileOutline | SourceError], options: TableOptions) -> dict[int, str]:
    """Why files cannot be used, by number: they cannot be read, or lack a column that was named and others have."""
    reasons = {k: str(error) for k, error in enumerate(outlines) if isinstance(error, SourceError)}
    if options.transform is not None:
        return reasons
    columns = {
        k: (one.source.file.path, {*one.schema.names, *(name for name, _ in one.source.partition)})
        for k, one in enumerate(outlines)
        if isinstance(one, FileOutline) and one.schema is not None
    }
    known = set().union(*(names for _, names in columns.values()))
    where = columns_of(options.where) if options.where else []
    named = dict.fromkeys((*options.entity_columns, options.time, *options.named_columns, *where))
    for k, (path, names) in columns.items():
        missing = [repr(name) for name in named if name in known and name not in names]
        if missing:
            reasons[k] = f"{path!r} lacks column{'s' * (len(missing) > 1)} {', '.join(missing)}"
    return dict(sorted(reasons.items()))


def _outline(source: TableSource, options: TableOptions) -> FileOutline:
    pyarrow = arrow()
    path = source.file.path
    if source.file.size == 0:
        return FileOutline(source, None, [], has_rows=False)  # a note names it
    try:
        if source.format == "csv":
            is_plain = options.transform is None
            source, schema, has_rows = look_at_csv(source, is_plain=is_plain)
            if is_plain and schema is not None:
                check_texts(source, schema, options)
            return FileOutline(source, schema, [], has_rows=has_rows)
        from pyarrow import parquet

        with native(source) as raw, parquet.ParquetFile(raw) as file:
            groups = [file.metadata.row_group(k) for k in range(file.metadata.num_row_groups)]
            for k, group in enumerate(groups):
                _check_group(source, k, group)
            sizes = [(k, group.num_rows, group.total_byte_size) for k, group in enumerate(groups)]
            return FileOutline(source, file.schema_arrow, sizes, has_rows=any(rows for _, rows, _ in sizes))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if source.format == "csv" and (uneven := misfit_error(source, error, is_guessed=True)) is not None:
            raise uneven from error
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SourceError(
            f"{path!r} is not readable as {source.format}: {first_line}; copy or write it again", source=path
        ) from error


def _check_group(source: TableSource, number: int, group: Any) -> None:
    """Refuses a footer that claims what the file cannot hold: it is damaged, or made to exhaust memory."""
    rows, num_bytes, size = group.num_rows, group.total_byte_size, source.file.size
    values = group.column(0).num_values if group.num_columns else rows
    if rows < 0 or num_bytes < 0 or num_bytes > max(size, 1) * 10_000 + (1 << 20):
        claim = f"{rows} rows in {num_bytes} bytes, but the file has {size}"
    elif rows > values:
        claim = f"{rows} rows, but its first column has {values}"
    else:
        return
    path = source.file.path
    raise SourceError(f"{path!r}: row group {number} claims {claim}; write it again", source=path)
