"""push: a store on disk to object storage. What is there already is not sent again; the manifest comes last."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import msgspec

from millrace.errors import ConfigError, StoreCorrupt
from millrace.store import manifest as manifests
from millrace.store import platform
from millrace.store.codec import Codec
from millrace.store.compressed import CompressedFile, compressed
from millrace.store.folder import Folder
from millrace.store.plain_file import MAX_BYTES
from millrace.store.remote.contents import MANIFEST, UNHASHED, Contents, RemoteFile, read_manifest
from millrace.store.remote.objects import PART_BYTES, ObjectMissing, Objects, is_url
from millrace.store.shard import check_blocks

MARKER = "push.fingerprint"  # of the snapshot that is on its way
THREADS = 16  # a request waits for the server most of the time
Item = TypeVar("Item")


class Transfer(msgspec.Struct):
    """What push, pull or stage did."""

    source: str
    target: str
    fingerprint: str
    files: int
    bytes: int
    sent_files: int = 0
    sent_bytes: int = 0
    codec: str | None = None  # what the files at the target are compressed with
    stored_bytes: int = 0  # of the sent files, as they lie there
    wall_s: float = 0.0

    def note(self, num_bytes: int, *, is_sent: bool, stored_bytes: int | None = None) -> None:
        """Counts a file."""
        self.files += 1
        self.bytes += num_bytes
        if is_sent:
            self.sent_files += 1
            self.sent_bytes += num_bytes
            self.stored_bytes += num_bytes if stored_bytes is None else stored_bytes


def push(
    store: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    compress: str | None = None,
    workers: int = THREADS,
    progress: Callable[[int], None] | None = None,
) -> Transfer:
    """Copies the newest snapshot of a store to a URL (``s3://``, ``gs://``, ``az://``) or a folder.

    Every byte is compared with the store's hashes as it is sent. Files that are there with the right size are not sent
    again, so an interrupted push goes on when it is run again. ``store.json`` is written last and only if nobody else
    wrote one: readers see the whole store or none. A store that was appended to replaces the snapshot it grew from; any
    other store at the URL is refused.

    ``compress="zstd:3"`` or ``"lz4"`` compresses the files, in blocks. The fingerprint stays: whoever reads the store gets
    the same bytes. A store that is compressed already is copied as it is.
    """
    began, url = time.monotonic(), os.fspath(url)
    if is_url(url) and url.split(":")[0] in ("http", "https"):
        raise ConfigError(f"{url.split(':')[0]}:// can only be read; push to s3://, gs://, az:// or a path")
    folder = Folder(store)
    plain = Contents.of(folder)
    contents = plain.coded(_codec(plain, compress))
    objects = Objects(url, create=True)
    before = _committed(objects)
    known = {} if before is None else _known(folder, contents, objects)
    codec = None if contents.codec is None else str(contents.codec)
    report = Transfer(folder.path, objects.url, contents.fingerprint, 0, 0, codec=codec)
    if before == contents.data[MANIFEST]:
        return report
    if before is not None and not objects.decides:  # nobody says there which of two writers wins
        raise ConfigError(f"{objects.url} holds an earlier snapshot of this store; remove it, or choose another path")
    there = _begin(objects, contents.fingerprint if codec is None else f"{contents.fingerprint} {codec}")
    lock, step = threading.Lock(), progress or (lambda num_bytes: None)

    def send(file: RemoteFile) -> None:
        left = there.get(file.stored_name)  # a compressed one exists whole or not at all; its size is not known before
        is_there = known.get(file.name) == file.key or (
            left is not None and (left == file.num_bytes or file.codec is not None)
        )
        stored_bytes = 0 if is_there else _send(folder, file, objects, is_plain=plain.codec is None)
        with lock:
            report.note(file.num_bytes, is_sent=not is_there, stored_bytes=stored_bytes)
        step(file.num_bytes)

    in_threads(send, contents.files(), workers, objects)
    _send_side_files(folder, contents, objects)
    if not objects.put_new(MANIFEST, contents.data[MANIFEST], over=before):
        raise ConfigError(f"{objects.url}: another push wrote a store here meanwhile; choose another URL")
    objects.remove(MARKER)
    report.wall_s = time.monotonic() - began
    return report


def _codec(contents: Contents, compress: str | None) -> Codec | None:
    """How the copy is compressed: as asked, or as the store is."""
    codec = contents.codec if compress is None else Codec.parse(compress)
    if contents.codec not in (None, codec):
        raise ConfigError(
            f"compress={codec}, but the store is compressed already ({contents.codec}); leave it out, or make a plain copy "
            "first: millrace stage"
        )
    if codec is not None:
        codec.library()
    return codec


def _begin(objects: Objects, snapshot: str) -> dict[str, int]:
    """The shard files that an interrupted push of this snapshot left, with their sizes.

    Those of another one may have the same names and sizes: a marker says whose they are.
    """
    with contextlib.suppress(ObjectMissing):
        if objects.read(MARKER, 1 << 10) == snapshot.encode():
            return objects.sizes("shards")
    objects.put(MARKER, snapshot.encode())
    return {}


def in_threads(work: Callable[[Item], None], items: Iterable[Item], workers: int, *objects: Objects) -> None:
    """Does the work for every item; the first error ends it, when the items in hand are done. Ctrl-C does not wait for them."""
    pool = ThreadPoolExecutor(workers)
    try:
        futures = [pool.submit(work, item) for item in items]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        pool.shutdown(wait=True, cancel_futures=True)
    except BaseException:
        for own in objects:
            own.is_given_up = True
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    for future in done:
        future.result()


def _committed(objects: Objects) -> bytes | None:
    """The manifest that is at the URL."""
    try:
        return read_manifest(objects)
    except ObjectMissing:
        return None


def _known(folder: Folder, contents: Contents, objects: Objects) -> dict[str, str]:
    """The files of the store at the URL by name and content; one that is no earlier snapshot of this store is refused."""
    there = Contents.read(objects)
    if there.fingerprint != contents.fingerprint and not folder.has(f"snapshots/{there.fingerprint}.json"):
        raise ConfigError(
            f"{objects.url} holds another store (fingerprint {there.fingerprint}; {folder.path} has "
            f"{contents.fingerprint}); remove it or choose another URL"
        )
    if there.codec != contents.codec:
        raise ConfigError(
            f"{objects.url} holds this store {_way(there)}, not {_way(contents)}; give --compress as before, or choose "
            "another URL"
        )
    return {file.name: file.key for file in there.files()}


def _way(contents: Contents) -> str:
    return "plain" if contents.codec is None else f"compressed by {contents.codec}"


def _send(folder: Folder, file: RemoteFile, objects: Objects, *, is_plain: bool) -> int:
    """Sends a file, compressed on its way where it is not yet; returns the bytes that it has there."""
    name = file.name if is_plain else file.stored_name
    _check(folder, file, name, None if is_plain else file.codec)
    path = Path(folder.path, name)
    if not is_plain or file.codec is None:
        objects.put(file.stored_name, path)
        return path.stat().st_size
    codec, stored_bytes = file.codec, 0

    def frames() -> Iterator[bytes]:
        nonlocal stored_bytes
        stored_bytes = 0
        with folder.open_file(name) as (fd, _):
            for part in compressed(lambda length, offset: platform.pread(fd, length, offset), file.num_bytes, codec):
                stored_bytes += len(part)
                yield part

    # Small ones in one request: joining parts takes two more.
    objects.put(file.stored_name, b"".join(frames()) if file.num_bytes <= PART_BYTES else frames)
    return stored_bytes


def _check(folder: Folder, file: RemoteFile, name: str, codec: Codec | None) -> None:
    """Reads a file once more before it is sent: damage must not spread."""
    where = os.path.join(folder.path, name)
    with folder.open_file(name) as (fd, size):
        if size != file.num_bytes and codec is None:
            raise StoreCorrupt(f"{where}: has {size} bytes, expected {file.num_bytes}; run millrace verify", path=where)
        read = fd if codec is None else CompressedFile(fd, file.num_bytes, codec, where).read_into
        for first, last, problem in check_blocks(read, file.num_bytes, file.hashes.tolist()):
            if problem is not None:
                raise StoreCorrupt(f"{where}: bytes {first:,} to {last:,}: {problem}", path=where)


def _send_side_files(folder: Folder, contents: Contents, objects: Objects) -> None:
    for name, data in contents.data.items():
        if name != MANIFEST:
            objects.put(name, data)
    for name in (manifests.TOKENIZER_FILE, *UNHASHED):
        if folder.has(name):
            objects.put(name, folder.side_file(name, MAX_BYTES))
