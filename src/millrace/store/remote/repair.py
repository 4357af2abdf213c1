"""repair: a store at a URL or in a folder is compared with the one it was made from, and what is wrong is sent again.

A file that was last written before the manifest, under a name that only one push uses, is what that push sent. Any other
is read. A push by 0.1 used the same names as every other one: its files are all read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from millrace.errors import StoreCorrupt
from millrace.store import manifest as manifests
from millrace.store.plain_file import MAX_BYTES
from millrace.store.remote.contents import MANIFEST, Contents, RemoteFile, tokenizer_name, tokenizer_of
from millrace.store.remote.download import is_whole
from millrace.store.remote.names import mark_of, marked_pushes
from millrace.store.remote.objects import ObjectMissing, Objects
from millrace.store.remote.outgoing import Outgoing, Progress
from millrace.store.remote.transfer import Transfer


def repair(
    outgoing: Outgoing,
    there: Contents,
    version: Mapping[str, Any],
    objects: Objects,
    report: Transfer,
    progress: Progress,
) -> None:
    """Sends again what is missing or wrong; ``report`` counts files only where there is any."""
    files, published = objects.listed("shards"), version["last_modified"]

    def is_right(file: RemoteFile) -> bool:
        entry = files.get(file.stored_name)
        if entry is None or (file.codec is None and entry["size"] != file.num_bytes):
            return False
        is_its_own = objects.is_local or there.push is not None
        return (is_its_own and entry["last_modified"] < published) or is_whole(objects, file)

    copy = outgoing.report(report.target)
    outgoing.send(there, objects, is_right, copy, progress)
    if copy.sent_files:
        for field in ("files", "bytes", "sent_files", "sent_bytes", "stored_bytes"):
            setattr(report, field, getattr(copy, field))
    _repair_side_files(outgoing, there, objects)
    if there.push is not None and there.push in marked_pushes(objects):
        objects.remove(mark_of(there.push))


def _repair_side_files(outgoing: Outgoing, there: Contents, objects: Objects) -> None:
    with contextlib.suppress(StoreCorrupt, ObjectMissing):
        tokenizer_of(there, objects)
        _put_changed(outgoing, there, objects)
        return
    if there.push is not None:
        objects.put(tokenizer_name(there.push), outgoing.side_files[manifests.TOKENIZER_FILE])
    put_side_files(outgoing, there, objects)


def put_side_files(outgoing: Outgoing, contents: Contents, objects: Objects) -> None:
    """What has one name in every store: it is written when the store is there, by whom it is of."""
    for name, data in _side_files(outgoing, contents).items():
        objects.put(name, data)


def _put_changed(outgoing: Outgoing, there: Contents, objects: Objects) -> None:
    for name, data in _side_files(outgoing, there).items():
        try:
            is_same = objects.read(name, MAX_BYTES) == data
        except ObjectMissing:
            is_same = False
        if not is_same:
            objects.put(name, data)


def _side_files(outgoing: Outgoing, contents: Contents) -> dict[str, bytes]:
    snapshot = f"snapshots/{contents.fingerprint}.json"
    return {snapshot: contents.data[MANIFEST], **outgoing.side_files}
