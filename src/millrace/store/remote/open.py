"""Opens a store elsewhere: its manifest is read, and its tables unless the cache has them; no shard is."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import ConfigError, StoreError, StoreNotFound, corrupt
from millrace.identity import digest
from millrace.native import cache_folder
from millrace.store import manifest as manifests
from millrace.store import platform
from millrace.store.folder import Folder
from millrace.store.remote.cache import Cache, size_of
from millrace.store.remote.contents import MANIFEST, Contents, read_manifest, tokenizer_of
from millrace.store.remote.objects import ObjectMissing, Objects
from millrace.store.remote.shards import RemoteShards
from millrace.store.store import Store


def open_remote(
    url: str,
    snapshot: str | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_size: str | int | None = None,
) -> Store:
    """The store at a URL. Its shards come into the cache when a feed is about to need them, or when they are touched."""
    objects = Objects(url)
    base = Path(cache_dir).absolute() if cache_dir is not None else cache_folder()
    size = cache_size or os.environ.get("MILLRACE_CACHE_SIZE") or None
    cache = Cache(base, None if size is None else size_of(size))
    folder, contents = _tables(objects, snapshot, cache)
    if contents.codec is not None:
        contents.codec.library()  # an error here rather than in the middle of a feed
    shards = RemoteShards(folder, contents, objects, cache)
    manifest = contents.manifest
    reopen = partial(open_remote, cache_dir=str(base), cache_size=size), (objects.url, manifest.fingerprint)
    return Store(
        layout=contents.layout, counts=contents.counts, shards=shards, name_of=shards.name, kind=manifest.kind,
        meta=manifest.meta, splits=manifest.splits, split_of=contents.table[:, 0].astype(np.int64), cuts=manifest.cuts,
        path=objects.url, fingerprint=manifest.fingerprint, reopen=reopen, manifest=manifest, folder=folder,
    )  # fmt: skip


def open_compressed(
    folder: Folder, snapshot: str | None, *, check: bool = False, safe_read: bool = False, **cache: Any
) -> Store:
    """A compressed store on disk, whose files come plain into the cache as those of a URL do."""
    if safe_read:
        raise ConfigError(f"safe_read=True, but {folder.path} is compressed, and its files are mapped in the cache")
    if check:
        for file in Contents.of(folder).files():
            if not folder.has(file.stored_name):
                where = os.path.join(folder.path, file.stored_name)
                raise corrupt(where, "is missing", "copy this shard again or compress the store again")
    return open_remote(folder.path, snapshot, **cache)


def _tables(objects: Objects, snapshot: str | None, cache: Cache) -> tuple[Folder, Contents]:
    """The manifest and tables of a store, in a folder of the cache that all processes share."""
    try:
        data = _manifest(objects, snapshot)
    except ObjectMissing as error:
        name = MANIFEST if snapshot is None else f"snapshots/{snapshot}.json"
        remedy = (
            "check the URL, or push a store there first" if snapshot is None else "open the store without snapshot="
        )
        is_bucket = error.path != objects.where(name)
        problem = str(error) if is_bucket else f"{objects.where(name)} is not there; {remedy}"
        raise StoreNotFound(problem, path=objects.url) from error
    final = cache.tables / digest(data)
    if final.is_dir():
        try:
            folder = Folder(final)
            contents = Contents.of(folder)
            if contents.data[MANIFEST] == manifests.encode(manifests.decode(data, objects.url)):
                return folder, contents
        except StoreError:
            pass
        platform.remove(final)  # damaged, or of another store: once more
    contents = Contents.read(objects, data)
    files = dict(contents.data)
    tokenizer = tokenizer_of(contents, objects)
    if tokenizer is not None:
        files[manifests.TOKENIZER_FILE] = tokenizer
    return Folder(cache.add_tables(final.name, files)), contents


def _manifest(objects: Objects, snapshot: str | None) -> bytes:
    """The newest manifest, or that of a snapshot: the newest one has it too, and first."""
    if snapshot is None:
        return read_manifest(objects)
    with contextlib.suppress(ObjectMissing):
        data = read_manifest(objects)
        if manifests.decode(data, objects.url).fingerprint == snapshot:
            return data
    return read_manifest(objects, f"snapshots/{snapshot}.json")
