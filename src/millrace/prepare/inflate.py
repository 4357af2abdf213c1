"""Compressed files as streams of bytes, with a limit to what they may grow to."""

from __future__ import annotations

import io
import zlib
from typing import Any

from millrace.distribution import install_command
from millrace.errors import SourceError
from millrace.prepare.engines import alive
from millrace.prepare.files import InputFile

BUFFER = 1 << 20
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
FREE_EXPANSION = 1 << 30  # bytes that any file may inflate to, however small it is


def max_bytes(source: InputFile, max_ratio: int) -> int:
    """The most that a file may inflate to."""
    return max(FREE_EXPANSION, source.size * max_ratio)


class InflatedFile(io.RawIOBase):
    """The text of a compressed file: all members, an error at an early end, and a limit to its size.

    ``seek`` is a member to begin at: its byte in the file and in the text.
    """

    def __init__(
        self, source: InputFile, compression: str, max_ratio: int, seek: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        self._source, self._compression, self._make = source, compression, _decompressor(source, compression)
        self._raw = open(source.location, "rb")  # noqa: SIM115 - closed by close()
        self._limit = max_bytes(source, max_ratio)
        self._inflate = self._make()
        self._raw.seek(0 if seek is None else seek[0])
        self._first, self._out = 0 if seek is None else seek[1], 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._first + self._out

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        """Forward, by inflating the bytes between."""
        if whence != io.SEEK_SET or place < self.tell():
            raise io.UnsupportedOperation("a compressed file is read forward")
        while self.tell() < place and self.readinto(bytearray(min(BUFFER, place - self.tell()))):
            pass
        return self.tell()

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            if self._inflate.eof:
                rest = self._next_member()
                if not rest:
                    return 0
                self._inflate = self._make()
            elif getattr(self._inflate, "needs_input", True) and not getattr(self._inflate, "unconsumed_tail", b""):
                rest = self._more()
                if not rest:
                    if self._source.size == 0:
                        return 0
                    raise self._error("it ends in the middle of a compressed member; it was cut short: copy it again")
            else:
                rest = getattr(self._inflate, "unconsumed_tail", b"")
            data = self._step(rest, len(buffer))
        self._out += len(data)
        if self._out > self._limit:
            raise self._error(f"it expands to more than {self._limit:,} bytes; if that is right, raise --max-ratio")
        buffer[: len(data)] = data
        return len(data)

    def _more(self) -> bytes:
        data = self._raw.read(64 << 10)
        alive(read=len(data))
        return data

    def _next_member(self) -> bytes:
        """The bytes after a member; zeros that fill gzip files up to whole blocks do not count."""
        padding = b"\0" if self._compression == "gzip" else b""
        rest: bytes = self._inflate.unused_data.lstrip(padding)
        while not rest and (more := self._more()):
            rest = more.lstrip(padding)
        return rest

    def _step(self, data: bytes, limit: int) -> bytes:
        try:
            inflated: bytes = self._inflate.decompress(data, limit)
            return inflated
        except (zlib.error, OSError, ValueError, EOFError, RuntimeError) as error:
            raise self._error(f"it is damaged: {error}") from error
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            if "not enough memory" in str(error):
                problem = "its window (zstd --long) needs more memory than there is; give it more, or fewer --workers"
                raise self._error(problem) from error
            raise self._error(f"it is damaged: {error}") from error

    def _error(self, problem: str) -> SourceError:
        where = self._raw.tell()
        return SourceError(
            f"{self._source.path!r}, near compressed byte {where}: {problem}", source=self._source.path, offset=where
        )

    def close(self) -> None:
        if hasattr(self, "_raw"):
            self._raw.close()
        super().close()


def _decompressor(source: InputFile, compression: str) -> Any:
    if compression == "gzip":
        return lambda: zlib.decompressobj(wbits=31)
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        try:
            from backports import zstd  # type: ignore[no-redef, unused-ignore]
        except ImportError as error:
            raise SourceError(f"{source.path!r} needs zstd; {install_command('text')}", source=source.path) from error
    # Some corpora are packed with --long=31; by default a window has at most 128 MiB.
    return lambda: zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 31})
