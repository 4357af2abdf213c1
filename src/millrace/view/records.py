"""Records: every record whole, its row columns ragged or padded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.gather.gather import Field
from millrace.ragged import Int64s, Spans, as_integer
from millrace.view.view import StoreLike, View, check_store, column_field, store_spec

CUTS = ("allow", "refuse")
NOT_FINITE = ("nan", "inf", "-inf")  # as a spec names them
MAX_PAD = 1 << 62
MAX_COUNTED = 1 << 21  # records that are counted anew in each process: a hundredth of a second


class Records(View):
    """Sample ``i`` is record ``i``: each row column a ``Ragged`` (values + offsets), each record column one item.

    ``columns`` picks what is delivered; nothing else is read. ``pad=64`` makes row columns dense, with zeros after the last
    row. ``lengths`` then says how many rows are real (``lengths_<axis>`` for axes after the first), and with ``mask=True``
    ``row_mask`` says which. ``pad={"hits": 64}`` says it for each axis; those not named stay ragged. ``fill={"labels": -100}``
    says what stands after the last row of a column instead of zeros. Records longer than ``pad`` are cut, counted and warned
    of; ``cut="refuse"`` is an error instead.

    >>> from millrace import from_arrays
    >>> store = from_arrays({"hits": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "label": [7, 8]}, offsets=[0, 4, 6])
    >>> view = Records(store)
    >>> view[1]["hits"].tolist(), int(view[1]["label"]), view[[1, 0]]["hits"].offsets.tolist()
    ([4.0, 5.0], 8, [0, 2, 6])
    >>> padded = Records(store, pad=4, mask=True)[1]
    >>> padded["hits"].tolist(), int(padded["lengths"]), padded["row_mask"].tolist()
    ([4.0, 5.0, 0.0, 0.0], 2, [True, True, False, False])
    >>> Records(store, pad=4, fill={"hits": -1})[1]["hits"].tolist()
    [4.0, 5.0, -1.0, -1.0]
    """

    def __init__(
        self,
        store: StoreLike,
        *,
        columns: Sequence[str] | None = None,
        pad: int | Mapping[str, int] | None = None,
        fill: Mapping[str, Any] | None = None,
        cut: str = "allow",
        mask: bool = False,
    ) -> None:
        check_store(store)
        if store.cuts is not None:
            raise ConfigError(f"split {store.split_name!r} is a split by time, which cuts records; use Windows")
        if cut not in CUTS:
            raise ConfigError(f"cut={cut!r}; expected one of {', '.join(CUTS)}")
        if pad is None and (mask or cut != "allow" or fill is not None):
            raise ConfigError("fill, mask and cut are about padding; give pad= too")
        columns = (columns,) if isinstance(columns, str) else columns
        if columns is not None and not len(columns):
            raise ConfigError("columns=[] asks for nothing; leave it out for every column")
        names = list(store.layout.columns if columns is None else columns)
        fields = [column_field(store, name) for name in names]
        self._chosen = None if columns is None else names
        axes = [axis for axis in store.layout.row_axes if any(field.axis == axis for field in fields)]
        pads, pad = _pads(pad, axes)
        self.store, self.pad, self.cut, self.mask = store, pad, cut, bool(mask)
        rows = [replace(field, pad=pads.get(field.axis)) for field in fields if field.axis is not None]
        rows = _filled(rows, fill)
        measures = _measures([field for field in rows if field.pad is not None], store.layout.primary, self.mask)
        if clash := [field.name for field in measures if field.name in names]:
            raise ConfigError(f"pad={pad} adds {clash[0]!r}, which is also a column; leave that out with columns=")
        self.fields: tuple[Field, ...] = (*rows, *measures, *(field for field in fields if field.axis is None))
        self.num_cut, self._cut_rows = 0, 0
        if pads:
            self._count_cut(pads)

    def _count_cut(self, pads: Mapping[str, int]) -> None:
        """Counts the records with more than their ``pad`` rows on some axis, and refuses or warns of them."""
        is_large = len(self) > MAX_COUNTED and self.store.chosen is None
        what, count = f"cut by {sorted(pads.items())}", partial(self._cut_counts, pads)
        counts = self.store.kept_table(what, count) if is_large else count()
        self.num_cut, self._cut_rows, most, place = counts.tolist()
        if not self.num_cut:
            return
        longest = f"record {place} is the longest with {most:,} rows"
        if self.cut == "refuse":
            raise ConfigError(
                f"{self.num_cut:,} of {len(self):,} records are longer than pad={self.pad}: {longest}; raise pad, or give "
                "cut='allow'"
            )
        warnings.warn(
            f"Records(pad={self.pad}) cuts {self.num_cut:,} of {len(self):,} records: {longest}; raise pad, or give cut='refuse' "
            "to make this an error",
            UserWarning,
            stacklevel=3,
        )

    def _cut_counts(self, pads: Mapping[str, int]) -> Int64s:
        """How many records are cut and how many rows of the first axis, the rows of the longest record, and its number."""
        num_cut, cut_rows, most, place = 0, 0, -1, 0
        for chunk in zip(*(self._lengths(axis) for axis in pads), strict=True):
            is_cut, longest = np.zeros(len(chunk[0][1]), bool), np.zeros(len(chunk[0][1]), np.int64)
            for (axis, pad), (_, lengths) in zip(pads.items(), chunk, strict=True):
                longest, is_cut = np.maximum(longest, lengths), is_cut | (lengths > pad)
                if axis == self.store.layout.primary:
                    cut_rows += int(np.maximum(lengths - pad, 0).sum())
            num_cut += int(is_cut.sum())
            if len(longest) and longest.max() > most:
                most, place = int(longest.max()), chunk[0][0] + int(longest.argmax())
        return np.array([num_cut, cut_rows, most, place])

    def _lengths(self, axis: str) -> Iterator[tuple[int, Int64s]]:
        """Rows of each record, some records at a time where that can be, with the first of them."""
        if self.store.chosen is not None:
            starts, stops = self.store.record_spans(axis)
            yield 0, stops - starts
        else:
            for first, offsets in self.store.axis_index(axis).chunks():
                yield first, np.diff(offsets)

    def __len__(self) -> int:
        return self.store.num_records

    def spans(self, samples: npt.ArrayLike, axis: str | None = None) -> Spans:
        records, chosen = self._checked(samples), self.store.chosen
        records = records if chosen is None else chosen[records]
        return Spans(*self.store.whole.axis_index(axis or self.store.layout.primary).spans(records))

    def records(self, samples: npt.ArrayLike) -> Int64s:
        return self._checked(samples)

    def plan(self) -> list[tuple[Any, ...]] | None:
        if type(self) is not Records:
            return None
        return [("offsets", self)] if self.store.chosen is None else [("take", self.store.chosen), ("offsets", self)]

    def unused_rows(self) -> int:
        if self.store.chosen is None:
            return self._cut_rows
        starts, stops = self.store.record_spans()
        return self._cut_rows + self.store.num_rows - int((stops - starts).sum())

    def spec(self) -> dict[str, Any]:
        """Keys that came later are left out at their defaults, so that fingerprints stay."""
        later: dict[str, Any] = {"cut": self.cut} if self.cut != "allow" else {}
        later |= {"mask": True} if self.mask else {}
        fills = {field.name: _as_json(field.fill) for field in self.fields if field.fill is not None}
        later |= {"fill": fills} if fills else {}
        return {"view": "records", **store_spec(self.store), "columns": self._chosen, "pad": self.pad, **later}

    def __repr__(self) -> str:
        found = super().__repr__()
        if not self.num_cut:
            return found
        return f"{found[:-1]}; {self.num_cut:,} of {len(self):,} records cut to {self.pad} rows>"


def _pads(pad: Any, axes: list[str]) -> tuple[dict[str, int], int | dict[str, int] | None]:
    """The rows that each axis is padded to, and ``pad`` as a spec has it."""
    if pad is None:
        return {}, None
    named = pad if isinstance(pad, Mapping) else dict.fromkeys(axes, pad)
    if unknown := [axis for axis in named if axis not in axes]:
        raise ConfigError(f"pad= names the axis {unknown[0]!r}; expected one of {', '.join(axes) or 'none'}")
    if isinstance(pad, Mapping) and not pad:
        raise ConfigError("pad={} pads nothing; leave it out")
    found = {axis: as_integer("pad", named[axis]) for axis in axes if axis in named}
    own = dict(found) if isinstance(pad, Mapping) else as_integer("pad", pad)
    for rows in (*found.values(), *(() if isinstance(own, dict) else (own,))):
        if not 1 <= rows <= MAX_PAD:
            raise ConfigError(f"pad={rows}; expected 1 or more rows")
    return found, own


def _filled(rows: list[Field], fill: Mapping[str, Any] | None) -> list[Field]:
    """The row columns with what stands behind their rows. Zeros are the default, and in no spec."""
    if fill is None:
        return rows
    if not isinstance(fill, Mapping) or not fill:
        raise ConfigError(f"fill={fill!r}; expected a number for each of some columns: fill={{'labels': -100}}")
    padded = [field.name for field in rows if field.pad is not None]
    if others := [name for name in fill if name not in padded]:
        raise ConfigError(f"fill= names {others[0]!r}, which is not padded; expected some of {', '.join(padded)}")
    return [
        replace(field, fill=_fill_value(field, fill[field.name])) if field.name in fill else field for field in rows
    ]


def _fill_value(field: Field, value: Any) -> int | float | None:
    """A number of the delivered type, None for zero; refuses one that the type does not hold."""
    dtype, number = field.dtype, float(value) if isinstance(value, str) and value in NOT_FINITE else value
    try:
        if not isinstance(number, (bool, int, float, np.bool_, np.integer, np.floating)):
            raise ValueError
        with np.errstate(over="ignore"):
            held = np.array(number).astype(dtype) if dtype.kind == "f" else np.array(int(number)).astype(dtype)
        is_held = dtype.kind == "f" and (np.isfinite(held) or not np.isfinite(float(number)))
        if not is_held and held.item() != number:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"fill={{{field.name!r}: {value!r}}} is no {dtype}, as which {field.name!r} is delivered; give a number that is"
        ) from None
    return held.item() if held.tobytes().strip(b"\0") else None


def _as_json(number: Any) -> Any:
    """A number as JSON has it, which knows no NaN."""
    return str(number) if isinstance(number, float) and not np.isfinite(number) else number


def _measures(rows: list[Field], primary: str, mask: bool) -> list[Field]:
    """How many of the padded rows are real, for each axis, and which."""
    first = {field.axis: field for field in reversed(rows)}  # any column of an axis says where its rows are
    axes = list(dict.fromkeys(field.axis for field in rows))
    kinds = {"lengths": np.dtype(np.int64), **({"row_mask": np.dtype(bool)} if mask else {})}
    return [
        Field(
            name if axis == primary else f"{name}_{axis}", first[axis].column, axis, dtype, pad=first[axis].pad,
            measure=name.removeprefix("row_"),
        )
        for name, dtype in kinds.items()
        for axis in axes
    ]  # fmt: skip
