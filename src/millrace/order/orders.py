"""The orders: which sample stands at which position of the endless line of training.

``order.samples(positions)`` is pure and vectorised; epoch ``e`` of ``n`` samples is positions
``[e * n, (e + 1) * n)``. ``order.positions(samples, epoch)`` is its inverse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.native import core
from millrace.order.hashing import round_keys
from millrace.order.permute import num_rounds, permute
from millrace.ragged import Int64s, as_int64s, as_integer

MAX_POSITION = (1 << 63) - 1


class Order(ABC):
    """What every order has: ``n`` samples, a ``spec``, and the two directions.

    A subclass gives ``_forward(inside, epochs)`` and ``_backward(samples, epoch)`` on int64 arrays in [0, n).
    """

    has_epochs = True  # whether every sample comes once in each n positions

    def __init__(self, n: int, seed: int | None = None) -> None:
        self.n = as_integer("n", n)
        self.seed = None if seed is None else as_integer("seed", seed)
        if not 1 <= self.n <= MAX_POSITION:
            raise ConfigError(f"n={n}; an order has 1 to 2^63 - 1 samples")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed={seed}; expected 0 to 2^64 - 1")

    def __len__(self) -> int:
        return self.n

    def samples(self, positions: npt.ArrayLike) -> Int64s:
        """The sample at each position."""
        line = check_numbers(positions, MAX_POSITION, "position")
        plan = None if core is None else self.plan()
        if plan is not None:
            found = np.empty(len(line), np.int64)
            core.samples(plan, as_int64s(line), found)
            return found
        return self._at(line)

    def _at(self, line: Int64s) -> Int64s:
        epochs, inside = np.divmod(line, np.int64(self.n))
        return self._forward(inside, epochs)

    def epochs(self, positions: npt.ArrayLike) -> Int64s:
        """The epoch of each position."""
        return check_numbers(positions, MAX_POSITION, "position") // self.n

    def epochs_of(self, samples: npt.ArrayLike, position: int) -> Any:
        """The epoch of these samples in which a position lies, as ``positions`` takes it."""
        return position // self.n

    def positions(self, samples: npt.ArrayLike, epoch: Any = 0) -> Int64s:
        """Where each sample stands in one epoch."""
        wanted = check_numbers(samples, self.n - 1, "sample")
        if not 0 <= epoch <= (MAX_POSITION - self.n + 1) // self.n:
            raise ConfigError(f"epoch={epoch} of {self.n} samples ends beyond position 2^63 - 1")
        return self._backward(wanted, epoch) + np.int64(epoch * self.n)

    @abstractmethod
    def _forward(self, inside: Int64s, epochs: Int64s) -> Int64s: ...

    @abstractmethod
    def _backward(self, samples: Int64s, epoch: int) -> Int64s: ...

    def plan(self) -> tuple[Any, ...] | None:
        """The order as one plain step that the C core runs; None where only Python knows it."""
        return None

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """JSON that rebuilds the order."""

    def identity(self) -> dict[str, Any]:
        """The part of the spec that a saved state must agree with."""
        return self.spec()

    def state(self) -> dict[str, Any]:
        """What a saved state keeps of the order, besides the position."""
        return {}

    def resumed(self, state: Mapping[str, Any], position: int) -> Order:
        """The order of a run that goes on from a saved state."""
        return self

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.spec().items() if key not in ("order", "n"))
        return f"{type(self).__name__}({self.n:,}{', ' if options else ''}{options})"


def check_numbers(values: npt.ArrayLike, limit: int, what: str) -> Int64s:
    """Positions or samples as int64, refused outside [0, limit]."""
    array = np.asarray(values)
    if array.ndim == 0:
        array = array[None]
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ConfigError(f"{what}s are {array.dtype} of shape {array.shape}; expected integers")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > limit:
        raise ConfigError(f"{what} {low if low < 0 else high} is out of range; expected 0 to {limit}")
    return array.astype(np.int64, copy=False)


class Sequential(Order):
    """The samples as they lie, epoch after epoch.

    >>> Sequential(3).samples([1, 2, 3]).tolist()
    [1, 2, 0]
    """

    def __init__(self, n: int) -> None:
        super().__init__(n)

    def _forward(self, inside: Int64s, epochs: Int64s) -> Int64s:
        return inside

    def _backward(self, samples: Int64s, epoch: int) -> Int64s:
        return samples

    def plan(self) -> tuple[Any, ...] | None:
        return ("sequential", self.n) if type(self) is Sequential else None

    def spec(self) -> dict[str, Any]:
        return {"order": "sequential", "n": self.n}


class Shuffled(Order):
    """Every sample once per epoch in an order of its own, exact and global, with no memory.

    >>> order = Shuffled(10**12, seed=7)
    >>> order.positions(order.samples([0, 5, 10**12 - 1])).tolist()
    [0, 5, 999999999999]
    """

    def __init__(self, n: int, seed: int = 0) -> None:
        super().__init__(n, seed)

    def _forward(self, inside: Int64s, epochs: Int64s) -> Int64s:
        return by_stream(inside, epochs, self.n, int(self.seed or 0), 0)

    def _backward(self, samples: Int64s, epoch: int) -> Int64s:
        return by_stream(samples, np.full(len(samples), epoch), self.n, int(self.seed or 0), 0, backward=True)

    def plan(self) -> tuple[Any, ...] | None:
        return ("shuffled", self.n, self.seed) if type(self) is Shuffled else None

    def spec(self) -> dict[str, Any]:
        return {"order": "shuffled", "n": self.n, "seed": self.seed}


def by_stream(inside: Int64s, streams: Int64s, n: int, seed: int, lane: int, *, backward: bool = False) -> Int64s:
    """Moves values of [0, n), or moves them back, each by the keys of its own stream."""
    if len(inside) == 0:
        return inside
    values, rounds = inside.astype(np.uint64), num_rounds(n)
    if streams[0] == streams[-1] and np.all(streams == streams[0]):
        keys = round_keys(seed, lane, streams[:1], rounds)[0]
    else:
        distinct, which = np.unique(streams, return_inverse=True)
        keys = round_keys(seed, lane, distinct, rounds)[which]
    return permute(values, n, keys, backward=backward).astype(np.int64)


class BlockShuffled(Order):
    """Shuffles blocks of neighbours, then the samples of every ``window`` blocks: near-sequential reads for slow disks.

    Full blocks are permuted over the whole epoch; a short last block comes last in the last window.

    >>> order = BlockShuffled(1000, block=10, window=4, seed=7)
    >>> sorted(order.samples(np.arange(1000)).tolist()) == list(range(1000))
    True
    """

    def __init__(self, n: int, *, block: int = 256, window: int = 64, seed: int = 0) -> None:
        super().__init__(n, seed)
        self.block, self.window = as_integer("block", block), as_integer("window", window)
        self._size = self.block * self.window  # samples of a full window
        if self.block < 1 or self.window < 1 or self._size > MAX_POSITION:
            raise ConfigError(f"block={block}, window={window}; expected 1 or more samples and blocks")
        self._full = self.n // self.block  # full blocks

    @classmethod
    def for_cache(cls, view: Any, cache_bytes: int, *, seed: int = 0) -> BlockShuffled:
        """The order for a cache of so many bytes: it mixes as many shards at a time as fit twice.

        A block has the samples of a shard and may lie in two. While one window is read, the next one comes.
        """
        sizes, samples = view.shard_bytes(), len(view)
        largest = max(1, int(sizes.max(initial=1)))
        window = cache_bytes // (4 * largest)
        if not window:
            raise ConfigError(
                f"a cache of {cache_bytes:,} bytes is too small: shards have up to {largest:,} bytes, and 4 must fit; give "
                f"{4 * largest:,} or more, or prepare the store with smaller shards"
            )
        block = max(1, -(-samples // max(1, len(sizes))))
        return cls(samples, block=block, window=min(window, -(-samples // block)), seed=seed)

    def _forward(self, inside: Int64s, epochs: Int64s) -> Int64s:
        windows, places = np.divmod(inside, np.int64(self._size))
        mixed = self._within(windows, places, epochs, backward=False)
        slots, offsets = np.divmod(mixed, np.int64(self.block))
        slots += windows * self.window
        blocks = slots.copy()
        movable = slots < self._full
        blocks[movable] = by_stream(slots[movable], epochs[movable], max(self._full, 1), int(self.seed or 0), 1)
        return blocks * self.block + offsets

    def _within(self, windows: Int64s, places: Int64s, epochs: Int64s, *, backward: bool) -> Int64s:
        """Moves places within their windows, or back; each (epoch, window) has a stream of its own."""
        streams = epochs * np.int64(-(-self.n // self._size)) + windows
        moved = np.empty_like(places)
        short = windows == self.n // self._size  # the last window, if it is not full
        for mask, size in ((~short, self._size), (short, self.n % self._size)):
            if size and mask.any():
                own = places[mask], streams[mask], size, int(self.seed or 0)
                moved[mask] = by_stream(*own, 2, backward=backward)
        return moved

    def _backward(self, samples: Int64s, epoch: int) -> Int64s:
        blocks, offsets = np.divmod(samples, np.int64(self.block))
        slots = blocks.copy()
        movable = blocks < self._full
        epochs, seed = np.full(len(samples), epoch, np.int64), int(self.seed or 0)
        slots[movable] = by_stream(blocks[movable], epochs[movable], max(self._full, 1), seed, 1, backward=True)
        windows, inner = np.divmod(slots, np.int64(self.window))
        places = self._within(windows, inner * self.block + offsets, epochs, backward=True)
        positions: Int64s = windows * self._size + places
        return positions

    def plan(self) -> tuple[Any, ...] | None:
        plan = ("block_shuffled", self.n, self.seed, self.block, self.window)
        return plan if type(self) is BlockShuffled else None

    def spec(self) -> dict[str, Any]:
        return {"order": "block_shuffled", "n": self.n, "block": self.block, "window": self.window, "seed": self.seed}


def order_from_spec(spec: Mapping[str, Any]) -> Order:
    """The order that ``spec()`` described."""
    from millrace.order.mixture import MixtureOrder  # it is built on the orders here

    kinds: dict[str, type[Order]] = {"sequential": Sequential, "shuffled": Shuffled, "block_shuffled": BlockShuffled}
    options = dict(spec)
    kind = options.pop("order", None)
    if kind not in (*kinds, "mixture"):
        raise ConfigError(f"order {kind!r} is unknown; expected one of {', '.join((*kinds, 'mixture'))}")
    try:
        if kind == "mixture":
            return MixtureOrder(options.pop("sizes"), options.pop("segments"), **options)
        return kinds[kind](options.pop("n"), **options)
    except (TypeError, KeyError) as error:
        raise ConfigError(f"the spec of a {kind} order is {dict(spec)}: {error}") from error


def share(batch: int, rank: int, world: int) -> tuple[int, int]:
    """The contiguous part [first, last) of a global batch that rank ``rank`` of ``world`` takes.

    >>> [share(10, rank, 4) for rank in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    if world < 1 or not 0 <= rank < world:
        raise ConfigError(f"rank={rank} of world={world}; expected 0 <= rank < world")
    if batch < world:
        raise ConfigError(f"batch={batch} is smaller than world={world}; every rank needs a sample: raise batch")
    return rank * batch // world, (rank + 1) * batch // world
