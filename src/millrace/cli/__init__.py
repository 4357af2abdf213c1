"""The command line: one file per command, nothing heavy imported before a command runs.

Exit codes: 0 done, 1 a ``MillraceError`` (one line on stderr), 2 wrong usage, 130 Ctrl-C. Anything else keeps
its traceback, since it is our bug.
"""

from __future__ import annotations

import os
import shlex
import sys

from millrace.errors import MillraceError

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal of another encoding shows escapes, never an exception
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    from millrace.cli.app import Abort, UsageError, app
    from millrace.cli.prepare_text import modern

    try:
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
        sys.stderr.write(f"interrupted; run it again with: millrace {shlex.join(arguments)}\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); what cannot be written must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
