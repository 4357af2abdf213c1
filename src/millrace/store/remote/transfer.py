"""What push, pull and stage share: the report of a copy, and threads that copy files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

import msgspec

from millrace.store.remote.objects import Objects

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
