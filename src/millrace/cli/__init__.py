"""The command line: one file per command, nothing heavy imported before a command runs.

Exit codes: 0 done, 1 a ``MillraceError`` (one line on stderr), 2 wrong usage, 130 Ctrl-C, 143 SIGTERM. Anything else
keeps its traceback, since it is our bug.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

from millrace.errors import MillraceError

INTERRUPTED, TERMINATED = 130, 143


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    if sys.stdout is None:  # closed by the caller (`>&-`); nothing else may take its place
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal of another encoding shows escapes, never an exception
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    from millrace.cli.app import Abort, UsageError, app
    from millrace.cli.console import same_command
    from millrace.cli.prepare_text import modern

    arrived: list[int] = []
    try:
        with _termination_interrupts(arrived) if arguments[:1] == ["prepare"] else contextlib.nullcontext():
            code = app(modern(arguments), standalone_mode=False, prog_name="millrace")
        if code == INTERRUPTED:  # newer typer catches Ctrl-C itself and says so by this code
            raise KeyboardInterrupt
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except MillraceError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except UsageError as error:
        error.show()
        return 2
    except (KeyboardInterrupt, Abort):
        if os.environ.get("RANK", "0") == "0":  # one of the ranks of a training run is enough
            sys.stderr.write(f"interrupted; run it again with: {same_command(arguments)}\n")
        return TERMINATED if arrived else INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); what cannot be written must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


@contextlib.contextmanager
def _termination_interrupts(arrived: list[int]) -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: workers end, and what continues it is said. Training has its own way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        arrived.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
