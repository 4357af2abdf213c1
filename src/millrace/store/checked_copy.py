"""CheckedCopy: a store on this disk whose blocks are compared with their hashes before they are used.

For who makes something from a copy that others rely on, as a worker of a queue does. A block of 4 MiB is read when it is
first needed. A file that was found right is noted (``CheckedFiles``), so that no process of this machine reads it again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import numpy as np

from millrace.errors import StoreError, corrupt
from millrace.native import cache_folder
from millrace.store import checked_files
from millrace.store.checked_files import CheckedFiles
from millrace.store.layout import block_ends, num_blocks
from millrace.store.reader import DiskShards
from millrace.store.remote.contents import RemoteFile
from millrace.store.shard import check_block
from millrace.store.store import Store

TRUST = ("noted", "nothing", "copy")  # which files count as right unread: those noted, none, all


class _File:
    """What is known of one file."""

    def __init__(self, content: RemoteFile) -> None:
        self.content, self.is_right = content, False
        self.checked = bytearray(len(content.hashes))  # a byte for each block
        self.status: os.stat_result | None = None  # as it was before its first block was read


class CheckedCopy:
    """``check`` raises StoreCorrupt, which names the block, before damaged bytes are used."""

    def __init__(self, store: Store, shards: DiskShards, notes: CheckedFiles | None) -> None:
        manifest, folder = store.manifest, store._folder
        assert manifest is not None
        assert folder is not None
        self._shards, self._notes, self._files = shards, notes, dict[tuple[int, int], _File]()
        self._layout, self._num_shards = shards.layout, store.root.num_shards
        self._num_right, self._lock = [0] * len(self._layout.files), threading.Lock()  # files found right, by column
        self._hashes = np.frombuffer(
            folder.read(manifest.hashes.name, manifest.hashes.bytes, manifest.hashes.hash), "<u8"
        )
        self._sizes = self._layout.file_bytes(store.root._counts)
        self._ends = block_ends(self._sizes)

    @classmethod
    def of(cls, store: Store, trust: str) -> CheckedCopy | None:
        """None where there is nothing to compare: it is trusted, was checked on its way, or its format has no hashes."""
        shards = store._shards
        if trust == "copy" or type(shards) is not DiskShards or store.manifest is None:
            return None
        notes = None
        if trust == "noted":
            try:
                notes = CheckedFiles(cache_folder() / checked_files.NAME)
            except StoreError:  # nobody can write there: this process reads each block once, and so does the next
                notes = None
        return cls(store, shards, notes)

    def is_of(self, shards: object) -> bool:
        return self._shards is shards

    def has(self, store: object) -> bool:
        """Whether a store, a split or a selection lies in this copy."""
        return self._shards is getattr(store, "_shards", None)

    def is_right(self, column: str) -> bool:
        """Whether every file of a column was found right."""
        number = self._layout.file_of[column]
        return self._num_right[number] >= self._num_shards

    def check_columns(self, columns: Iterable[str], *, with_offsets: bool) -> None:
        """All of some columns, and where records begin: what is read before the first batch, and decides which it is."""
        names = set(columns)
        for number, spec in enumerate(self._layout.files):
            if spec.column in names or spec.axis in names or (with_offsets and spec.axis is not None):
                for shard in range(self._num_shards):
                    self.check(shard, number)

    def check(self, shard: int, number: int, blocks: Iterable[int] | None = None) -> None:
        """Compares these blocks of a file (default: all), unless they were."""
        file = self._files.get((shard, number))
        if file is None:
            file = self._files.setdefault((shard, number), _File(self._content(shard, number)))
            if not file.checked:  # it is empty
                self._found_right(file, number)
        if file.is_right:
            return
        missing = [
            block for block in (range(len(file.checked)) if blocks is None else blocks) if not file.checked[block]
        ]
        if not missing:
            return
        fd = self._shards.open(shard, number, alone=True)
        try:
            status = file.status = file.status or os.fstat(fd)
            if self._notes is not None and self._notes.is_noted(file.content.key, status):
                self._found_right(file, number)
                return
            for block in missing:
                problem = check_block(fd, file.content.num_bytes, block, int(file.content.hashes[block]))
                if problem is not None:
                    raise corrupt(self._shards.path(shard, number), f"block {block} {problem}")
                file.checked[block] = 1
        finally:
            os.close(fd)
        if all(file.checked):
            self._found_right(file, number)
            if self._notes is not None:
                self._notes.note(file.content.key, status)

    def _found_right(self, file: _File, number: int) -> None:
        with self._lock:
            self._num_right[number] += not file.is_right
            file.is_right = True

    def _content(self, shard: int, number: int) -> RemoteFile:
        size, end = int(self._sizes[shard, number]), int(self._ends[shard, number])
        hashes = self._hashes[end - num_blocks(size) : end]
        return RemoteFile(self._layout.files[number].name, size, hashes)
