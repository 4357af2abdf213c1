"""Tar files as WebDataset reads them: the members of a record stand together and share a number.

``000000007.json`` has the single values of a record. A text is ``000000007.caption.txt``, an array ``000000007.hits.npy``.
A column of bytes that holds a JPEG, PNG, GIF or WebP image is the file itself: ``000000007.image.jpg``.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from millrace.exports.chunks import Chunk, Source, texts, words
from millrace.exports.folder import sync_file
from millrace.ragged import Ragged

# How images begin; of WebP the bytes from the eighth on.
_MAGIC = ((b"\xff\xd8\xff", 0, "jpg"), (b"\x89PNG\r\n\x1a\n", 0, "png"), (b"GIF8", 0, "gif"), (b"WEBP", 8, "webp"))


class TarWriter:
    """A new tar file where one has ``file_bytes``. The same records give the same bytes."""

    def __init__(self, folder: Path, source: Source, file_bytes: int) -> None:
        self._folder, self._source, self._file_bytes = folder, source, file_bytes
        self._tar: tarfile.TarFile | None = None
        self.files: list[str] = []

    def write(self, chunk: Chunk) -> None:
        columns = {name: self._shown(name, value) for name, value in chunk.columns.items()}
        for place in range(chunk.count):
            tar = self._tar or self._begin()
            for suffix, data in self._members(columns, place):
                member = tarfile.TarInfo(f"{chunk.first + place:09d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
            if tar.offset >= self._file_bytes:
                self._end()

    def _shown(self, name: str, value: Any) -> Any:
        column = self._source.columns[name]
        if column.dtype == "string":
            return texts(value)
        if column.dtype == "dictionary" and not isinstance(value, Ragged):
            return words(value, column.values or ())
        return value

    def _members(self, columns: dict[str, Any], place: int) -> Iterator[tuple[str, bytes]]:
        single: dict[str, Any] = {}
        for name, value in columns.items():
            column, item = self._source.columns[name], value[place]
            if column.dtype == "string":
                yield f"{name}.txt", item.encode()
            elif column.axis is None and not column.shape:
                single[name] = item.item() if hasattr(item, "item") else item
            elif column.axis is None and column.dtype == "dictionary":
                single[name] = item.tolist()
            else:
                data = item.tobytes() if column.dtype == "uint8" and not column.shape else b""
                kind = image_kind(data)
                yield (f"{name}.npy", _npy(item)) if kind is None else (f"{name}.{kind}", data)
        if single:
            yield "json", json.dumps(single, ensure_ascii=False).encode()

    def _begin(self) -> tarfile.TarFile:
        self.files.append(f"part-{len(self.files):05d}.tar")
        self._tar = tarfile.open(self._folder / self.files[-1], "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        return self._tar

    def _end(self) -> None:
        if self._tar is not None:
            self.close()
            sync_file(self._folder / self.files[-1])

    def finish(self) -> None:
        if not self.files:
            self._begin()
        self._end()

    def close(self) -> None:
        if self._tar is not None:
            tar, self._tar = self._tar, None
            tar.close()


def image_kind(data: bytes) -> str | None:
    """Which kind of image these bytes are, by how they begin."""
    return next((kind for magic, at, kind in _MAGIC if data[at : at + len(magic)] == magic), None)


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()
