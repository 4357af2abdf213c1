"""pull and stage: a store from elsewhere into a folder of this machine, whole or not at all."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from millrace.errors import ConfigError, StoreWriteFailed
from millrace.store import manifest as manifests
from millrace.store import platform
from millrace.store.folder import Folder
from millrace.store.journal import NAME as JOURNAL
from millrace.store.ownership import OWNER, is_lease
from millrace.store.plain_file import MAX_BYTES
from millrace.store.publish import Partial
from millrace.store.reader import read_store
from millrace.store.remote.contents import MANIFEST, UNHASHED, Contents, RemoteFile, tokenizer_of
from millrace.store.remote.download import download
from millrace.store.remote.objects import ObjectMissing, Objects
from millrace.store.remote.transfer import THREADS, Transfer, in_threads
from millrace.store.shard import check_blocks


def pull(
    url: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    workers: int = THREADS,
    progress: Callable[[int], None] | None = None,
) -> Transfer:
    """Copies the store at a URL or path into ``folder``, its newest snapshot.

    Every block is compared with the store's hashes before it is written. The folder appears when all of it is there. An
    interrupted pull goes on when it is run again. A folder that holds this store already is left as it is; one that holds
    something else is refused. A compressed store becomes a plain one.
    """
    objects, out = Objects(url), Path(folder).absolute()
    contents = Contents.read(objects) if not objects.is_local else Contents.of(Folder(objects.url))
    report = Transfer(objects.url, str(out), contents.fingerprint, 0, 0)
    if contents.codec is not None:
        contents.codec.library()
    if _is_there(out, contents):
        return report
    partial = Partial(out)
    partial.acquire()
    try:
        check_unfinished(partial)
        _fill(objects, contents, partial.folder, report, workers, progress or (lambda num_bytes: None))
        partial.complete()
    finally:
        partial.close(remove=False)
    return report


def check_unfinished(partial: Partial) -> None:
    """Refuses a working folder with shards of a preparation, which a copy would remove."""
    if (partial.folder / JOURNAL).exists():
        raise ConfigError(f"{partial.folder} is an unfinished store of another command; finish that, or remove it")


def _is_there(out: Path, contents: Contents) -> bool:
    """Whether the folder holds this snapshot, by its manifest and the sizes of its files."""
    if not (out / MANIFEST).is_file():
        return False
    found = read_store(out, check=True).fingerprint
    if found != contents.fingerprint:
        raise ConfigError(
            f"{out} holds another store or snapshot (fingerprint {found}; the source has {contents.fingerprint}); choose "
            "another path, or remove it if nobody needs it"
        )
    return True


def _fill(
    objects: Objects, contents: Contents, folder: Path, report: Transfer, workers: int, progress: Callable[[int], None]
) -> None:
    """The files of the store, the manifest last. What an interrupted pull left is kept where its bytes are right."""
    copy = contents.coded(None).as_on_disk()
    files = list(copy.files())
    side_files = {**copy.data, **_beside_tables(objects, contents)}
    sweep(folder, {*side_files, *(file.name for file in files)})
    _check_space(folder, files)
    for name in {os.path.dirname(name) for name in (*side_files, *(file.name for file in files))}:
        platform.make_dir(folder / name)
    lock = threading.Lock()

    def fetch(pair: tuple[RemoteFile, RemoteFile]) -> None:
        file, source = pair
        path = folder / file.name
        is_there = _is_whole(path, file)
        if not is_there:
            download(objects, source, str(path), progress)
        with lock:
            report.note(file.num_bytes, is_sent=not is_there)
        if is_there:
            progress(file.num_bytes)

    in_threads(fetch, zip(files, contents.files(), strict=True), workers, objects)
    with platform.writing(folder):
        for name, data in side_files.items():
            if name != MANIFEST:
                platform.write_file(folder / name, data)
        for name in sorted({os.path.dirname(file.name) for file in files}):
            platform.sync_dir(folder / name)
        for name in ("shards", "snapshots", ""):
            platform.sync_dir(folder / name)
        platform.write_file(folder / MANIFEST, side_files[MANIFEST])
        platform.sync_dir(folder)


def _beside_tables(objects: Objects, contents: Contents) -> dict[str, bytes]:
    found = {}
    tokenizer = tokenizer_of(contents, objects)
    if tokenizer is not None:
        found[manifests.TOKENIZER_FILE] = tokenizer
    for name in UNHASHED:
        try:
            found[name] = objects.read(name, MAX_BYTES)
        except ObjectMissing:
            continue
    return found


def sweep(folder: Path, wanted: set[str]) -> None:
    """Removes what belongs to another store, and parts of files."""
    with platform.writing(folder, "removing"):
        platform.remove(folder / MANIFEST)
        for above, _, names in os.walk(folder):
            for name in names:
                relative = os.path.relpath(os.path.join(above, name), folder)
                if relative not in wanted and name != OWNER and not is_lease(name):
                    platform.remove(os.path.join(above, name))


def _check_space(folder: Path, files: list[RemoteFile]) -> None:
    """Refuses at once what does not fit on the disk."""
    needed = 0
    for file in files:
        try:
            needed += file.num_bytes - os.lstat(folder / file.name).st_size
        except OSError:
            needed += file.num_bytes
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StoreWriteFailed(
            f"{folder.parent} has {free:,} bytes free, and the store needs {needed:,} more; free space or choose another disk",
            path=str(folder), errno=28,
        )  # fmt: skip


def _is_whole(path: Path, file: RemoteFile) -> bool:
    """Whether a file is there with the right bytes: it is read again."""
    try:
        fd = os.open(path, os.O_RDONLY | platform.O_NOFOLLOW | platform.O_BINARY)
    except OSError:
        return False
    try:
        if os.fstat(fd).st_size != file.num_bytes:
            return False
        return not any(problem for *_, problem in check_blocks(fd, file.num_bytes, file.hashes.tolist()))
    finally:
        os.close(fd)
