"""Opens a source as a stream of bytes: inflated if it is compressed, as UTF-8 if it has another encoding."""

from __future__ import annotations

import codecs
import io
from typing import Any

from millrace.errors import SourceError
from millrace.prepare.engines import alive
from millrace.prepare.inflate import BUFFER, InflatedFile
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.sources import Source

MARK = b"\xef\xbb\xbf"
BLOCK = 1 << 18  # bytes that are decoded at once


def open_source(source: Source, options: ReadOptions, seek: tuple[int, int] | None = None) -> io.BufferedReader:
    """The bytes of a source; of a compressed one from ``seek`` on. Closing it closes the file."""
    if source.codec is not None:
        return io.BufferedReader(DecodedFile(source, options), BUFFER)
    return _open_bytes(source, options, seek)


def _open_bytes(source: Source, options: ReadOptions, seek: tuple[int, int] | None = None) -> io.BufferedReader:
    if source.compression is None:
        # CSV is read from end to end, so its progress is reported here; other files come in slices.
        is_counted = source.format == "csv"
        return io.BufferedReader(_CountedFile(source.location), BUFFER) if is_counted else open(source.location, "rb")
    return io.BufferedReader(InflatedFile(source, source.compression, options.max_ratio, seek), BUFFER)


def text_start(source: Source, head: bytes) -> int:
    """Where the text of a file starts: after its byte order mark."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise SourceError(f"{source.path!r} looks like UTF-16; give --encoding utf-16", source=source.path, offset=0)
    return len(MARK) if head.startswith(MARK) else 0


class DecodedFile(io.RawIOBase):
    """A file of another encoding as UTF-8, from its beginning on."""

    def __init__(self, source: Source, options: ReadOptions) -> None:
        super().__init__()
        assert source.codec is not None
        self._source, self._file = source, _open_bytes(source, options)
        errors = "replace" if options.on_error == "replace" else "strict"
        self._decoder = codecs.getincrementaldecoder(source.codec)(errors)
        self._ready, self._is_over, self._at = b"", False, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._is_over:
            block = self._file.read(BLOCK)
            self._is_over = not block
            try:
                self._ready = self._decoder.decode(block, final=self._is_over).encode(errors="replace")
            except UnicodeError as error:
                place = self._at + getattr(error, "start", 0)
                raise SourceError(
                    f"{self._source.path!r}, near byte {place}: it is not {self._source.codec}: {error}; check --encoding, or "
                    "go on with --on-error replace",
                    source=self._source.path, offset=place,
                ) from error  # fmt: skip
            self._at += len(block)
        data, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()
        super().close()


class _CountedFile(io.FileIO):
    """A file that reports how much is read."""

    def readinto(self, buffer: Any) -> int:
        num_bytes = super().readinto(buffer) or 0
        alive(read=num_bytes)
        return num_bytes
