"""Record: what a worker needs to know about a line of a trainer, as JSON. It names data, never code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from millrace.errors import ConfigError
from millrace.feed.cursor import identity
from millrace.feed.line import LAST, Line
from millrace.feed.mixture import Mixture
from millrace.feed.remote.functions import function_id
from millrace.feed.remote.payload import Stamp
from millrace.identity import canonical, digest
from millrace.order.orders import MAX_POSITION, Order, order_from_spec, share
from millrace.queues.address import read_address
from millrace.queues.protocol import MAX_PAYLOAD, MAX_RECORD
from millrace.store.remote.objects import normal_url
from millrace.view.compose import Concat, Subset
from millrace.view.spec import from_spec, view_arrays
from millrace.view.view import View

if TYPE_CHECKING:
    from millrace.feed.feed import Feed

VERSION = 1
MAX_NAME = 100
REMEDY = "`millrace queue drain URL --run NAME` makes a live trainer put its record again"


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a feed: rebuilt by a worker that can open the same stores."""

    version: int
    batch: int
    rank: int
    world: int
    start: int
    stop: int | None
    last: str
    seed: int
    view: dict[str, Any]
    order: dict[str, Any]
    stores: dict[str, str]  # path by fingerprint
    functions: dict[str, str]  # hash by option
    arrays: list[str]  # ids of subsets, by hash

    @classmethod
    def of(cls, feed: Feed, line: Line) -> Record:
        stores = {store.fingerprint: normal_url(store.path) for store in line.view.stores}
        return cls(
            VERSION, line.batch, line.rank, line.world, line.start, line.stop, line.last, feed.seed, line.view.spec(),
            line.order.spec(), stores, functions_of(feed), list(view_arrays(line.view)),
        )  # fmt: skip

    @classmethod
    def read(cls, data: bytes) -> Record:
        if len(data) > MAX_RECORD:
            raise ConfigError(f"the record of this run has {len(data):,} bytes; expected at most {MAX_RECORD:,}")
        try:
            record = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"the record of this run cannot be read ({error}); is the trainer of the same version?"
            ) from error
        if record.version != VERSION:
            raise ConfigError(
                f"the trainer has records of version {record.version}, this worker {VERSION}; install one version"
            )
        record.check()
        return record

    def check(self) -> None:
        """Refuses numbers that no line has, before anything is computed from them."""
        share(self.batch, self.rank, self.world)
        stop = 0 if self.stop is None else self.stop
        is_line = 0 <= self.start <= MAX_POSITION and 0 <= stop <= MAX_POSITION and self.last in LAST
        if not is_line or not 1 <= self.batch <= MAX_PAYLOAD or not 0 <= self.seed < 1 << 64:
            raise ConfigError(
                f"the record of this run says batch={self.batch}, start={self.start}, stop={self.stop}, last={self.last!r}, "
                f"seed={self.seed}; no line has these: {REMEDY}"
            )

    def write(self) -> bytes:
        return msgspec.json.encode(self)

    def line(self, view: View) -> Line:
        order = order_from_spec(self.order)
        return Line(view, order, self.batch, self.rank, self.world, self.start, self.stop, last=self.last)

    def stamp(self, run: str, attempt: str, line: Line) -> Stamp:
        return stamp_of(run, attempt, line.view, line.order, self.seed, self.functions)


def stamp_of(run: str, attempt: str, view: View, order: Order, seed: int, functions: dict[str, str]) -> Stamp:
    who = identity(view, order, seed)
    mixed = digest(canonical(order.spec()))  # with the weights of a mixture, which its identity leaves out
    made = digest(str(seed), *(f"{name}={functions[name]}" for name in sorted(functions)))
    return Stamp(digest(run), attempt, who["store"], who["view"], mixed, made)


def functions_of(feed: Any) -> dict[str, str]:
    return {name: function_id(name, getattr(feed, name)) for name in ("decode", "transform")}


def ticket_of(line: Line, attempt: str, batch: int) -> str:
    first = line.start + batch * line.batch + line.share[0]
    return f"{attempt}:{first}:{line.size}"


def batch_of(line: Line, ticket: str) -> int | None:
    """The batch that a ticket asks for; None if it is none of this line."""
    try:
        attempt, first, _ = ticket.split(":")
        batch = (int(first) - line.share[0] - line.start) // line.batch
    except ValueError:
        return None
    most = (MAX_POSITION - line.start) // line.batch if line.num_batches is None else line.num_batches
    return batch if 0 <= batch < most and ticket == ticket_of(line, attempt, batch) else None


def run_name(run: str | os.PathLike[str]) -> str:
    """The name of a run in the queue: the last part of its folder's path."""
    name = Path(os.path.abspath(run)).name
    if not name or len(name) > MAX_NAME or not all(c.isascii() and (c.isalnum() or c in "._-") for c in name):
        raise ConfigError(
            f"run={os.fspath(run)!r}: its name {name!r} is also its name in the queue; expected at most {MAX_NAME} letters, "
            "digits and . _ -"
        )
    return name


def check_queue(feed: Feed) -> None:
    """Refuses what workers on other machines could not make, when a feed is constructed."""
    read_address(str(feed.queue))
    if feed.run is None:
        raise ConfigError("queue= needs run=, the folder of this run: workers find it by the folder's name")
    run_name(feed.run)
    if feed.processes:
        raise ConfigError("queue= and processes= exclude each other; leave processes= out")
    for store in feed.view.stores:
        if store.path is None:
            raise ConfigError(
                f"{store!r} is in memory, which workers cannot open; write it with StoreWriter, and open that"
            )
    functions_of(feed)
    try:
        stores = {store.fingerprint: store for store in feed.view.stores}
        view: Any = from_spec(feed.view.spec(), stores, view_arrays(feed.view), allow_mixed_tokenizers=True)
        order: Any = order_from_spec(feed.order.spec())
    except Exception as error:
        raise ConfigError(
            f"workers rebuild view and order from their spec, which fails here: {error}; use those of mr"
        ) from error
    for own, rebuilt in ((feed.order, order), *_parts(feed.view, view)):
        if type(own) is not type(rebuilt) and not isinstance(own, Mixture):
            raise ConfigError(
                f"workers rebuild {type(own).__name__} from its spec as {type(rebuilt).__name__}; use those of mr"
            )


def _parts(own: Any, rebuilt: Any) -> list[tuple[Any, Any]]:
    """A view, and those that it is made of, each with its counterpart."""
    inner = [(own.view, rebuilt.view)] if isinstance(own, Subset) and isinstance(rebuilt, Subset) else []
    if isinstance(own, Concat) and isinstance(rebuilt, Concat):
        inner = list(zip(own.views, rebuilt.views, strict=True))
    return [(own, rebuilt), *(part for pair in inner for part in _parts(*pair))]
