"""One file of a table: its format, the columns its path names, and how pyarrow opens it."""

from __future__ import annotations

import codecs
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from millrace.distribution import install_command
from millrace.errors import ConfigError
from millrace.prepare.files import InputFile, ending

ENDINGS = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv"}
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


class TableSource(msgspec.Struct, frozen=True):
    """One file of the table, with the columns its path names (``year=2015/``)."""

    file: InputFile
    format: str
    partition: tuple[tuple[str, str | int | None], ...] = ()
    delimiter: str | None = None  # of a CSV file; None: a comma, in .tsv files a tab
    encoding: str | None = None
    decimal: str = "."

    @property
    def stem(self) -> str:
        """What the file is called without its endings: the entity, where each file is one."""
        name = Path(self.file.path).name
        for last in (".gz", ".zst", *ENDINGS):
            if name.lower().endswith(last):
                name = name[: -len(last)]
        return name


def arrow() -> Any:
    """pyarrow, which tables need."""
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(f"tables need pyarrow; {install_command('table')}") from error
    return pyarrow


def native(source: TableSource) -> Any:
    """A file opened by pyarrow; its name goes as bytes, since it need not be UTF-8."""
    return arrow().OSFile(os.fsencode(source.file.location))


def format_of(path: str) -> str | None:
    name = path.lower()
    for last in (".gz", ".zst"):
        name = name.removesuffix(last)
    found = ENDINGS.get(Path(name).suffix)
    return None if found == "parquet" and name != path.lower() else found


def check_form(delimiter: str | None, encoding: str | None, decimal: str) -> None:
    """Refuses a delimiter, an encoding or a decimal sign that cannot be."""
    if decimal not in (".", ","):
        raise ConfigError(f"--decimal {decimal!r}; expected '.' or ','")
    if decimal == delimiter:
        raise ConfigError(f"--decimal {decimal!r} is also the delimiter; give another --delimiter, such as ';'")
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n'):
        raise ConfigError(f"--delimiter {delimiter!r}; expected one character, such as ';', or \\t for a tab")
    try:
        codecs.lookup(encoding or "utf8")
    except LookupError:
        raise ConfigError(f"--encoding {encoding!r} is unknown; expected latin-1, cp1252, utf-16 or the like") from None


def with_partitions(
    files: Sequence[InputFile], delimiter: str | None = None, encoding: str | None = None, decimal: str = "."
) -> list[TableSource]:
    """Sources with the columns of their paths; a column holds integers where every value of it is one."""
    raw = []
    for file in files:
        if (kind := format_of(file.path)) is None:
            if ending(file.path) in (".parquet.gz", ".parquet.zst"):
                raise ConfigError(f"{file.path!r}: Parquet is compressed inside; unpack it first")
            raise ConfigError(
                f"{file.path!r} has an unknown ending; expected {', '.join(ENDINGS)}, CSV also .gz or .zst"
            )
        pairs = [part.partition("=")[::2] for part in file.folders if "=" in part]
        raw.append((file, kind, {unquote(name): unquote(value) for name, value in pairs if name}))
    texts = {
        name for _, _, pairs in raw for name, value in pairs.items() if value != NO_VALUE and not _is_integer(value)
    }

    def typed(name: str, value: str) -> str | int | None:
        return None if value == NO_VALUE else value if name in texts else int(value)

    return [
        TableSource(
            file, kind, tuple((name, typed(name, value)) for name, value in pairs.items()),
            *((delimiter, encoding, decimal) if kind == "csv" else ()),
        )
        for file, kind, pairs in raw
    ]  # fmt: skip


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii() and len(text) < 19


def partition_type(value: str | int | None) -> Any:
    """The type of a column of the path, as far as one file shows it."""
    pyarrow = arrow()
    return pyarrow.null() if value is None else pyarrow.int64() if isinstance(value, int) else pyarrow.string()
