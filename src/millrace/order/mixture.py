"""MixtureOrder: samples of several sources in exact proportions, on one endless line.

Each source has a shuffled line of its own. A table of one period says whose turn it is, so any position is found in
constant time. Weights may change at given positions; a source then goes on where it stands.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.lazy import cached_property
from millrace.native import core
from millrace.order.orders import MAX_POSITION, Order, by_stream, check_numbers
from millrace.ragged import Array, Int64s, as_integer

PERIOD = 1 << 16  # positions after which the turns repeat; weights are parts of it
LANE = 16  # the shuffle of source i has lane LANE + i


class Segment(NamedTuple):
    """From ``position`` on, source i has ``parts[i]`` of every ``PERIOD`` positions."""

    position: int
    parts: tuple[int, ...]


class MixtureOrder(Order):
    """Sources of these sizes, mixed by weights: at every prefix of a segment a source is less than one sample off.

    ``schedule`` is a list of ``(position, weights)``; weights alone are a schedule from position 0. Weights are rounded
    to parts of 65,536. A source that ends begins its next pass, shuffled anew.

    >>> order = MixtureOrder([100, 5], [0.75, 0.25], seed=7)
    >>> np.bincount(np.searchsorted([100], order.samples(np.arange(400)), side="right")).tolist()
    [300, 100]
    """

    has_epochs = False

    def __init__(self, sizes: Sequence[int], schedule: Sequence[Any], *, seed: int = 0) -> None:
        self.sizes = tuple(as_integer("size", size) for size in sizes)
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError(f"a mixture of sources with {list(self.sizes)} samples; each needs at least one")
        super().__init__(sum(self.sizes), seed)
        pairs = schedule if schedule and isinstance(schedule[0], (tuple, list)) else [(0, schedule)]
        self.segments = _segments([(as_integer("position", at), weights) for at, weights in pairs], len(self.sizes))

    def _at(self, line: Int64s) -> Int64s:
        sources, ordinals = self._turns(line)
        return self._moved(sources, ordinals % self._sizes[sources], ordinals // self._sizes[sources])

    def _forward(self, inside: Int64s, epochs: Int64s) -> Int64s:
        return self._at(epochs * self.n + inside)

    def _backward(self, samples: Int64s, epoch: int) -> Int64s:
        return self.positions(samples, epoch)

    def epochs(self, positions: npt.ArrayLike) -> Int64s:
        """How often the source at each position was read to its end before."""
        sources, ordinals = self._turns(check_numbers(positions, MAX_POSITION, "position"))
        return ordinals // self._sizes[sources]

    def epochs_of(self, samples: npt.ArrayLike, position: int) -> Int64s:
        """The pass in which the source of each sample is at a position."""
        sources = np.searchsorted(self._ends, check_numbers(samples, self.n - 1, "sample"), side="right")
        return (self._counts(position) // self._sizes)[sources]

    def positions(self, samples: npt.ArrayLike, epoch: npt.ArrayLike = 0) -> Int64s:
        """Where each sample stands in pass ``epoch`` of its source."""
        wanted = check_numbers(samples, self.n - 1, "sample")
        epochs = np.broadcast_to(np.asarray(epoch, np.int64), wanted.shape)
        sources = np.searchsorted(self._ends, wanted, side="right")
        sizes = self._sizes[sources]
        if np.any(epochs < 0) or np.any(epochs > MAX_POSITION // sizes - 1):
            raise ConfigError(f"epoch={epoch!r}; expected 0 or more, within 2^63 - 1 positions")
        inside = self._moved(sources, wanted - self._firsts[sources], epochs, backward=True)
        ordinals = epochs * sizes + inside
        found = np.empty(len(wanted), np.int64)
        numbers = self._segment_of(ordinals, sources)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            found[mine] = self._positions_in(number, sources[mine], ordinals[mine])
        return found

    def _segment_of(self, ordinals: Int64s, sources: Int64s) -> Int64s:
        """The segment in which each source delivers its sample of this number."""
        numbers: Int64s = (self._bases[:, sources] <= ordinals).sum(axis=0) - 1
        return numbers

    def _positions_in(self, number: int, sources: Int64s, ordinals: Int64s) -> Int64s:
        at, parts = self.segments[number]
        own = np.asarray(parts, np.int64)[sources]
        if not own.all():
            raise ConfigError(f"source {int(sources[own == 0][0])} has no weight from position {at:,} on")
        periods, ranks = np.divmod(ordinals - self._bases[number, sources], own)
        if np.any(periods >= (MAX_POSITION - at) // PERIOD):
            raise ConfigError("a sample of this epoch comes only after position 2^63 - 1, where every line ends")
        slots = np.argsort(turns_of(parts), kind="stable")  # of source 0, then of source 1, ...
        firsts = np.concatenate(([0], np.cumsum(parts)))[sources]
        positions: Int64s = at + periods * PERIOD + slots[firsts + ranks]
        return positions

    def _turns(self, line: Int64s) -> tuple[Int64s, Int64s]:
        """The source at each position, and how many of its samples came before."""
        sources, ordinals = np.empty_like(line), np.empty_like(line)
        numbers = np.searchsorted([segment.position for segment in self.segments], line, side="right") - 1
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            at, parts = self.segments[number]
            periods, places = np.divmod(line[mine] - at, np.int64(PERIOD))
            turns = turns_of(parts)
            own = turns[places]
            sources[mine] = own
            weights = np.asarray(parts, np.int64)[own]
            ordinals[mine] = self._bases[number, own] + periods * weights + _ranks(turns)[places]
        return sources, ordinals

    def _moved(self, sources: Int64s, inside: Int64s, epochs: Int64s, *, backward: bool = False) -> Int64s:
        """The shuffle of each source; forward to numbers of the mixture, backward from those of the source."""
        moved = np.empty_like(inside)
        for source in np.unique(sources).tolist():
            mine = sources == source
            own = inside[mine], epochs[mine], self.sizes[source], int(self.seed or 0), LANE + source
            moved[mine] = by_stream(*own, backward=backward) + (0 if backward else self._firsts[source])
        return moved

    def _counts(self, position: int) -> Int64s:
        """Samples of each source before a position."""
        number = int(np.searchsorted([segment.position for segment in self.segments], position, side="right")) - 1
        counts: Int64s = self._bases[number] + _counts_in(self.segments[number], position)
        return counts

    @cached_property
    def _sizes(self) -> Int64s:
        return np.array(self.sizes, np.int64)

    @cached_property
    def _ends(self) -> Int64s:
        return np.cumsum(self._sizes)

    @cached_property
    def _firsts(self) -> Int64s:
        return self._ends - self._sizes

    @cached_property
    def _bases(self) -> Int64s:
        """Samples of each source before each segment."""
        bases = [np.zeros(len(self.sizes), np.int64)]
        for segment, later in pairwise(self.segments):
            bases.append(bases[-1] + _counts_in(segment, later.position))
        return np.stack(bases)

    @cached_property
    def _table(self) -> Any:
        """What the core needs: the turns of every segment, each table once."""
        tables = list(dict.fromkeys(segment.parts for segment in self.segments))
        which = [tables.index(segment.parts) for segment in self.segments]
        starts = np.array([segment.position for segment in self.segments], np.int64)
        turns = np.concatenate([turns_of(parts) for parts in tables])
        return core.Mixture(self._ends, starts, np.array(which, np.int64), self._bases.reshape(-1), turns)

    def plan(self) -> tuple[Any, ...] | None:
        is_known = core is not None and type(self) is MixtureOrder
        return ("mixture", self.n, self.seed, self._table) if is_known else None

    def spec(self) -> dict[str, Any]:
        return {"order": "mixture", "sizes": list(self.sizes), "seed": self.seed, **self.state()}

    def identity(self) -> dict[str, Any]:
        """Weights are not part of it: they may change when a run goes on."""
        return {"order": "mixture", "sizes": list(self.sizes), "seed": self.seed}

    def state(self) -> dict[str, Any]:
        return {"segments": [[at, list(parts)] for at, parts in self.segments]}

    def resumed(self, state: Mapping[str, Any], position: int) -> MixtureOrder:
        """The saved past of a run up to a position, then the weights of this order."""
        past = [segment for segment in _saved(state.get("segments"), len(self.sizes)) if segment.position < position]
        now = max((segment for segment in self.segments if segment.position <= position), key=lambda own: own.position)
        coming = [segment for segment in self.segments if segment.position > position]
        if not past or past[-1].parts != now.parts:
            past.append(Segment(position if past else 0, now.parts))
        return MixtureOrder(self.sizes, [*past, *coming], seed=int(self.seed or 0))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.sizes, self.segments, self.seed)

    def __repr__(self) -> str:
        shown = [
            f"{at:,}: " + ", ".join(map(str, parts[:8])) + (", ..." if parts[8:] else "") for at, parts in self.segments
        ]
        return f"MixtureOrder({self.n:,}, parts of {PERIOD:,} from {'; '.join(shown[:4])}, seed={self.seed})"


def _rebuilt(sizes: Sequence[int], segments: Sequence[Segment], seed: int) -> MixtureOrder:
    return MixtureOrder(sizes, segments, seed=seed)


def _segments(pairs: Sequence[tuple[int, Any]], count: int) -> tuple[Segment, ...]:
    positions = [at for at, _ in pairs]
    if positions[0] != 0 or any(late <= early for early, late in pairwise(positions)):
        raise ConfigError(f"a schedule with positions {positions[:8]}; expected 0 first, then larger ones")
    for _, weights in pairs:
        if len(weights) != count:
            raise ConfigError(f"{len(weights)} weights for {count} sources; give one for each")
    return tuple(Segment(at, as_parts(weights)) for at, weights in pairs)


def as_parts(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as parts of 65,536 by largest remainders; every weight above 0 gets at least one part.

    >>> as_parts([2, 1])
    (43691, 21845)
    """
    values = np.asarray(weights, np.float64)
    if not np.all(np.isfinite(values)) or np.any(values < 0) or not values.any():
        raise ConfigError(f"weights {values.tolist()[:8]}; expected numbers from 0 on, one of them larger")
    if values.max() > np.finfo(np.float64).max / len(values):  # their sum would be infinite
        values = values / values.max()
    if np.count_nonzero(values) > PERIOD:
        raise ConfigError(f"{np.count_nonzero(values):,} sources with a weight; a mixture has at most {PERIOD:,}")
    if np.array_equal(values, np.floor(values)) and values.sum() == PERIOD:
        return tuple(int(value) for value in values)
    exact = values / values.sum() * PERIOD
    parts = np.maximum(np.floor(exact), values > 0).astype(np.int64)
    by_remainder = np.argsort(parts - exact, kind="stable")
    while (missing := PERIOD - int(parts.sum())) > 0:
        parts[by_remainder[:missing]] += values[by_remainder[:missing]] > 0
        by_remainder = by_remainder[values[by_remainder] > 0]
    while parts.sum() > PERIOD:
        parts[int(np.argmax(parts))] -= 1
    return tuple(parts.tolist())


@lru_cache(maxsize=64)
def turns_of(parts: tuple[int, ...]) -> Int64s:
    """Whose turn it is at each position of a period."""
    if core is None:
        return reference_turns(parts)
    return np.frombuffer(core.turns(np.array(parts, np.int64)), np.int64)


def reference_turns(parts: Sequence[int]) -> Int64s:
    """The twin of the core's ``turns``: Tijdeman's solution of the chairman assignment problem.

    With m sources no count is more than 1 - 1/(2m - 2) off. So turn j of a source lies between the first step at which it
    is not too early by that bound, and the last at which it is not too late. Of the turns that may come, the one that
    must come first is next, and the lower index of two.
    """
    turns = np.empty(PERIOD, np.int64)
    unit = max(1, 2 * (sum(part > 0 for part in parts) - 1))
    begins: list[list[int]] = [[] for _ in range(PERIOD + 1)]  # whose next turn may come from this step on
    done, ready = [0] * len(parts), list[tuple[int, int]]()

    def release(source: int, step: int) -> None:
        """Notes the next turn of a source, which had its last before this step."""
        first = -(-PERIOD * (done[source] * unit + 1) // (parts[source] * unit))
        begins[min(PERIOD, max(step, first))].append(source)

    for source, part in enumerate(parts):
        if part:
            release(source, 1)
    for step in range(1, PERIOD + 1):
        for source in begins[step]:
            last = PERIOD * (done[source] * unit + unit - 1) // (parts[source] * unit) + 1
            heapq.heappush(ready, (last, source))
        _, source = heapq.heappop(ready)
        turns[step - 1] = source
        done[source] += 1
        if done[source] < parts[source]:
            release(source, step + 1)
    turns.flags.writeable = False
    return turns


def _ranks(turns: Int64s) -> Int64s:
    """How often the source of each place had its turn before in the period."""
    by_source = np.argsort(turns, kind="stable")
    counts = np.bincount(turns)
    ranks = np.empty(len(turns), np.int64)
    ranks[by_source] = np.arange(len(turns)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks


def _counts_in(segment: Segment, position: int) -> Array:
    """Samples of each source from the start of a segment to a position."""
    periods, rest = divmod(position - segment.position, PERIOD)
    inside = np.bincount(turns_of(segment.parts)[:rest], minlength=len(segment.parts))
    return np.asarray(segment.parts, np.int64) * periods + inside


def _saved(segments: Any, count: int) -> list[Segment]:
    """The segments of a cursor, checked."""
    try:
        found = [
            Segment(as_integer("position", at), tuple(as_integer("part", part) for part in parts))
            for at, parts in segments
        ]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the state has no segments of a mixture: {str(segments)[:200]}") from error
    if not found or any(len(own.parts) != count or sum(own.parts) != PERIOD or min(own.parts) < 0 for own in found):
        raise ConfigError(f"the state's segments are not {count} parts of {PERIOD:,} each: {str(segments)[:200]}")
    _segments(found, count)
    return found
