"""The command line: one file per command. Nothing heavy is imported before a command runs.

Exit codes: 0 done, 1 a ``MillraceError`` (one line on stderr), 2 wrong usage, 130 Ctrl-C, 143 SIGTERM. Any other error
keeps its traceback: it is our bug.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from millrace.cli import streams
from millrace.cli.printing import print_note, same_command
from millrace.errors import MillraceError, too_long
from millrace.terminal import printable

INTERRUPTED, TERMINATED = 130, 143
GRACE_S = 3.0  # for threads, after Ctrl-C


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    given = sys.argv[1:] if arguments is None else arguments
    streams.prepare()
    received: list[int] = []
    try:
        code = _outcome(given, received)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one, before the line of the first is printed
        code = _interrupted(given, received)
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(code))
    except Exception:
        if not _has_joined_ranks():
            raise
        sys.excepthook(*sys.exc_info())
        code = 1
    if _has_joined_ranks() or (code in (INTERRUPTED, TERMINATED) and not _threads_end()):
        _leave(code)
    sys.exit(code)


def _threads_end() -> bool:
    """Whether the threads that an interrupted command left end soon. Those that wait for a silent server do not."""
    last = time.monotonic() + GRACE_S
    others = [own for own in threading.enumerate() if own is not threading.current_thread()]
    for thread in (own for own in others if not own.daemon or own.name.startswith("millrace-")):
        thread.join(max(0.0, last - time.monotonic()))
        if thread.is_alive():
            return False
    return True


def _has_joined_ranks() -> bool:
    """Whether the command was one of several ranks."""
    return bool(getattr(sys.modules.get("millrace.train.dist"), "held", None))


def _leave(code: int) -> None:
    """Ends the process without freeing its objects: freeing a process group of gloo may never end, nor a request."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    received: list[int] = []
    try:
        return _outcome(arguments, received)
    except KeyboardInterrupt:
        return _interrupted(arguments, received)


def _interrupted(arguments: list[str], received: list[int]) -> int:
    """Says how to continue after Ctrl-C, or after a SIGTERM that was received; returns the exit code."""
    if os.environ.get("RANK", "0") == "0":  # of a training run, one rank says it
        print_note(f"interrupted; run it again with: {same_command(arguments)}")
    return TERMINATED if received else INTERRUPTED


def _outcome(arguments: list[str], received: list[int]) -> int:
    """Runs one command; failures of the output are exit codes too. Ctrl-C is a ``KeyboardInterrupt``."""
    try:
        code = _run(arguments, received)
        sys.stdout.flush()
    except streams.OutputFailed as error:
        streams.discard_output()
        print_note(f"error: {error}")
        return 1
    except (streams.ReaderGone, BrokenPipeError):
        streams.discard_output()
        return 141
    return code


def _run(arguments: list[str], received: list[int]) -> int:
    """Runs the command, and prints its errors in one line; notes the SIGTERM that it received."""
    from millrace.cli.app import Abort, UsageError, app
    from millrace.cli.spellings import modern

    try:
        with _termination_interrupts(received) if arguments[:1] == ["prepare"] else contextlib.nullcontext():
            code = app(modern(arguments), standalone_mode=False, prog_name="millrace")
        if code == INTERRUPTED:  # newer typer catches Ctrl-C itself and returns this code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except (streams.OutputFailed, streams.ReaderGone):
        raise
    except MillraceError as error:
        print_note(f"error: {error}")
        return 1
    except UsageError as error:
        _show_usage(error)
        return 2
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print_note(f"error: {too_long(str(error.filename or ''))}")
        return 1
    except Abort:
        raise KeyboardInterrupt from None


def _show_usage(error: Any) -> None:
    """Prints how a command is used, and what is wrong with the arguments."""
    shown = io.StringIO()
    error.message = printable(str(error.message))  # it names arguments, which may be names of files
    error.show(file=shown)
    sys.stderr.write(printable(shown.getvalue(), keep="\n"))


@contextlib.contextmanager
def _termination_interrupts(received: list[int]) -> Iterator[None]:
    """Makes SIGTERM end the command as Ctrl-C does: workers end, and the command prints how to continue."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
