"""Objects: the files below one URL, in object storage, behind HTTP or in a folder. All requests are made here.

Every request is tried again with backoff where that may help. Errors say which object, what the server answered and how
often it was tried. They never repeat what the library said, since that may name keys and signatures.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import unquote

from millrace.errors import ConfigError, StoreCorrupt, StoreError, StoreUnreachable
from millrace.store.ownership import split_url
from millrace.store.plain_file import not_plain, unreadable
from millrace.store.remote.calls import each, interruptible
from millrace.store.remote.connect import SCHEMES, connect
from millrace.store.remote.pace import Pace

ATTEMPTS = 8
PATIENCE_S = 600.0  # without any progress, however few attempts that were
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 10.0  # between attempts; each wait is about twice the one before
CHUNK_BYTES = 256 << 10  # of a stream; the rate is known after each
SLOW_BYTES_PER_S, SLOW_S, SLOW_TRIES = 10_000, 60.0, 3  # less for so long is a failure, and after so many an error
PART_BYTES = 8 << 20  # of an upload; S3 takes 5 MiB or more
SMALL_BYTES = 64 << 10
PARTS_AT_ONCE, PART_RETRIES = 4, 4
HEEDS = 3
REMOVED_AT_ONCE = 1000  # the most that S3 takes
_STATUS = re.compile(r"status code: (\d{3})|\b(\d{3}) [A-Z][a-z]+")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_INVALID = re.compile(r'[Pp]ath "([^"]{0,200})"')  # the name of an object that no path can be
now = time.monotonic
Result = TypeVar("Result")


class ObjectMissing(StoreUnreachable):
    """The server has no such object."""


class ObjectChanged(StoreUnreachable):
    """The server has another object by this name than before."""


class NoRanges(StoreUnreachable):
    """The server gives objects only whole."""


class TooSlow(Exception):
    """A server sends so little that a download would hardly end."""


class WrongBytes(Exception):
    """What a server sent is not what the manifest says; the download is tried again."""


def is_url(path: str) -> bool:
    return "://" in path


def normal_url(url: str) -> str:
    """A URL without its last slash, or an absolute path; one that carries credentials is refused without repeating it."""
    if not is_url(url):
        return os.path.abspath(url)
    parts = split_url(url)
    has_user = "@" in url if parts.scheme in SCHEMES else parts.password is not None  # sftp://me@host shows no secret
    if has_user or parts.query or parts.fragment:
        raise ConfigError(
            f"the {parts.scheme}:// URL has a user, a query or a fragment, which may be secret; give it without, and "
            "credentials by variables such as AWS_ACCESS_KEY_ID"
        )
    if parts.scheme == "file":
        return os.path.abspath(unquote(parts.path))
    if not parts.netloc and parts.scheme in SCHEMES:
        raise ConfigError(f"{url} names no bucket or host; expected {parts.scheme}://bucket/folder")
    return url.rstrip("/")


class Objects:
    """The objects below a URL or a local folder, by their names relative to it. Any thread may use it."""

    def __init__(self, url: str | os.PathLike[str], *, create: bool = False) -> None:
        self.url = normal_url(os.fspath(url))
        self.is_local = not is_url(self.url)
        self.pace = Pace()
        self.is_given_up = False  # whoever asked was interrupted
        self._calls, self._store = connect(self.url, create, FIRST_WAIT_S)
        # One part of many fails, not all of them.
        _, self._uploads = connect(self.url, create, FIRST_WAIT_S, PART_RETRIES)
        self.decides = isinstance(self._calls, ModuleType) and not self.is_local  # which of two writers wins

    def where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def read(self, name: str, most: int, check: Callable[[bytes], object] | None = None) -> bytes:
        """A whole small object. What ``check`` calls corrupt is asked for again: it may be damaged on its way alone."""
        return self.fetch(name, most, check)[0]

    def fetch(
        self, name: str, most: int, check: Callable[[bytes], object] | None = None
    ) -> tuple[bytes, Mapping[str, Any]]:
        """The same with what ``describe`` says of it, which is the version that ``put_new`` may replace."""
        wrong: StoreCorrupt | None = None

        def attempt() -> tuple[bytes, Mapping[str, Any]]:
            nonlocal wrong
            wrong, began = None, time.perf_counter()
            found = interruptible(lambda: self._calls.get(self._store, name))
            if (size := found.meta["size"]) > most:
                raise WrongBytes(f"it has {size:,} bytes; expected at most {most:,}")
            data = b"".join(bytes(chunk) for chunk in self._arriving(found))
            if len(data) != size:
                raise WrongBytes(f"{len(data):,} of {size:,} bytes came")
            self.pace.note(len(data), time.perf_counter() - began)
            try:
                if check is not None:
                    check(data)
            except StoreCorrupt as error:
                wrong = error
                raise WrongBytes(str(error)) from error
            return data, found.meta

        try:
            return self.tried(name, attempt)
        except StoreUnreachable:
            if wrong is None:
                raise
            raise wrong from None

    def stream(self, name: str, start: int = 0, stop: int | None = None, *, e_tag: str | None = None) -> Iterator[Any]:
        """The bytes of an object from ``start`` on, as they come; one attempt, whose errors are the library's.

        With ``stop``, which needs a server with ranges, those before it. ``e_tag`` is the version that is wanted.
        """
        from obstore.exceptions import BaseError

        if start or stop is not None:
            wanted: Any = {"offset": start} if stop is None else (start, stop)
            try:
                found = interruptible(lambda: self._calls.get(self._store, name, options={"range": wanted}))
            except BaseError as error:
                if not _is_without_ranges(error):
                    raise
            else:
                for chunk in self._arriving(self._as_wanted(name, found, e_tag)):
                    self._check_wanted(name)
                    yield chunk
                return
        if stop is not None:
            raise NoRanges(f"{self.where(name)}: the server has no ranges", path=self.where(name))
        # From the beginning.
        found = interruptible(lambda: self._calls.get(self._store, name))
        for chunk in self._arriving(self._as_wanted(name, found, e_tag)):
            self._check_wanted(name)
            if start < len(chunk):
                yield memoryview(chunk)[start:]
            start = max(0, start - len(chunk))

    def _arriving(self, found: Any) -> Iterator[Any]:
        """The bytes of an object as they come; ``TooSlow`` where few do."""
        chunks, waited_s, num_bytes = each(found.stream(CHUNK_BYTES)), 0.0, 0
        while True:
            began = now()
            chunk = next(chunks, None)
            waited_s += now() - began
            if chunk is None:
                return
            num_bytes += len(chunk)
            if waited_s >= SLOW_S:
                if num_bytes < SLOW_BYTES_PER_S * waited_s:
                    rate = f"{num_bytes / waited_s:,.0f} bytes a second"
                    raise TooSlow(f"the server sends {rate}; expected at least {SLOW_BYTES_PER_S:,}")
                waited_s, num_bytes = 0.0, 0
            yield chunk

    def _check_wanted(self, name: str) -> None:
        """Raises where nobody waits for the bytes any more."""
        if self.is_given_up or not threading.main_thread().is_alive():
            where = self.where(name)
            raise StoreUnreachable(f"{where}: given up, since the program ends", path=where) from None

    def _as_wanted(self, name: str, found: Any, e_tag: str | None) -> Any:
        if e_tag is not None and found.meta["e_tag"] != e_tag:
            raise ObjectChanged(f"{self.where(name)} has changed; run it again", path=self.where(name))
        return found

    def describe(self, name: str) -> Mapping[str, Any] | None:
        """``size``, ``last_modified`` and ``e_tag`` of an object; None where there is none."""
        try:
            found: Mapping[str, Any] = self._asked(name, lambda: self._calls.head(self._store, name))
            return found
        except ObjectMissing:
            return None

    def listed(self, prefix: str) -> dict[str, Mapping[str, Any]]:
        """Every object below ``prefix``, as ``describe`` does."""

        def attempt() -> dict[str, Mapping[str, Any]]:
            found = self._calls.list(self._store, prefix or None, chunk_size=1000)
            return {str(entry["path"]): entry for some in each(found) for entry in some}

        try:
            return self.tried(prefix, attempt)
        except ObjectMissing as error:
            if error.path == self.url:  # not even the bucket is there
                raise
            return {}

    def sizes(self, prefix: str) -> dict[str, int]:
        """Every object below ``prefix`` with its bytes."""
        return {name: int(known["size"]) for name, known in self.listed(prefix).items()}

    def put(self, name: str, data: bytes | Path | Callable[[], Iterator[bytes]]) -> None:
        """Writes an object, whole or not at all: these bytes, those of a file, or those that a function gives each time."""

        def attempt() -> None:
            if isinstance(data, bytes):
                small = len(data) <= SMALL_BYTES  # else a slow line takes long for it, which is no failure
                self._calls.put(self._store if small else self._uploads, name, data, use_multipart=False)
                return
            if not isinstance(data, Path):
                parts: Any = {"chunk_size": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}
                self._calls.put(self._uploads, name, data(), use_multipart=True, **parts)
                return
            # One request where that is enough: joining parts takes two more.
            is_large = data.stat().st_size > PART_BYTES
            options: Any = {"chunk_size": PART_BYTES, "max_concurrency": PARTS_AT_ONCE} if is_large else {}
            with data.open("rb") as file:
                self._calls.put(self._uploads, name, file, use_multipart=is_large, **options)

        self._asked(name, attempt)

    def remove(self, name: str) -> None:
        with contextlib.suppress(ObjectMissing):
            self._asked(name, lambda: self._calls.delete(self._store, name))

    def remove_all(self, names: Sequence[str]) -> None:
        """Removes objects of a server, those that are there."""
        for first in range(0, len(names), REMOVED_AT_ONCE):
            some = list(names[first : first + REMOVED_AT_ONCE])
            self._asked(some[0], lambda some=some: self._calls.delete(self._store, some))  # type: ignore[misc]

    def put_new(self, name: str, data: bytes, over: Mapping[str, Any] | None = None) -> bool:
        """Writes a small object where there is none, or over the version ``over``; False where there is another.

        The server decides, in one step: of two writers one wins. One that knows no conditions writes always.
        """
        if self._put_if(name, data, over):
            return True
        # Perhaps it is of an attempt of ours whose answer was lost.
        return bytes(self._asked(name, lambda: self._calls.get(self._store, name).bytes())) == data

    def heeds(self, name: str, data: bytes, over: Mapping[str, Any] | None = None) -> bool:
        """Whether the server refuses to write an object that is there as a new one, or as if it were the version ``over``.

        ``data`` is what the object holds. Who removes it meanwhile does so once: then it is there the next time.
        """
        return self.decides and any(not self._put_if(name, data, over) for _ in range(HEEDS))

    def _put_if(self, name: str, data: bytes, over: Mapping[str, Any] | None) -> bool:
        mode: Any = "create"
        if over is not None:
            mode = {key: over[key] for key in ("e_tag", "version") if over.get(key) is not None}
        try:
            self._asked(name, lambda: self._calls.put(self._store, name, data, mode=mode, use_multipart=False))
        except _Refused:
            return False
        except ObjectMissing:
            if over is None:
                raise
            return False  # the version is not there, nor any other
        return True

    def _asked(self, name: str, call: Callable[[], Result]) -> Result:
        return self.tried(name, lambda: interruptible(call))

    def tried(self, name: str, attempt: Callable[[], Result], progress: Callable[[], int] | None = None) -> Result:
        """The result of ``attempt``, tried again after errors that may pass.

        The count begins again where ``progress``, the bytes that came so far, has grown.
        """
        from obstore.exceptions import BaseError

        if self.is_local:
            _check_readable(self.where(name))
        tries, slow_tries, before, began = 0, 0, 0, time.monotonic()
        while True:
            tries += 1
            try:
                return attempt()
            except StoreError:
                raise
            except (BaseError, OSError, WrongBytes, TooSlow) as error:
                failure: Exception = error
            done = progress() if progress is not None else 0
            if done > before:
                tries, before, began = 1, done, time.monotonic()
            slow_tries += isinstance(failure, TooSlow)
            is_last = tries >= ATTEMPTS or slow_tries >= SLOW_TRIES or time.monotonic() - began > PATIENCE_S
            self._judge(name, failure, max(tries, slow_tries), is_last=is_last)
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (tries - 1))
            time.sleep(wait_s * random.uniform(0.5, 1.0))  # spread, so that ranks do not return together

    def _judge(self, name: str, failure: BaseException, tries: int, *, is_last: bool) -> None:
        """Raises where another attempt would be of no use."""
        import obstore.exceptions as known

        where, text = self.where(name), str(failure)
        is_remote = isinstance(failure, (known.BaseError, FileNotFoundError))
        if isinstance(failure, OSError) and failure.errno is not None and not is_remote:
            raise failure  # of this machine: a full disk, no descriptors
        if (code := _CODE.search(text)) and code[1] in ("NoSuchBucket", "ContainerNotFound"):
            url = "/".join(self.url.split("/")[:3])
            raise ObjectMissing(
                f"{url} is not there; make the bucket first, or check its name", path=self.url
            ) from None
        if isinstance(failure, (FileNotFoundError, known.NotFoundError)):
            raise ObjectMissing(f"{where} is not there; check the URL, or push the store again", path=where) from None
        if isinstance(failure, (known.AlreadyExistsError, known.PreconditionError)):
            raise _Refused from None
        if isinstance(failure, known.InvalidPathError):
            named = _INVALID.search(text)
            raise StoreUnreachable(
                f"{where}: it holds an object named {named[1] if named else ''!r}, which is no path ('.', '..' or '//' in it); "
                "rename it, or give a folder without it", path=where,
            ) from None  # fmt: skip
        if isinstance(failure, (known.NotSupportedError, NotImplementedError)):
            raise StoreUnreachable(
                f"{where}: this storage cannot do it; use s3://, gs://, az:// or a path", path=where
            ) from None
        self._check_wanted(name)
        status, answer = _answer(text)
        if isinstance(failure, (WrongBytes, TooSlow)):
            answer = text
        denials = known.PermissionDeniedError, known.UnauthenticatedError
        is_denied = isinstance(failure, denials) or status in (401, 403)
        remedy = "check the credentials (AWS_ACCESS_KEY_ID and the like) and the clock" if is_denied else ""
        is_final = is_denied or (status is not None and 400 <= status < 500 and status not in (408, 409, 425, 429))
        is_final = is_final or (self.is_local and isinstance(failure, WrongBytes))  # it will not change
        if is_final or is_last:
            how_often = "" if tries == 1 else f" (attempt {tries})"
            elsewhere = "check the server and the network, then run it again"
            remedy = remedy or ("copy the store again" if self.is_local else elsewhere)
            raise StoreUnreachable(f"{where}: {answer}{how_often}; {remedy}", path=where, status=status) from None


def _check_readable(path: str) -> None:
    """Refuses what is there and no file or folder: a fifo would be waited for, a circle of links tried again and again."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise not_plain(path)


class _Refused(Exception):
    """The server kept what it has."""


def _is_without_ranges(error: Exception) -> bool:
    """Whether a server gave all of an object for a part: obstore has an own error for it over HTTP alone."""
    import obstore

    return isinstance(error, obstore.exceptions.NotSupportedError) or "non-partial response" in str(error)


def _answer(text: str) -> tuple[int | None, str]:
    """What the server answered, in our words: its status and its code, and nothing else that it said."""
    found, code = _STATUS.search(text), _CODE.search(text)
    status = int(found.group(1) or found.group(2)) if found else None
    if status is None:
        if "error following redirect" in text:
            return None, "the server redirects again and again"
        if "timed out" in text or "TimedOut" in text or "kind: Timeout" in text:  # "timeout" is in every text
            return None, "the server did not answer in time"
        return None, "the connection failed or broke off"
    return status, f"the server answered {status}{f' ({code.group(1)})' if code else ''}"
