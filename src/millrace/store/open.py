"""``open_store``: one door for millrace's own stores and for the layouts of others."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote

from millrace.errors import ConfigError
from millrace.store.folder import missing
from millrace.store.foreign import open_foreign
from millrace.store.ownership import split_url
from millrace.store.reader import read_store
from millrace.store.store import Store


def open_store(
    path: str | os.PathLike[str],
    *,
    snapshot: str | None = None,
    dtype: Any = None,
    check: bool = False,
    safe_read: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_size: str | int | None = None,
) -> Store:
    """The store at a path or URL, read-only, its manifest and file sizes checked.

    ``snapshot`` opens an earlier state by its fingerprint. ``dtype`` says what a headerless file holds. ``check``
    compares the sizes of all files at once, however many there are. ``safe_read`` maps no file. If a file is then cut off
    while it is read, you get a ``StoreCorrupt`` and the process lives on. It is much slower.

    At a URL (``s3://``, ``gs://``, ``az://``, ``https://``) only the manifest is read. Shards come into ``cache_dir`` (default:
    ``MILLRACE_CACHE``) before they are needed; ``cache_size="200GB"`` bounds it. Compressed stores are read in the same way.
    """
    name = os.fspath(path)
    if "://" in name and not name.startswith("file:"):
        from millrace.store.remote.open import open_remote

        for option, value in (("dtype", dtype), ("check", check or None), ("safe_read", safe_read or None)):
            if value is not None:
                raise ConfigError(f"{option}={value!r} is for stores on disk; leave it out, or pull the store first")
        return open_remote(name, snapshot, cache_dir=cache_dir, cache_size=cache_size)
    if name.startswith("file://"):
        name = unquote(split_url(name).path)
    if os.path.isfile(os.path.join(name, "store.json")):
        if dtype is not None:
            raise ConfigError(f"dtype={dtype!r}, but {name} is a millrace store, which knows its dtypes; leave it out")
        return read_store(name, snapshot, check=check, safe_read=safe_read, cache_dir=cache_dir, cache_size=cache_size)
    if cache_dir is not None or cache_size is not None:
        raise ConfigError("cache_dir= and cache_size= are for stores at a URL and compressed ones; leave them out")
    if snapshot is not None:
        if not os.path.exists(name):
            raise missing(os.path.abspath(name))
        raise ConfigError(f"snapshot= given, but {name} is not a millrace store; foreign layouts have no snapshots")
    if safe_read:
        raise ConfigError(f"safe_read=True, but {name} is a foreign layout, always mapped; prepare a store from it")
    return open_foreign(os.path.abspath(name), dtype)
