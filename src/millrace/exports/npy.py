"""One ``.npy`` file per column, and one with the offsets of each axis; ``columns.json`` says what each is.

Texts are their utf-8 bytes with offsets, dictionaries their codes, times datetime64. Nothing needs pickle to be read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from millrace.exports.chunks import Chunk, Source
from millrace.exports.folder import sync_file
from millrace.ragged import Ragged
from millrace.store import platform


class NpyWriter:
    """Arrays are written as they come: their shapes are known before."""

    def __init__(self, folder: Path, source: Source, file_bytes: int) -> None:
        self._folder, self._source = folder, source
        self._files: dict[str, BinaryIO] = {}
        self.files: list[str] = []
        for axis in source.axes:
            offsets = np.concatenate(([0], np.cumsum(source.lengths(axis)))).astype(np.int64)
            np.save(self._path(f"offsets_{axis}"), offsets, allow_pickle=False)
            sync_file(self._path(f"offsets_{axis}"))

    def _path(self, name: str) -> Path:
        if f"{name}.npy" not in self.files:
            self.files.append(f"{name}.npy")
        return self._folder / f"{name}.npy"

    def write(self, chunk: Chunk) -> None:
        for name, value in chunk.columns.items():
            rows = np.ascontiguousarray(value.values if isinstance(value, Ragged) else value)
            rows.tofile(self._file(name, rows.dtype))

    def _file(self, name: str, dtype: Any) -> BinaryIO:
        if name not in self._files:
            file = self._files[name] = open(self._path(name), "wb")  # noqa: SIM115 - closed by close()
            header = {
                "descr": np.lib.format.dtype_to_descr(dtype),
                "fortran_order": False,
                "shape": self._source.shape(name),
            }
            np.lib.format.write_array_header_2_0(file, header)
            file.flush()
        return self._files[name]

    def finish(self) -> None:
        described: dict[str, Any] = {}
        for name, column in self._source.columns.items():
            if name not in self._files:  # no records
                kind = f"M8[{self._source.time_unit}]" if name == "time" and self._source.time_unit else column.storage
                self._file(name, np.dtype(np.float32) if column.dtype == "bfloat16" else np.dtype(kind))
            described[name] = {
                "dtype": column.dtype,
                "shape": list(column.shape),
                "offsets": self._source.axis_of(name),
            }
            if column.values is not None:
                described[name]["values"] = list(column.values)
        self.close()
        for name in self._files:
            sync_file(self._path(name))
        text = json.dumps({"records": self._source.store.num_records, "columns": described}, indent=1)
        platform.write_file(self._folder / "columns.json", text.encode(), mode=0o644)
        self.files.append("columns.json")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
