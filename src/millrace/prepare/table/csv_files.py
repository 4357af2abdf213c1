"""CSV files of a table, which state no types: what their columns are read as, and what a value that does not fit is told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.errors import SourceError
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.source import TableSource, arrow, native

CSV_BLOCK = 1 << 20
_MISFIT = re.compile(
    r"In CSV column #(\d+): Row #(\d+): CSV conversion error to ([^:]+): invalid value '(.*)'", re.DOTALL
)


def open_csv(source: TableSource, types: dict[str, Any] | None) -> Any:
    """A streaming reader of a CSV file; ``types`` are those agreed on, else they are guessed from its beginning."""
    pyarrow = arrow()
    from pyarrow import csv

    delimiter = "\t" if ".tsv" in Path(source.file.path).name.lower() else ","
    options = csv.ConvertOptions(column_types=types, include_columns=list(types)) if types else csv.ConvertOptions()
    stream = native(source)
    for ending, codec in ((".gz", "gzip"), (".zst", "zstd")):
        if source.file.path.lower().endswith(ending):
            stream = pyarrow.CompressedInputStream(stream, codec)
    return csv.open_csv(
        stream, read_options=csv.ReadOptions(block_size=CSV_BLOCK, use_threads=False),
        parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True), convert_options=options,
    )  # fmt: skip


def look_at_csv(source: TableSource) -> tuple[Any, bool]:
    """The columns as guessed from the beginning (None: there are not even names), and whether there are rows."""
    pyarrow = arrow()
    if source.file.size < CSV_BLOCK and Path(source.file.location).read_bytes().isspace():
        return None, False
    try:
        with open_csv(source, None) as reader:
            return reader.schema, bool(next((len(batch) for batch in reader), 0))
    except pyarrow.ArrowInvalid as error:
        if "Empty CSV file" in str(error):
            return None, False
        raise


def typed(schema: Any, options: TableOptions, whole: Mapping[str, Any]) -> Any:
    """Types guessed from the beginning of a file are no types: names are read as text, numbers as floats.

    ``whole`` are the integer columns of Parquet files beside it.
    """
    pyarrow = arrow()

    def kind(field: Any) -> Any:
        if pyarrow.types.is_null(field.type) or field.name == options.time:
            return field.type
        if field.name in (*options.entity, *options.categorical):
            return pyarrow.string()
        if not pyarrow.types.is_integer(field.type):
            return field.type
        return whole.get(field.name, pyarrow.float64())

    return pyarrow.schema([pyarrow.field(field.name, kind(field)) for field in schema])


def misfit(source: TableSource, error: Exception, *, is_guessed: bool) -> SourceError | None:
    """The error for a value that is not of its column's type; None where it says something else.

    ``is_guessed``: the types are those of the beginning of the file, since only a ``--transform`` knows its columns.
    """
    found = _MISFIT.search(str(error))
    if found is None:
        return None
    column, row, kind, value = int(found[1]), int(found[2]), found[3], found[4]
    with open_csv(source, None) as reader:
        name = reader.schema.names[column]
    what = "empty" if kind == "null" else f"of type {kind}"
    remedy = "mend it, or leave the column or the file out"
    if is_guessed:
        remedy = (
            f"before --transform a CSV column has the type of its values in the first {CSV_BLOCK >> 20} MiB of the file: write "
            "the file as Parquet, which states types, or mend the value"
        )
    return SourceError(
        f"{source.file.path!r}, line {row}: column {name!r} holds {value[:80]!r}, but is {what}; {remedy}",
        source=source.file.path, row=row,
    )  # fmt: skip
