"""Parquet files with one row for each record: row columns are lists, texts strings, times timestamps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.distribution import install_command
from millrace.errors import ConfigError
from millrace.exports.chunks import Chunk, Source
from millrace.exports.folder import sync_file
from millrace.ragged import Ragged
from millrace.store.times import time_zone

if TYPE_CHECKING:
    import pyarrow

MAX_INT32 = (1 << 31) - 1


class ParquetWriter:
    """A new file where one has ``file_bytes``."""

    def __init__(self, folder: Path, source: Source, file_bytes: int) -> None:
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigError(f"export to parquet needs pyarrow; {install_command('table')}") from error
        self._arrow, self._parquet = pyarrow, pyarrow.parquet
        self._folder, self._source, self._file_bytes = folder, source, file_bytes
        # Lists count in int32 unless a record alone has more.
        self._wide = {axis: int(source.lengths(axis).max(initial=0)) > MAX_INT32 for axis in source.axes}
        self._schema = pyarrow.schema([(name, self._type(name)) for name in source.columns])
        self._writer: Any = None
        self.files: list[str] = []

    def _type(self, name: str) -> Any:
        arrow, column = self._arrow, self._source.columns[name]
        if column.dtype == "string":
            return arrow.large_string() if self._wide[name] else arrow.string()
        found = arrow.string() if column.dtype == "dictionary" else None
        if name == "time" and self._source.time_unit is not None:
            unit, zone = self._source.time_unit, time_zone(self._source.store)
            found = arrow.date32() if unit == "D" else arrow.timestamp(unit, tz=zone and "UTC")
        if found is None:
            found = arrow.from_numpy_dtype(np.float32 if column.dtype == "bfloat16" else column.storage)
        for size in reversed(column.shape):
            found = arrow.list_(found, size)
        axis = self._source.axis_of(name)
        if axis is None:
            return found
        return arrow.large_list(found) if self._wide[axis] else arrow.list_(found)

    def _begin(self) -> None:
        self.files.append(f"part-{len(self.files):05d}.parquet")
        self._sink = self._arrow.OSFile(str(self._folder / self.files[-1]), "wb")
        self._writer = self._parquet.ParquetWriter(self._sink, self._schema)

    def write(self, chunk: Chunk) -> None:
        if self._writer is None:
            self._begin()
        arrays = [self._array(name, chunk.columns[name]) for name in self._source.columns]
        self._writer.write_batch(self._arrow.RecordBatch.from_arrays(arrays, schema=self._schema))
        if self._sink.tell() >= self._file_bytes:
            self._end()

    def _array(self, name: str, value: Any) -> pyarrow.Array:
        arrow, kind = self._arrow, self._schema.field(name).type
        column = self._source.columns[name]
        if not isinstance(value, Ragged):
            return self._items(value, column, kind)
        is_wide = self._wide[str(self._source.axis_of(name))]
        offsets = value.offsets.astype(np.int64 if is_wide else np.int32)
        if column.dtype == "string":
            maker = arrow.LargeStringArray if is_wide else arrow.StringArray
            buffers = arrow.py_buffer(offsets), arrow.py_buffer(np.ascontiguousarray(value.values))
            return maker.from_buffers(len(value), *buffers)
        items = self._items(value.values, column, kind.value_type)
        maker = arrow.LargeListArray if is_wide else arrow.ListArray
        return maker.from_arrays(arrow.array(offsets), items, type=kind)

    def _items(self, values: Any, column: Any, kind: Any) -> pyarrow.Array:
        """Items of a column, each a number, a text, or a list of a fixed size."""
        arrow, inner = self._arrow, kind
        for _ in column.shape:
            inner = inner.value_type
        flat: Any = np.ascontiguousarray(values).reshape(-1)
        if column.dtype == "dictionary":
            known = arrow.array(list(column.values or ()), arrow.string())
            found = known.take(arrow.array(flat))
        else:
            found = arrow.array(flat, inner) if flat.dtype.kind != "M" else arrow.array(flat).cast(inner)
        for size in reversed(column.shape):
            found = arrow.FixedSizeListArray.from_arrays(found, size)
        return found if found.type == kind else found.cast(kind)

    def _end(self) -> None:
        if self._writer is not None:
            self.close()
            sync_file(self._folder / self.files[-1])

    def finish(self) -> None:
        if not self.files:  # no records: one file with the columns
            self._begin()
        self._end()

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
            self._sink.close()
