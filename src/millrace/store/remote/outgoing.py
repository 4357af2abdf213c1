"""Outgoing: a store on disk on its way elsewhere. Its files are checked as they are sent: damage must not spread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from millrace.errors import ConfigError, StoreCorrupt
from millrace.store import manifest as manifests
from millrace.store import platform
from millrace.store.codec import Codec
from millrace.store.compressed import CompressedFile, compressed
from millrace.store.folder import Folder
from millrace.store.manifest import Manifest
from millrace.store.plain_file import MAX_BYTES
from millrace.store.remote.contents import UNHASHED, Contents, RemoteFile
from millrace.store.remote.objects import PART_BYTES, Objects
from millrace.store.remote.transfer import Transfer, in_threads
from millrace.store.shard import check_blocks

Progress = Callable[[int], None]


class Outgoing:
    """``contents`` says how the files are to lie at the target: as they are, or compressed on their way."""

    def __init__(self, folder: Folder, compress: str | None, workers: int) -> None:
        self.folder, self._workers = folder, workers
        plain = Contents.of(folder)
        self._is_plain = plain.codec is None
        self.contents = plain.coded(_codec(plain, compress))

    def report(self, target: str) -> Transfer:
        codec = None if self.contents.codec is None else str(self.contents.codec)
        return Transfer(self.folder.path, target, self.contents.fingerprint, 0, 0, codec=codec)

    def send(
        self,
        placed: Contents,
        objects: Objects,
        is_there: Callable[[RemoteFile], bool],
        report: Transfer,
        progress: Progress,
    ) -> None:
        """Sends the files that are not there, under the names that ``placed`` has for them."""
        lock = threading.Lock()

        def send(files: tuple[RemoteFile, RemoteFile]) -> None:
            file, target = files
            is_sent = not is_there(target)
            stored_bytes = self.send_file(file, target.stored_name, objects) if is_sent else 0
            with lock:
                report.note(file.num_bytes, is_sent=is_sent, stored_bytes=stored_bytes)
            progress(file.num_bytes)

        in_threads(send, zip(self.contents.files(), placed.files(), strict=True), self._workers, objects)

    def send_file(self, file: RemoteFile, target: str, objects: Objects) -> int:
        """Sends a file, compressed on its way where it is not yet; returns the bytes that it has there."""
        name = file.name if self._is_plain else file.stored_name
        self._check(file, name, None if self._is_plain else file.codec)
        path = Path(self.folder.path, name)
        if not self._is_plain or file.codec is None:
            objects.put(target, path)
            return path.stat().st_size
        codec, stored_bytes = file.codec, 0

        def frames() -> Iterator[bytes]:
            nonlocal stored_bytes
            stored_bytes = 0
            with self.folder.open_file(name) as (fd, _):
                for part in compressed(
                    lambda length, offset: platform.pread(fd, length, offset), file.num_bytes, codec
                ):
                    stored_bytes += len(part)
                    yield part

        # Small ones in one request: joining parts takes two more.
        objects.put(target, b"".join(frames()) if file.num_bytes <= PART_BYTES else frames)
        return stored_bytes

    def _check(self, file: RemoteFile, name: str, codec: Codec | None) -> None:
        """Reads a file once more before it is sent."""
        where = os.path.join(self.folder.path, name)
        with self.folder.open_file(name) as (fd, size):
            if size != file.num_bytes and codec is None:
                raise StoreCorrupt(
                    f"{where}: has {size} bytes, expected {file.num_bytes}; run millrace verify", path=where
                )
            read = fd if codec is None else CompressedFile(fd, file.num_bytes, codec, where).read_into
            for first, last, problem in check_blocks(read, file.num_bytes, file.hashes.tolist()):
                if problem is not None:
                    raise StoreCorrupt(f"{where}: bytes {first:,} to {last:,}: {problem}", path=where)

    def side_file(self, name: str) -> bytes | None:
        """A file beside the shards, if the store has it."""
        return self.folder.side_file(name, MAX_BYTES) if self.folder.has(name) else None

    @property
    def side_files(self) -> dict[str, bytes]:
        """The files beside the shards and tables, by their names in a folder."""
        found = {name: self.side_file(name) for name in (manifests.TOKENIZER_FILE, *UNHASHED)}
        return {name: data for name, data in found.items() if data is not None}

    def continues(self, fingerprint: str) -> bool:
        """Whether the store is this one or has grown from it."""
        return fingerprint == self.contents.fingerprint or self.folder.has(f"snapshots/{fingerprint}.json")

    def check_same_line(self, there: Contents | Manifest, where: str, *, is_late: bool = False) -> None:
        """Refuses a target that holds anything but this store or an earlier snapshot of it."""
        if not self.continues(there.fingerprint):
            who = f"fingerprint {there.fingerprint}; {self.folder.path} has {self.contents.fingerprint}"
            if is_late:
                raise ConfigError(f"{where}: another push wrote a store here meanwhile ({who}); choose another URL")
            raise ConfigError(
                f"{where} holds another store ({who}); choose another URL, or remove that store if nobody needs it"
            )
        if there.codec != self.contents.codec:
            raise ConfigError(
                f"{where} holds this store {_way(there)}, not {_way(self.contents)}; give --compress as before, or choose "
                "another URL"
            )


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


def _way(contents: Contents | Manifest) -> str:
    return "plain" if contents.codec is None else f"compressed by {contents.codec}"
