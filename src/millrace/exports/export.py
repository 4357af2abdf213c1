"""``export``: a store, a split, or what ``where`` chose of it, as Parquet, ``.npy`` or WebDataset files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.exports.chunks import CHUNK_BYTES, Source
from millrace.exports.folder import OutFolder
from millrace.exports.npy import NpyWriter
from millrace.exports.parquet import ParquetWriter
from millrace.exports.webdataset import TarWriter
from millrace.ragged import as_integer
from millrace.store import platform
from millrace.store.open import open_store
from millrace.store.store import Store

FORMATS: dict[str, Any] = {"parquet": ParquetWriter, "npy": NpyWriter, "webdataset": TarWriter}
FILE_BYTES = 256 << 20


def export(
    store: Store | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: str,
    split: str | None = None,
    columns: Sequence[str] | None = None,
    file_bytes: int = FILE_BYTES,
) -> dict[str, Any]:
    """Writes all records to a new folder ``out``, and says what was written.

    ``to`` is "parquet", "npy" or "webdataset". Values are written as they are stored: of a scaled table, scaled. Memory does
    not grow with the data. The folder appears when it is whole; a new file begins after about ``file_bytes`` (except npy).

    >>> import tempfile
    >>> from millrace import from_arrays
    >>> store = from_arrays({"hits": [0.0, 1.0, 2.0], "label": [7, 8]}, offsets=[0, 1, 3])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(store, folder + "/events", to="npy")["files"]
    ['offsets_rows.npy', 'hits.npy', 'label.npy', 'columns.json']
    """
    if to not in FORMATS:
        raise ConfigError(f"to={to!r}; expected one of {', '.join(FORMATS)}")
    if as_integer("file_bytes", file_bytes) < 1:
        raise ConfigError(f"file_bytes={file_bytes}; expected 1 or more")
    opened = store if isinstance(store, Store) else open_store(store)
    source = Source(opened if split is None else opened.split(split), columns)
    with OutFolder(Path(out)) as folder, platform.writing(os.fspath(out)):
        writer = FORMATS[to](folder, source, file_bytes)
        with contextlib.closing(writer):  # its files, also after an error
            for chunk in source.chunks(min(CHUNK_BYTES, file_bytes)):
                writer.write(chunk)
            writer.finish()
        platform.sync_dir(folder)
        num_bytes = sum(os.path.getsize(folder / name) for name in writer.files)
    return {"out": str(out), "to": to, "records": source.store.num_records, "bytes": num_bytes, "files": writer.files}
