"""The three stages of a batch on its way to the loop, as protocols, and what each stage counts.

*make* turns a number into a batch, *ahead* keeps batches ready in order, *place* brings them to where the loop wants
them. ``compose.py`` chooses one of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from millrace.errors import FeedError
from millrace.feed.batch import Batch

T_co = TypeVar("T_co", covariant=True)


class Counters(NamedTuple):
    """What one stage has counted since it began; None: this stage does not count it."""

    is_cold: bool | None = None  # make: rows are requested from the disk ahead of the copy
    workers: int = 0  # ahead: threads or processes that make batches
    taken: int | None = None  # ahead: batches handed over
    made_here: int | None = None  # ahead: batches that the loop's own thread made, or parts that add up to them
    made_again: int | None = None  # ahead: batches that the loop made because a thread that had begun got no core
    cores: int | None = None  # ahead: that this process had when it began
    pieces: int | None = None  # ahead: that a batch is divided into, for threads to make
    make_s: float | None = None  # ahead: time to make batches, over all workers
    function_s: float | None = None  # make, or ahead for processes: of it, in decode and transform
    put_wait_s: float | None = None  # ahead: workers rested, because enough batches lay ready
    mean_ready: float | None = None  # ahead: batches that lay ready when one was taken
    gil_asked: int | None = (
        None  # ahead: how often the loop let go of Python's lock, to see how long it takes to get it back
    )
    gil_held: int | None = None  # ahead: of these, how often it took as long as a thread may keep it
    gil_wait_s: float | None = None  # ahead: workers with rows to hand on waited for Python's lock; not part of make_s
    num_bytes: int | None = None  # ahead: of all batches made
    past_cache: int | None = None  # ahead: samples read past the page cache
    made_by_workers: int | None = None  # ahead: batches that came from workers through a queue
    refused: int | None = None  # ahead: payloads of a queue that were not what was asked for
    late: int | None = None  # ahead: batches that workers did not bring in time, of all lines of the feed
    slow_workers: tuple[str, ...] = ()  # ahead: those that held one of them
    deaths: int | None = None  # ahead: worker processes that ended, and were replaced
    ends: tuple[str, ...] = ()  # ahead: how the last of them ended
    outgrown: int | None = None  # ahead: batches that did not fit into their shared slot at first
    hit_rate: float | None = None  # place: the share of samples whose rows lay on the device
    held_bytes: int | None = None  # place: of the rows that lie there
    row_bytes: int | None = None  # place: of all rows
    behind_s: float | None = None  # place: the loop waited for a device busy with earlier steps
    transfer_s: float | None = None  # place: the loop waited for copies to a device that had nothing else to do


class Make(Protocol[T_co]):
    """Makes any batch of a line, in any thread. Batch k is always the same."""

    def make(self, batch: int) -> T_co: ...
    def report(self) -> Counters: ...


class Ahead(Protocol[T_co]):
    """Hands over batches 0, 1, 2, ... in this order."""

    def take(self, batch: int, wait: bool = True) -> T_co | None:
        """The next batch, which is number ``batch``. An error in making it is raised here, in its turn.

        None after the last batch, after ``close()``, or if ``wait`` is false and the batch is not ready.
        """

    def report(self) -> Counters: ...
    def close(self) -> None:
        """Ends all workers, and a ``take`` that waits. May be called again, and from another thread."""


class Place(Protocol):
    """Gives the loop its batches where it wants them."""

    # Batches that the loop may pop at once, the next one last, as long as ``stream == current()``.
    ready: list[Batch]
    stream: int
    current: Callable[[], int]

    def take(self, batch: int) -> Batch:
        """The next batch, which is number ``batch``; raises FeedError if the feed was closed meanwhile."""

    def report(self) -> Counters: ...
    def close(self) -> None:
        """Closes the stage ahead of it too; may be called again."""


class Stages(NamedTuple):
    way: str  # as ``Report.way`` names it
    make: Make[Batch]
    ahead: Ahead[object]
    place: Place


class Fallback(FeedError):
    """These stages cannot make a batch, but others can: those composed without ``leave_out``."""

    leave_out: str


class Unmapped(Fallback):
    """A shard cannot be mapped: there are too many, or it is not one run of memory. Then Python reads it."""

    leave_out = "core"


class Ungrouped(Fallback):
    """One of the batches in a slot cannot be made. Alone in a slot, those before it can."""

    leave_out = "groups"


def failures(note: object) -> tuple[type[BaseException], ...]:
    """What a user's function may raise that is an error of its batch. In a worker process, which has a ``note``, an exit
    ends that process, and the pool sees it; in a thread it would end the loop without a word.
    """
    return (Exception,) if note is not None else (Exception, SystemExit)


def closed_error() -> FeedError:
    return FeedError("the feed was closed while a batch was awaited")
