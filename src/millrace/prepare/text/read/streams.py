"""Opens a source as a stream of bytes: inflated if it is compressed, as UTF-8 if it has another encoding."""

from __future__ import annotations

import codecs
import io
import zlib
from typing import Any

from millrace.errors import SourceError
from millrace.prepare.engines import alive
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.sources import Source

BUFFER = 1 << 20
MARK = b"\xef\xbb\xbf"
BLOCK = 1 << 18  # bytes that are decoded at once
FREE_EXPANSION = 1 << 30  # bytes that any file may inflate to, however small it is


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
    return io.BufferedReader(_InflatedFile(source, options, seek), BUFFER)


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


class _InflatedFile(io.RawIOBase):
    """The text of a compressed file: all members, an error at an early end, and a limit to its size.

    ``seek`` is a member to begin at: its byte in the file and in the text.
    """

    def __init__(self, source: Source, options: ReadOptions, seek: tuple[int, int] | None) -> None:
        super().__init__()
        self._source, self._make = source, _decompressor(source)
        self._raw = open(source.location, "rb")  # noqa: SIM115 - closed by close()
        self._limit = max(FREE_EXPANSION, source.size * options.max_ratio)
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
        padding = b"\0" if self._source.compression == "gzip" else b""
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


def _decompressor(source: Source) -> Any:
    if source.compression == "gzip":
        return lambda: zlib.decompressobj(wbits=31)
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        try:
            from backports import zstd  # type: ignore[no-redef, unused-ignore]
        except ImportError as error:
            raise SourceError(f"{source.path!r} needs zstd; pip install millrace[text]", source=source.path) from error
    # Some corpora are packed with --long=31; by default a window has at most 128 MiB.
    return lambda: zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 31})
