"""``open_store``: one door for millrace's own stores and for the layouts of others."""

from __future__ import annotations

import os
from typing import Any

from millrace.errors import ConfigError
from millrace.store.folder import missing
from millrace.store.foreign import open_foreign
from millrace.store.reader import read_store
from millrace.store.store import Store


def open_store(
    path: str | os.PathLike[str],
    *,
    snapshot: str | None = None,
    dtype: Any = None,
    check: bool = False,
    safe_read: bool = False,
) -> Store:
    """The store at a path, read-only, its manifest and file sizes checked.

    ``snapshot`` opens an earlier state by its fingerprint. ``dtype`` says what a headerless file holds. ``check``
    compares the sizes of all files at once, however many there are. ``safe_read`` maps no file. If a file is then cut off
    while it is read, you get a ``StoreCorrupt`` and the process lives on. It is much slower.
    """
    name = os.fspath(path)
    if "://" in name:
        raise ConfigError(f"{name}: remote stores are not supported yet; copy the store to a local disk and open that")
    if os.path.isfile(os.path.join(name, "store.json")):
        if dtype is not None:
            raise ConfigError(f"dtype={dtype!r}, but {name} is a millrace store, which knows its dtypes; leave it out")
        return read_store(name, snapshot, check=check, safe_read=safe_read)
    if snapshot is not None:
        if not os.path.exists(name):
            raise missing(os.path.abspath(name))
        raise ConfigError(f"snapshot= given, but {name} is not a millrace store; foreign layouts have no snapshots")
    if safe_read:
        raise ConfigError(f"safe_read=True, but {name} is a foreign layout, always mapped; prepare a store from it")
    return open_foreign(os.path.abspath(name), dtype)
