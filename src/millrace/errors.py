"""The tree of errors, chosen by what the reader does next.

Every part raises these and nothing else for what a user can fix; the command line prints one as a
single line. A message gives the thing, its value, what was expected, and the remedy.

    MillraceError
    ├── ConfigError(ValueError)              fix the arguments
    ├── StoreError
    │   ├── StoreNotFound(FileNotFoundError) wrong path, or preparation did not finish
    │   ├── StoreCorrupt                     copy or prepare again
    │   ├── StoreTooNew                      upgrade millrace
    │   ├── StoreLocked(BlockingIOError)     another process writes here
    │   ├── StoreUnreachable(ConnectionError)  check the server, the network or the credentials
    │   └── StoreWriteFailed(OSError)        free the disk or fix the permission, then run again
    ├── SourceError                          fix the input
    ├── ResumeMismatch                       wrong store, view or order for this checkpoint
    ├── FeedError
    │   └── StageFailed                      your transform raised
    ├── TrainError                           the run cannot go on: see its step and samples
    └── QueueError
        ├── QueueUnreachable(ConnectionError)
        └── LeaseLost
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import traceback
from collections.abc import Iterable
from functools import partial
from typing import Any

from millrace.terminal import LINES, printable

# The user and the query of a URL; one slash where a URL became a path. Addresses of queues hold no secret.
_USER = re.compile(r"\b((?!rediss?:)[a-z][a-z0-9+.]+:/{1,2})\S*@", re.IGNORECASE)
_QUERY = re.compile(r"\b([a-z][a-z0-9+.]+:/{1,2}[^\s?]*\?)\S*=\S*", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """A message whose URLs show no user, password or signature.

    >>> without_secrets("https://me:pw@host/a.csv?X-Sig=12 is not there")
    'https://...@host/a.csv?... is not there'
    """
    return _QUERY.sub(r"\1...", _USER.sub(r"\1...@", text)) if ":/" in text else text


class MillraceError(Exception):
    """The base of all errors of millrace; ``except MillraceError`` catches them all."""

    is_reported = False  # whether another rank of a training run prints it

    def __init__(self, message: str, **context: Any) -> None:
        super().__init__(printable(without_secrets(message)))
        self._context = context
        for name, value in context.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException's own __reduce__ would lose the attributes between processes.
        return partial(type(self), **self._context), (str(self),)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ConfigError(MillraceError, ValueError):
    """An argument or option cannot be used as given."""


class StoreError(MillraceError):
    """Something about a store on disk; ``path`` names the file or folder."""

    path: str | None = None


class StoreNotFound(StoreError, FileNotFoundError):
    """There is no finished store at the path."""


class StoreCorrupt(StoreError):
    """The bytes on disk are not those that were written."""

    column: str | None = None
    problem: str | None = None  # the message without path and remedy
    expected: Any = None
    found: Any = None


class StoreTooNew(StoreError):
    """The store was written by a later version of millrace."""


class StoreLocked(StoreError, BlockingIOError):
    """Another process is writing the same store; ``owner`` says which."""

    owner: dict[str, Any] | None = None


class StoreUnreachable(StoreError, ConnectionError):
    """A server did not give or take an object of a store; ``status`` is its answer, where there was one."""

    status: int | None = None


class StoreWriteFailed(StoreError, OSError):
    """The operating system refused a write; ``errno`` says how. Nothing half-written is readable."""


class SourceError(MillraceError):
    """An input file cannot be read as what it claims to be."""

    source: str | None = None
    row: int | None = None
    offset: int | None = None


class ResumeMismatch(MillraceError):
    """A saved state belongs to another store, view or order; ``part`` names which."""

    part: str | None = None
    expected: Any = None
    found: Any = None


class FeedError(MillraceError):
    """A feed could not deliver."""


class StageFailed(FeedError):
    """A user's transform or decode raised, or its worker process died; ``__cause__`` holds the exception."""

    stage: str | None = None
    position: int | None = None
    sample: int | None = None  # of decode, which has one at a time


class TrainError(MillraceError):
    """A training run cannot go on: a loss that is not finite, no memory left, a damaged checkpoint."""

    step: int | None = None
    samples: list[int] | None = None


class QueueError(MillraceError):
    """A queue of tickets could not be used."""


class QueueUnreachable(QueueError, ConnectionError):
    """The server of the queue does not answer."""


class LeaseLost(QueueError):
    """Somebody else holds the ticket now."""


_PLAIN = (str, int, float, type(None))  # attributes of an error that come back from another process
_MAX_TEXT = 4000  # characters, of up to 12 bytes in JSON: all of it fits into one message


def reason(error: BaseException) -> str:
    """The class and message of somebody else's exception, whose ``__str__`` may fail itself.

    >>> reason(ValueError("no rows"))
    'ValueError: no rows'
    """
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - it may raise anything
        message = "(its message cannot be shown)"
    return f"{type(error).__name__}: {message}"


def describe_error(error: BaseException) -> dict[str, Any]:
    """An error as plain values, for another process: a user's own exception might not be picklable."""
    kind, message, context = "", reason(error), {}
    if isinstance(error, MillraceError):
        kind, message = type(error).__name__, str(error)
        plain = {name: value for name, value in error._context.items() if isinstance(value, _PLAIN)}
        context = {name: value[:200] if isinstance(value, str) else value for name, value in plain.items()}
    trace = "".join(traceback.format_exception(error))[-_MAX_TEXT:]
    return {"kind": kind, "message": message[:_MAX_TEXT], "context": context, "trace": trace}


def rebuild_error(described: dict[str, Any]) -> Exception:
    """The error again: one of ours as the class it was, caused by its traceback in the other process."""
    kind = globals().get(described["kind"])
    error: Exception = RuntimeError(printable(described["message"]))
    if isinstance(kind, type) and issubclass(kind, MillraceError):
        error = kind(described["message"], **described["context"])
    elif described["kind"]:  # a class that another module defines
        error = MillraceError(described["message"])
    error.__cause__ = RuntimeError(f"in another process:\n{printable(described['trace'], keep=LINES)}")
    return error


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name
        return str(os.getuid())


def _free_bytes(path: str) -> int:
    """Free bytes on the disk of a path, or of the nearest folder above it that exists."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


def write_failed(error: OSError, path: str, doing: str) -> StoreWriteFailed:
    """The error for a write the system refused, with what the user does next."""
    code = error.errno or 0
    remedies = {
        28: "free space or choose another disk",
        122: "raise the quota",
        30: "choose a writable place",
        13: "fix the permission",
        1: "fix the permission",
        27: "raise the file size limit (ulimit -f)",
        36: "choose a shorter name",
    }
    remedy = remedies.get(code, "check the disk")
    free = f" ({_free_bytes(path):,} bytes are free)" if code == 28 else ""
    who = f" for user {_user()}" if code in (1, 13) else ""
    place = f" at byte {error.offset:,}" if hasattr(error, "offset") else ""
    message = f"{doing} {path}{place}: {os.strerror(code)}{who}{free}; {remedy}, then run the same command again"
    return StoreWriteFailed(message, path=path, errno=code)


def corrupt(path: str, problem: str, remedy: str = "copy or prepare the store again", **context: Any) -> StoreCorrupt:
    """The error for a file whose bytes are not those that were written."""
    return StoreCorrupt(f"{path}: {problem}; {remedy}", path=path, problem=problem, **context)


def closest(name: str, names: Iterable[str]) -> str | None:
    """The known name that somebody who typed ``name`` probably meant; None where none is near.

    >>> closest("Origin", ["origin", "dest"]), closest("volme", ["open", "volume"]), closest("x", ["origin"])
    ('origin', 'volume', None)
    """
    import difflib

    known = {str(known).casefold(): str(known) for known in names}
    near = difflib.get_close_matches(str(name).casefold(), known, n=1, cutoff=0.7)
    return known[near[0]] if near else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """What a message about an unknown name adds: the nearest known one, or nothing.

    >>> "split 'vall' is unknown" + did_you_mean("vall", ["train", "val"]) + "; expected train or val"
    "split 'vall' is unknown (did you mean 'val'?); expected train or val"
    """
    near = closest(name, names)
    return "" if near is None else f" (did you mean {near!r}?)"


def too_long(path: str) -> ConfigError:
    """The error for a path that the file system refuses for its length (ENAMETOOLONG)."""
    longest = max(len(os.fsencode(name)) for name in path.split(os.sep))
    return ConfigError(
        f"{path[:40]}...{path[-20:]} is too long: the path has {len(os.fsencode(path)):,} bytes, its longest name {longest:,} "
        "(systems take at most 4,095 and 255); choose a shorter one",
        path=path,
    )
