"""push: a store on disk to object storage. What is there already is not sent again; the manifest comes last."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from millrace.errors import ConfigError, StoreCorrupt
from millrace.store import manifest as manifests
from millrace.store import strict_json
from millrace.store.folder import Folder
from millrace.store.remote.contents import MANIFEST, Contents, RemoteFile, push_in, read_manifest, tokenizer_name
from millrace.store.remote.names import mark_of, marked_pushes, placed, push_of, reclaim, rivals
from millrace.store.remote.objects import ObjectMissing, Objects, is_url, normal_url
from millrace.store.remote.outgoing import Outgoing, Progress
from millrace.store.remote.repair import put_side_files, repair
from millrace.store.remote.to_folder import push_to_folder
from millrace.store.remote.transfer import THREADS, Transfer

ATTEMPTS = 8  # over earlier snapshots of the store that others bring there meanwhile


def push(
    store: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    compress: str | None = None,
    workers: int = THREADS,
    progress: Callable[[int], None] | None = None,
) -> Transfer:
    """Copies the newest snapshot of a store to a URL (``s3://``, ``gs://``, ``az://``) or a folder.

    Every byte is compared with the store's hashes as it is sent. An interrupted push goes on when it is run again.
    ``store.json`` is written last and only if nobody else wrote one: readers see the whole store or none. A store that was
    appended to replaces the snapshot it grew from; any other store at the URL is refused. Two pushes to one URL never
    write over each other's files. A push to a URL that holds this store repairs what is damaged there.

    ``compress="zstd:3"`` or ``"lz4"`` compresses the files, in blocks. The fingerprint stays: whoever reads the store gets
    the same bytes. A store that is compressed already is copied as it is.
    """
    began, target = time.monotonic(), os.fspath(url)
    if is_url(target) and target.split(":")[0] in ("http", "https"):
        raise ConfigError(f"{target.split(':')[0]}:// can only be read; push to s3://, gs://, az:// or a path")
    outgoing, step = Outgoing(Folder(store), compress, workers), progress or _silent
    if not is_url(normal_url(target)):
        report = push_to_folder(outgoing, normal_url(target), step)
    else:
        report = _push_to_server(outgoing, Objects(target, create=True), step)
    report.wall_s = time.monotonic() - began
    return report


def _push_to_server(outgoing: Outgoing, objects: Objects, progress: Progress) -> Transfer:
    for attempt in range(ATTEMPTS):
        base = _Base.read(objects, outgoing, is_late=attempt > 0)
        report = outgoing.report(objects.url)
        if base.there is not None and base.there.fingerprint == outgoing.contents.fingerprint:
            repair(outgoing, base.there, base.version or {}, objects, report, progress)
            return report
        if _commit(outgoing, base, objects, report, progress):
            return report
        progress = _silent  # all was counted once
    raise ConfigError(f"{objects.url}: other pushes wrote snapshots there {ATTEMPTS} times meanwhile; run it again")


def _silent(num_bytes: int) -> None:
    pass


class _Base(NamedTuple):
    """What lies at the URL when a push begins: its manifest and version, and its files where the tables can be read."""

    manifest: bytes | None = None
    version: Mapping[str, Any] | None = None
    there: Contents | None = None
    unreadable: frozenset[str] = frozenset()  # the push whose tables are damaged

    @classmethod
    def read(cls, objects: Objects, outgoing: Outgoing, *, is_late: bool) -> _Base:
        """Refuses what is no earlier snapshot of the store."""
        try:
            data, version = objects.fetch(MANIFEST, strict_json.MAX_BYTES)
        except ObjectMissing:
            return cls()
        try:
            manifest = manifests.decode(data, objects.where(MANIFEST))
        except StoreCorrupt:
            _check_was_ours(objects, outgoing)
            return cls(data, version)
        outgoing.check_same_line(manifest, objects.url, is_late=is_late)
        is_same = manifest.fingerprint == outgoing.contents.fingerprint
        if not is_same and not objects.decides:  # nobody says there which of two writers wins
            raise ConfigError(
                f"{objects.url} holds an earlier snapshot of this store; remove it, or choose another path"
            )
        try:
            return cls(data, version, Contents.read(objects, data))
        except (StoreCorrupt, ObjectMissing):  # tables that are damaged: all of it is sent again
            return cls(data, version, None, frozenset({push_in(manifest) or ""} - {""}))


def _check_was_ours(objects: Objects, outgoing: Outgoing) -> None:
    """A manifest that cannot be read is replaced only where a snapshot beside it says that it was of this store."""
    for name in objects.listed("snapshots"):
        with contextlib.suppress(StoreCorrupt):
            manifest = manifests.decode(read_manifest(objects, name), objects.where(name))
            if outgoing.continues(manifest.fingerprint):
                return
    raise ConfigError(
        f"{objects.where(MANIFEST)} is damaged, and nothing there says that it was of {outgoing.folder.path}; choose another URL"
    )


def _commit(outgoing: Outgoing, base: _Base, objects: Objects, report: Transfer, progress: Progress) -> bool:
    """One attempt over what lies there; False where another push has replaced that meanwhile."""
    push = push_of(outgoing.contents, base.manifest)
    contents = placed(outgoing.contents, base.there, push)
    others, is_damaged = marked_pushes(objects), base.manifest is not None and base.there is None
    left = objects.sizes("shards") if others or is_damaged else {}
    sent_before = left if push in others else {}  # by this push, when it was interrupted
    others.discard(push)
    mark, note = mark_of(push), f"{outgoing.contents.fingerprint}\n".encode()
    objects.put(mark, note)
    decides = objects.heeds(mark, note, base.version)
    files_there = set() if base.there is None else {file.stored_name for file in base.there.files()}

    def is_there(file: RemoteFile) -> bool:
        size = sent_before.get(file.stored_name)  # compressed files exist whole or not at all, their size is not known
        return (
            file.stored_name in files_there or size == file.num_bytes or (size is not None and file.codec is not None)
        )

    outgoing.send(contents, objects, is_there, report, progress)
    manifest = contents.data[MANIFEST]
    for table in (contents.manifest.shards.name, contents.manifest.hashes.name):
        objects.put(table, contents.data[table])
    if (tokenizer := outgoing.side_file(manifests.TOKENIZER_FILE)) is not None:
        objects.put(tokenizer_name(push), tokenizer)
    if base.there is not None:  # its push may have been killed before it did so
        objects.put(f"snapshots/{base.there.fingerprint}.json", base.manifest or b"")
    if not decides:
        _check_alone(objects, push, base, manifest)
    if not objects.put_new(MANIFEST, manifest, base.version):
        if decides:
            reclaim(objects, [push], {file.stored_name for file in contents.files()} - files_there)
        objects.remove(mark)
        return False
    put_side_files(outgoing, contents, objects)
    # The server must refuse all that others would commit: new ones and new versions.
    if (
        (others or is_damaged)
        and decides
        and objects.heeds(mark, note, None if base.version else objects.describe(MANIFEST))
    ):
        reclaim(objects, others | base.unreadable, left)
    objects.remove(mark)
    return True


def _check_alone(objects: Objects, push: str, base: _Base, manifest: bytes) -> None:
    """On a server that knows no conditions: of two pushes that see each other's mark none goes on."""
    others = rivals(objects, push)
    try:
        now = objects.read(MANIFEST, strict_json.MAX_BYTES)
    except ObjectMissing:
        now = None
    if now != manifest and (others or now != base.manifest):
        objects.remove(mark_of(push))
        problem = "another push wrote a store here meanwhile; choose another URL"
        if now == base.manifest:
            names = ", ".join(objects.where(mark_of(other)) for other in sorted(others))
            problem = (
                f"another push is under way or was killed, and this server cannot decide which one wins; wait for it and run "
                f"this again, or remove {names} if nobody runs it any more"
            )
        raise ConfigError(f"{objects.url}: {problem}")
