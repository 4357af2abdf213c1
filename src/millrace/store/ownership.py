"""Whose a ``<out>.partial`` folder is: millrace takes over what it began itself, and nothing else.

A folder of ours shows that it is, wherever its writer was killed. ``owner.json`` is its first file and its last one.
Just before the rename that makes a store, ``owner.json`` has gone; there the manifest bears a time that no finished
store has. publish.py, gc.py and lock.py use this.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from millrace.errors import ConfigError, StoreError
from millrace.store import platform
from millrace.store.journal import NAME as JOURNAL
from millrace.store.journal import Header
from millrace.store.plain_file import open_file, read_plain

OWNER = "owner.json"
MAX_NAME_BYTES = 255  # of Linux, macOS and Windows alike
MAX_PATH_BYTES = 4096 - 512  # of which the rest is for the files in it
_FIELDS = {"host", "pid", "create_time", "started", "command"}
_START = b'{"host": '  # with which owner.json and a lease begin
_MAX_OWNER_BYTES = 1 << 16
_LEASE = re.compile(r"lease(\.[0-9]{1,9})?")
_URL = re.compile(r"(?:^|[\\/])((?:s3|gs|az|https?|file):)[\\/]+(.*)")
_UNNAMED_S = 315_630_246  # in 1980: the time of the manifest of a store that is whole and has no name yet


def url_in(path: str | os.PathLike[str]) -> str | None:
    """The URL that a path was meant to be, such as ``s3:/bucket/prices``; its folder would be named ``s3:``."""
    found = _URL.search(os.fspath(path))
    return None if found is None else f"{found[1]}//{found[2]}"


def split_url(url: str) -> SplitResult:
    """The parts of a URL; what looks like one and is none is refused."""
    try:
        if not url.isprintable():
            raise ValueError("it holds control characters")
        parts = urlsplit(url)
        if not parts.scheme:
            raise ValueError("it has no scheme")
        for name in (".", "..", ""):  # libraries and servers disagree on what that is
            if name in parts.path.rstrip("/").split("/")[1:]:
                raise ValueError(f"it has {name!r} for a folder")
        return parts
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL: {error}; expected one such as s3://bucket/folder") from None


def check_local(path: str | os.PathLike[str]) -> None:
    """Refuses a URL where a folder of this machine is written."""
    if (url := url_in(path)) is not None:
        raise ConfigError(f"{url} is a URL, and this writes to a path; give a path, then send the store: millrace push")


def partial_of(out: Path) -> Path:
    """The folder a store is written in; a path that cannot have one is refused."""
    check_local(out)
    if not out.name:
        raise ConfigError(f"{out} cannot be a store: it has no name; choose a folder in it, such as {out / 'store'}")
    folder = out.with_name(f"{out.name}.partial")
    for name in (*out.parent.parts, out.name):
        _check_length("name", name, MAX_NAME_BYTES - len(".partial") * (name == out.name))
    _check_length("path", str(out), MAX_PATH_BYTES)
    return folder


def _check_length(what: str, text: str, most: int) -> None:
    if (size := len(os.fsencode(text))) > most:
        raise ConfigError(f"the {what} {text[:40]}... has {size} bytes; expected at most {most}: choose a shorter one")


def check_ours(folder: Path, out: Path) -> None:
    """Refuses a folder of the user's that happens to have the name of ours; nothing in it is touched."""
    if not os.path.lexists(folder) or is_ours(folder):
        return
    what = "is not a plain folder"
    if os.path.isdir(folder) and not os.path.islink(folder):
        names = sorted(os.listdir(folder))
        what = f"holds {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}, which is not an unfinished store"
    raise ConfigError(
        f"{folder} {what}; millrace needs that name to work on {out}: rename or move {folder.name}, or choose another output path"
    )


def is_ours(folder: Path) -> bool:
    """Whether a folder is empty, or was begun by millrace."""
    if os.path.islink(folder):
        return False
    try:
        while True:
            names = os.listdir(folder)
            if _shows_ours(folder, set(names)):
                return True
            if set(os.listdir(folder)) == set(names):  # else its writer works on it at this moment: look again
                return False
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False


def _shows_ours(folder: Path, names: set[str]) -> bool:
    if all(is_lease(name) or name == f"{OWNER}.tmp" for name in names):  # what is there before owner.json
        starts = [_small(folder / name) for name in names]
        return all(data.startswith(_START) or _START.startswith(data) for data in starts)
    if OWNER in names and _is_owner(_small(folder / OWNER)):
        return True
    if JOURNAL in names and _is_journal(folder / JOURNAL):
        return True
    with contextlib.suppress(OSError):
        return "store.json" in names and int(os.lstat(folder / "store.json").st_mtime) == _UNNAMED_S
    return False


def is_lease(name: str) -> bool:
    """Whether a file of this name is a lease, as lease.py makes them."""
    return _LEASE.fullmatch(name) is not None


def _is_owner(data: bytes) -> bool:
    try:
        owner: Any = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(owner, dict) and owner.keys() >= _FIELDS


def _is_journal(path: Path) -> bool:
    try:
        with open_file(str(path)) as (fd, _):
            msgspec.json.decode(platform.pread(fd, _MAX_OWNER_BYTES, 0).split(b"\n")[0], type=Header)
    except (StoreError, OSError, msgspec.DecodeError):
        return False
    return True


def _small(path: Path) -> bytes:
    """A small file; of anything else, what no file of ours holds."""
    try:
        return read_plain(str(path), _MAX_OWNER_BYTES)
    except StoreError:
        return b"?"


def mark_unnamed(folder: Path) -> None:
    """Marks a whole store that gets its name next: from here it is ours without ``owner.json``."""
    with contextlib.suppress(OSError):
        os.utime(folder / "store.json", (_UNNAMED_S, _UNNAMED_S))


def mark_named(out: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(out / "store.json")


def clear(folder: Path) -> None:
    """Empties a folder of ours but for its lease; a kill at any point leaves one that is ours.

    The journal goes late: by it a resumed append knows that it had come through.
    """
    late = (JOURNAL, OWNER)
    early = [name for name in sorted(os.listdir(folder)) if name not in late and not is_lease(name)]
    for name in (*early, *late):
        platform.remove(folder / name)
