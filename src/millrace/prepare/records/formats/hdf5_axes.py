"""The axes of an HDF5 file: which datasets say where the rows of records are, and which datasets hold those rows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError, SourceError
from millrace.prepare.records.formats.format import Source
from millrace.prepare.records.options import RecordOptions
from millrace.prepare.runs import offsets_of
from millrace.ragged import Int64s

# The names by which datasets of offsets or counts are guessed: hits_offsets, hits/counts, n_hits.
GUESSED = re.compile(
    r"(?P<axis>.*?)[._-]?(?:(?P<edges>offsets?|cu_seqlens|indptr|row_splits)|counts?|lengths?)|n_?(?P<named>[A-Za-z].*)"
)
MAX_RECORDS = 1 << 40


class Axis(NamedTuple):
    """Where the rows of each record are."""

    name: str
    dataset: str
    offsets: Int64s

    @property
    def num_records(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_rows(self) -> int:
        return int(self.offsets[-1])


def axes_of(found: Mapping[str, Any], options: RecordOptions, source: Source) -> dict[str, Axis]:
    """The axes that were given, or that names of datasets show."""
    for axis, name in options.offsets.items():
        if name not in found:
            raise ConfigError(
                f"--offsets {axis}={name}: {source.path!r} has no such dataset; there are {', '.join(found)}"
            )
    if not options.offsets:
        return _guessed(found)
    axes = {}
    for axis, name in options.offsets.items():
        others = {len(one) for other, one in found.items() if one.shape and other != name}
        offsets = _as_offsets(name, found[name], others, others, is_given=True)
        if offsets is None:
            raise SourceError(
                f"{source.path!r}: {name!r} fits no dataset as offsets (from 0 to its rows), counts (whose sum is its rows) or the "
                "record number of each row; name another with --offsets",
                source=source.path,
            )
        axes[axis] = Axis(axis, name, offsets)
    return axes


def axis_of(
    name: str, rows: int, axes: Mapping[str, Axis], num_records: int, options: RecordOptions, source: Source
) -> str | None:
    """The axis whose rows a dataset has; None where it has an item per record."""
    fitting = [axis for axis in axes.values() if axis.num_rows == rows]
    told = options.axis if isinstance(options.axis, dict) else {}
    mine = [axis for axis in fitting if options.rename.get(name, name) in told.get(axis.name, ())]
    mine = mine or _closest(name, fitting)
    if not mine and rows == num_records:
        return None
    if len(mine or fitting) == 1:
        return (mine or fitting)[0].name
    if fitting:
        raise SourceError(
            f"{source.path!r}: dataset {name!r} has {rows:,} items, as have the axes "
            f"{' and '.join(axis.name for axis in fitting)}; say which it is on with --axis {fitting[0].name}={name}, or leave it "
            "out with --columns",
            source=source.path,
        )
    known = "".join(f", {axis.num_rows:,} (rows of {axis.name})" for axis in axes.values())
    raise SourceError(
        f"{source.path!r}: dataset {name!r} has {rows:,} items; expected {num_records:,} (records){known}; "
        "say where its records begin with --offsets AXIS=DATASET, or leave it out with --columns",
        source=source.path,
    )


def _guessed(found: Mapping[str, Any]) -> dict[str, Axis]:
    """The axes of datasets that are called like offsets or counts, and fit others as such."""
    axes: dict[str, Axis] = {}
    are_named = dict[str, bool]()  # whether a dataset that fits is called like the axis
    for name, dataset in found.items():
        match = GUESSED.fullmatch(name.rpartition(".")[2])
        if not match or dataset.dtype.kind not in "iu" or len(dataset.shape or ()) != 1:
            continue
        parent = name.rpartition(".")[0].rpartition(".")[2]
        axis = match["axis"] or match["named"] or parent or "rows"
        plain = {other: one for other, one in found.items() if one.shape and other != name}
        members = {len(one) for other, one in plain.items() if _belonging(other, axis, name)}
        others = {len(one) for one in plain.values()}
        offsets = _as_offsets(name, dataset, members | (others - {len(dataset)}), others, is_given=False)
        if offsets is not None and axis not in axes:
            axes[axis] = Axis(axis, name, offsets)
            are_named[axis] = int(offsets[-1]) in members
    # A number of each record, n_jets, may add up to the rows of hits, or to their offsets, by chance.
    taken = {one.num_rows for one in axes.values() if are_named[one.name]}
    places = {one.dataset for one in axes.values()}
    free = {len(one) for name, one in found.items() if one.shape and name not in places} - taken
    return {axis: one for axis, one in axes.items() if are_named[axis] or one.num_rows in free}


def _stems(axis: str, dataset: str) -> Iterator[str]:
    """How the datasets of an axis may begin: its name, or what is before ``_offsets`` or ``.offsets`` beside them."""
    yield axis
    parent, dot, last = dataset.rpartition(".")
    match = GUESSED.fullmatch(last)
    own = (match["axis"] or match["named"] or "") if match else ""
    yield f"{parent}{dot}{own}"


def _belonging(name: str, axis: str, dataset: str) -> int:
    """How much of a name says that it is on an axis: the letters of the longest stem that it begins with."""
    last = name.rpartition(".")[2]
    return max(
        len(stem) if stem and (name.startswith(stem) or last.startswith(stem)) else 0 for stem in _stems(axis, dataset)
    )


def _closest(name: str, axes: list[Axis]) -> list[Axis]:
    """The axes whose name a dataset begins with; of several those with the longest."""
    belonging = [_belonging(name, axis.name, axis.dataset) for axis in axes]
    return [axis for axis, much in zip(axes, belonging, strict=True) if much and much == max(belonging)]


def _as_offsets(name: str, dataset: Any, rows: set[int], others: set[int], *, is_given: bool) -> Int64s | None:
    """Offsets from offsets, from counts, or from the record number of every row; None where they fit no dataset.

    ``rows`` are the lengths that datasets of rows may have, ``others`` those of all other datasets.
    """
    if len(dataset.shape) != 1 or dataset.dtype.kind not in "iu" or not 0 < len(dataset) <= MAX_RECORDS:
        return None
    values: Int64s = dataset[:].astype(np.int64)
    if values.min() < 0:
        return None
    is_rising = bool(np.all(values[1:] >= values[:-1]))
    are_offsets = bool(values[0] == 0 and is_rising and int(values[-1]) in rows)
    are_counts = int(values.sum()) in rows
    is_by_record = len(values) in others and len(values) - 1 not in others
    if are_offsets and are_counts:  # [0, 0, 5]: of two records, or three
        match = GUESSED.fullmatch(name.rpartition(".")[2])
        are_offsets = match["edges"] is not None if match else not is_by_record
    if are_offsets and (not is_given or not is_by_record):
        return values
    if are_counts:
        return offsets_of(values)
    if is_given and is_rising and values[-1] < 1 << 32:
        # Where the last records have no rows, other datasets say how many records there are.
        more = {count for count in others if count > values[-1] and count != len(values)}
        return offsets_of(np.bincount(values, minlength=min(more) if len(more) == 1 else 0).astype(np.int64))
    return None
