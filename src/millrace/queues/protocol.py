"""Queue: tickets that workers lease, and the payloads that they put in their place. Every queue passes one contract.

A queue is a window, not a log: the trainer says again and again which tickets it wants, and what it does not find it
makes itself. So every call may be repeated, and a queue may lose everything at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from millrace.errors import ConfigError, QueueError

MAX_PAYLOAD = 512 << 20  # bytes: Redis takes no larger value
MOST_AHEAD = 256  # batches that a rank wants at once, however many workers there are
MAX_RECORD = 16 << 20  # bytes of a record: specs and paths, no data


class Offer(NamedTuple):
    """What a trainer says about one line: its record, the tickets it wants, and those it wants no more."""

    attempt: str  # ``LINK-NUMBER``: which iterator of which feed
    record: bytes = b""
    wanted: Sequence[str] = ()  # tickets, the most urgent first
    unwanted: Sequence[str] = ()


class Seen(NamedTuple):
    """What a trainer learns when it offers tickets."""

    threads: int  # of all workers that are alive
    ready: list[str]  # wanted tickets whose payload is there


class Lease(NamedTuple):
    """What a worker gets: a ticket, or why there is none."""

    state: str  # "ticket", "idle" (nothing to do), "absent" (no such run now) or "ended"
    ticket: str = ""


class Held(NamedTuple):
    """A lease, as ``status`` shows it."""

    ticket: str
    worker: str
    left_s: float


class Status(NamedTuple):
    """A run, as ``millrace queue status`` shows it."""

    run: str
    is_live: bool
    depth: int  # tickets that wait for a worker
    oldest_s: float | None  # how long the oldest of them has waited
    leases: list[Held]
    ready: int  # payloads that wait for the trainer
    workers: dict[str, dict[str, Any]]  # what each said last, and ``seen_s``, how long ago


class QueueFull(QueueError):
    """The server has no memory left for a payload."""


class Queue(Protocol):
    """Tickets and payloads by run. A ticket is ``ATTEMPT:FIRST:COUNT``. All times are the server's."""

    name: str  # for messages, without secrets
    deadline_s: float  # how long a trainer waits for a batch before it makes the batch itself
    lease_s: float  # how long a lease lasts; a worker renews it
    compress: bool  # whether payloads are compressed

    def check(self, num_bytes: int) -> None:
        """Refuses a server that cannot serve, or that has less memory than this for the payloads of a window."""

    # The trainer.

    def offer(self, run: str, link: str, folder: str, offers: Sequence[Offer]) -> Seen:
        """Publishes a run, or says that it is alive; tells which tickets are wanted. May be repeated at any time.

        Refuses a run that a feed of another folder has. A ticket that is waiting, leased or ready is not added again.
        """

    def close_lines(self, run: str, attempts: Sequence[str], tickets: Sequence[str]) -> None:
        """Forgets lines, and their tickets and payloads; ends an ``await_ready`` for them."""

    def end(self, run: str, link: str) -> None:
        """A feed has ended. When the last one has, workers end too."""

    def await_ready(self, run: str, attempt: str) -> list[str]:
        """Tickets that workers finished, or nothing after a short time. One without a payload has failed."""

    def get(self, run: str, ticket: str, memory: Callable[[int], Any]) -> Any:
        """The payload, read into ``memory(num_bytes)``, which may refuse; None if there is none."""

    def put_array(self, run: str, key: str, data: Any) -> None:
        """Keeps the ids of a subset, while the run lives."""

    def has_arrays(self, run: str, keys: Sequence[str]) -> bool:
        """Whether all of them are there; they then live on."""

    # The worker.

    def lease(self, run: str, worker: str, info: dict[str, Any]) -> Lease:
        """The oldest ticket that nobody holds, or nothing after a short time. ``info["threads"]`` counts for ``Seen``."""

    def renew(self, run: str, worker: str, info: dict[str, Any], tickets: Sequence[str]) -> list[str]:
        """Holds these leases longer; returns those that are lost. Says that the worker is alive."""

    def put(self, run: str, worker: str, ticket: str, payload: Any) -> bool:
        """Puts a payload unless there is one, and gives the ticket back; None says that it failed. Whether it was put.

        That of a line which has ended is not kept.
        """

    def leave(self, run: str, worker: str) -> None:
        """A worker ends, and gives back what it holds."""

    def record(self, run: str, attempt: str) -> bytes | None: ...
    def array(self, run: str, key: str) -> bytes | None: ...

    # Anybody.

    def runs(self) -> list[str]: ...
    def status(self, run: str) -> Status: ...
    def drain(self, run: str) -> int:
        """Deletes all that is kept for a run; returns the number of keys. A live trainer publishes its run again."""

    def close(self) -> None:
        """Ends the connections of all threads. May be called again."""


def taken(run: str, folder: str) -> ConfigError:
    return ConfigError(
        f"run {run!r} of this queue belongs to a training in {folder}, which is alive; name this run folder otherwise, or end "
        "that training"
    )
