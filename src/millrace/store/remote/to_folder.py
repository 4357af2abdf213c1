"""push to a folder: the copy is made in ``<folder>.partial`` under its lock, as every store is, and gets its name last."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from millrace.errors import ConfigError
from millrace.store import platform
from millrace.store.folder import Folder
from millrace.store.publish import Partial
from millrace.store.remote.contents import MANIFEST, Contents, RemoteFile
from millrace.store.remote.download import is_whole
from millrace.store.remote.objects import Objects
from millrace.store.remote.outgoing import Outgoing, Progress
from millrace.store.remote.pull import check_unfinished, sweep
from millrace.store.remote.repair import repair
from millrace.store.remote.transfer import Transfer


def push_to_folder(outgoing: Outgoing, target: str, progress: Progress) -> Transfer:
    out, report = Path(target), outgoing.report(target)
    if (out / MANIFEST).is_file():
        there = Contents.of(Folder(out))
        outgoing.check_same_line(there, target)
        if there.fingerprint != outgoing.contents.fingerprint:
            raise ConfigError(f"{target} holds an earlier snapshot of this store; remove it, or choose another path")
        objects = Objects(target)
        repair(outgoing, there, objects.describe(MANIFEST) or {}, objects, report, progress)
        return report
    partial = Partial(out)
    partial.acquire()
    try:
        check_unfinished(partial)
        _fill(outgoing, partial.folder, report, progress)
        partial.complete()
    finally:
        partial.close(remove=False)
    return report


def _fill(outgoing: Outgoing, folder: Path, report: Transfer, progress: Progress) -> None:
    """The files of the store, the manifest last. What an interrupted push left is kept where its bytes are right."""
    contents, objects = outgoing.contents, Objects(folder)
    side_files = {**contents.data, **outgoing.side_files}
    sweep(folder, {*side_files, *(file.stored_name for file in contents.files())})

    def is_there(file: RemoteFile) -> bool:
        return os.path.isfile(folder / file.stored_name) and is_whole(objects, file)

    outgoing.send(contents, objects, is_there, report, progress)
    with platform.writing(folder):
        for above, _, names in os.walk(folder / "shards"):
            for name in names:
                _settle(os.path.join(above, name))
            platform.sync_dir(above)
        platform.make_dir(folder / "snapshots")
        for name, data in side_files.items():
            if name != MANIFEST:
                platform.write_file(folder / name, data)
        for name in ("snapshots", ""):
            platform.sync_dir(folder / name)
        platform.write_file(folder / MANIFEST, side_files[MANIFEST])
        platform.sync_dir(folder)


def _settle(path: str) -> None:
    """A file of a store is durable and is not written to."""
    fd = os.open(path, os.O_RDWR | platform.O_NOFOLLOW | platform.O_BINARY) if os.access(path, os.W_OK) else -1
    if fd < 0:  # an earlier attempt did it
        return
    try:
        with contextlib.suppress(AttributeError):
            os.fchmod(fd, 0o444)
        platform.sync(fd, path)
    finally:
        os.close(fd)
