"""``Shards``: what a tier provides to a store. On disk reader.py implements it, in memory memory.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from millrace.ragged import Array


class Shards(Protocol):
    """The files of shards, wherever they lie. Shards and files go by number; a file holds the items of one column.

    How a tier keeps maps, descriptors or downloads is its own affair.
    """

    lookahead: int = 0  # how many batches before its turn a feed names the files of a batch by ``expect``; 0: never

    is_limited: bool = (
        False  # whether only the files of a batch or two can be arrays at once: who reads drops them soon
    )

    def rows(self, shard: int, file: int, start: int, stop: int, *, wait: bool = True) -> Array | None:
        """Items [start, stop) of a file. Without ``wait``: None if they are not at hand, and their reading begins."""

    def array(self, shard: int, file: int, *, random: bool = False) -> Array | None:
        """A whole file, or None where it can only be read by rows.

        ``random`` is for readers that jump: an array of their own, without read-ahead, which they may drop.
        """

    def descriptor(self, shard: int, file: int) -> int | None:
        """A descriptor that reads a file past the page cache, for the caller to close; None where there is none."""

    def will_need(self, files: Iterable[tuple[int, int]]) -> bool:
        """Whether all these (shard, file) can be arrays at once; else they are read by rows."""

    def expect(self, files: Sequence[tuple[int, int]]) -> None:
        """Hears which (shard, file) the next batch needs: batch after batch, in the order of the feed.

        A tier that is far away begins to fetch them, and knows what is needed last.
        """
        return

    def choose(self, samples: int | None, files: Iterable[tuple[int, int]] = ()) -> None:
        """Hears at the start of a feed that it reads so many samples from these files; None: very many, from all files.

        A tier that is far away decides whether files come whole.
        """
        return

    def describe(self) -> str | None:
        """For the report of a feed: how files came from far away."""
        return None

    def load(self, files: Iterable[tuple[int, int]]) -> None:
        """Holds these files in memory from here on. Shards that lie there already have nothing to do."""
        return
