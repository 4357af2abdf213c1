"""Standard output and error of a command, which may be closed, full, or have lost their reader.

``main`` calls ``prepare`` once. Then a full standard output is an error of one line. If standard error is full or closed,
the command goes on without it. Python's own messages, tracebacks and warnings, are made printable.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
import warnings
from types import TracebackType
from typing import Any, TextIO

from millrace.errors import MillraceError
from millrace.terminal import LINES, printable


# Both are OSErrors, since training goes on without its output. They have no errno: typer would end the command by it.
class OutputFailed(MillraceError, OSError):
    """Standard output takes no more: its disk is full, or its device is gone."""


class ReaderGone(MillraceError, BrokenPipeError):
    """Whoever read our output has gone (`| head`)."""


class _Output(io.FileIO):
    """Standard output: its failures are told apart from those of other files."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError as error:
            raise ReaderGone("the reader of the output has gone") from error
        except OSError as error:
            why = f"standard output cannot be written: {error.strerror}; free space, or send it elsewhere"
            raise OutputFailed(why) from error


class _Notes(_Output):
    """Standard error: what cannot be written is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OutputFailed:
            return memoryview(data).nbytes


def prepare() -> None:
    """Opens streams that the caller closed, and replaces output and error by the classes above."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # on /dev/null: otherwise the next file would get its number, and its output
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
    sys.stdout = _stream(sys.stdout, _Output, 1)
    sys.stderr = _stream(sys.stderr, _Notes, 2)
    sys.excepthook, warnings.formatwarning = _show_exception, _format_warning


def _show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace)), keep=LINES))


_format = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return printable(_format(message, category, filename, lineno, line), keep=LINES)


def send_errors_to(fd: int) -> None:
    """Sends what Python writes to standard error to this descriptor. Libraries in C still write to number 2."""
    sys.stderr = _stream(sys.stderr, _Notes, fd)


def _stream(stream: TextIO | None, kind: type[io.FileIO], number: int) -> TextIO:
    if stream is None:
        return open(os.devnull, "w")
    if os.name == "nt":  # a console there is no file
        return stream
    raw = kind(number, "wb", closefd=False)
    is_unbuffered = isinstance(getattr(stream, "buffer", None), io.RawIOBase)
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",  # a terminal of another encoding shows escapes, never an exception
        line_buffering=bool(getattr(stream, "line_buffering", False)),
        write_through=is_unbuffered,
    )


def discard_output() -> None:
    """Drops what could not be written: Python would try again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
