"""``random_split``: parts of a view that share no sample and leave none out, at random, by group, or alike in their labels.

Each part is a ``Subset`` whose spec says how it was chosen, so that ``from_spec`` chooses it again. Nothing is stored but a
bit for every sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.order.hashing import mix64, round_keys
from millrace.order.permute import num_rounds, permute
from millrace.ragged import Array, Int64s, as_integer
from millrace.selections.values import CHUNK, as_view, record_codes
from millrace.store.store import Store
from millrace.view.bitmap import Bitmap
from millrace.view.compose import Subset
from millrace.view.view import View

LANE = 0x73706C6974  # "split": these permutations are not those of training
PartsOf = Callable[[int, int], Array]  # samples [first, last) -> the part of each


def random_split(
    view: View | Store,
    fractions: Sequence[float],
    *,
    seed: int = 0,
    groups: str | None = None,
    labels: str | None = None,
) -> list[Subset]:
    """One ``Subset`` for each fraction. Their samples are chosen at random by ``seed``, and keep their order.

    A store stands for its records. ``fractions`` sum to 1, or are whole numbers of samples that sum to ``len(view)``.
    With ``groups``, a record column, samples whose records have the same value come into one part; its size is then near
    its fraction, and a part that would be empty is an error. With ``labels``, a record column, each part has its fraction
    of every value, to within one sample.

    >>> from millrace import Records, from_arrays
    >>> view = Records(from_arrays({"x": np.arange(10)}, offsets=np.arange(11)))
    >>> [part.ids.tolist() for part in random_split(view, [0.7, 0.3], seed=1)]
    [[0, 1, 2, 3, 4, 5, 7], [6, 8, 9]]
    """
    view, given = as_view(view), list(fractions)
    _check_fractions(given, len(view))
    if groups is not None and labels is not None:
        raise ConfigError(f"groups={groups!r} and labels={labels!r}; give one of them")
    seed = as_integer("seed", seed)
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed={seed}; expected 0 to 2^64 - 1")
    made = {"split": "random", "fractions": given, "seed": seed}
    made |= {key: value for key, value in (("groups", groups), ("labels", labels)) if value is not None}
    parts = _parts(view, made)
    bitmaps = bitmaps_of(len(view), len(given), parts)
    if groups is not None and len(view):
        _check_filled(given, bitmaps, groups, view)
    return [Subset(view, bits, by={**made, "part": part}) for part, bits in enumerate(bitmaps)]


def split_part(view: View, by: dict[str, Any]) -> Bitmap:
    """The samples of one part again, from how they were chosen."""
    return bitmaps_of(len(view), len(by["fractions"]), _parts(view, by))[int(by["part"])]


def bitmaps_of(length: int, count: int, parts_of: PartsOf) -> list[Bitmap]:
    """The samples of each of ``count`` parts."""
    packed = np.zeros((count, -(-length // 8)), np.uint8)
    for first in range(0, length, CHUNK):  # a multiple of 8
        last = min(first + CHUNK, length)
        parts = parts_of(first, last)
        for part in range(count):
            packed[part, first // 8 : -(-last // 8)] = np.packbits(parts == part, bitorder="little")
    return [Bitmap(own, length) for own in packed]


def _check_fractions(fractions: list[Any], length: int) -> None:
    if not fractions or any(isinstance(f, bool) or not isinstance(f, (int, float)) or not f >= 0 for f in fractions):
        raise ConfigError(
            f"fractions={fractions}; expected numbers from 0 to 1 such as [0.9, 0.1], or counts of samples"
        )
    if all(isinstance(f, int) for f in fractions) and sum(fractions) == length:
        return
    if abs(sum(fractions) - 1) > 1e-9:
        raise ConfigError(
            f"fractions={fractions} sum to {sum(fractions):g}; expected 1, or whole numbers that sum to the {length:,} samples"
        )


def _check_filled(fractions: list[float], bitmaps: list[Bitmap], groups: str, view: View) -> None:
    """Groups are whole, so that few or large ones may leave nothing for a part that was asked for."""
    empty = [part for part, fraction in enumerate(fractions) if fraction and not len(bitmaps[part])]
    if empty:
        count = len(np.unique(record_codes(view, groups)))
        raise ConfigError(
            f"groups={groups!r}: part {empty[0]} of fractions={fractions} would be empty, for the {len(view):,} samples have "
            f"{count:,} different values of {groups!r}, and those of one value stay together; give fewer parts, other fractions or "
            f"another seed, a column with more values, or labels={groups!r} for parts that each have their share of every value"
        )


def edges(fractions: Sequence[float], count: int, shift: Fraction = Fraction(1, 2)) -> Int64s:
    """Where each part of ``count`` things begins, and the end: rounded, so that no part is off by a whole thing.

    ``shift`` of [0, 1) is added before numbers are cut: those of many small counts add up to the fractions if it varies.
    """
    exact = [Fraction(f).limit_denominator(10**9) for f in fractions]  # 0.1 is a tenth
    total, reached, found = sum(exact), Fraction(0), [0]
    for part in exact:
        reached += part
        found.append(count if reached == total else int(reached / total * count + shift))
    return np.array(found, np.int64)


def _places(numbers: Array, n: int, seed: int, stream: int = 0) -> Int64s:
    """Where each of these numbers of [0, n) stands in the order of a seed."""
    (keys,) = round_keys(seed, LANE, [stream], num_rounds(n))
    return permute(numbers.astype(np.uint64), n, keys, backward=True).astype(np.int64)


def _parts(view: View, by: dict[str, Any]) -> PartsOf:
    fractions, seed, length = by["fractions"], by["seed"], len(view)
    if "groups" in by:
        codes = record_codes(view, by["groups"])
        own = _part_of_groups(np.bincount(codes, minlength=1), fractions, seed)
        return lambda first, last: own[codes[first:last]]
    if "labels" in by:
        labelled = _part_of_labelled(record_codes(view, by["labels"]), fractions, seed)
        return lambda first, last: labelled[first:last]
    ends = edges(fractions, length)[1:]

    def at_random(first: int, last: int) -> Array:
        return np.searchsorted(ends, _places(np.arange(first, last), length, seed), side="right")

    return at_random


def _part_of_groups(sizes: Int64s, fractions: Sequence[float], seed: int) -> Array:
    """The part of each group: groups in the order of the seed, each to the part that holds its middle sample."""
    place = _places(np.arange(len(sizes)), len(sizes), seed)
    order = np.argsort(place)
    ends = np.cumsum(sizes[order])
    middles = ends - (sizes[order] + 1) // 2
    part = np.empty(len(sizes), np.int64)
    part[order] = np.minimum(
        np.searchsorted(edges(fractions, int(sizes.sum()))[1:], middles, side="right"), len(fractions) - 1
    )
    return part


def _part_of_labelled(codes: Int64s, fractions: Sequence[float], seed: int) -> Array:
    """The part of each sample: those of a label are divided among themselves."""
    part = np.empty(len(codes), np.int64)
    by_label = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[by_label], prepend=-1))
    for members in np.split(by_label, starts[1:]):
        label, count = int(codes[members[0]]), len(members)
        shift = Fraction(mix64(seed ^ mix64(label + 1)), 1 << 64)
        ends = edges(fractions, count, shift)[1:]
        part[members] = np.searchsorted(ends, _places(np.arange(count), count, seed, label), side="right")
    return part
