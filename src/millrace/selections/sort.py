"""``sorted_by``: the samples of a view in the order of a value, from easy to hard."""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.ragged import Int64s
from millrace.selections.values import CHUNK, as_view, sample_values
from millrace.store.store import Store
from millrace.view.compose import Subset
from millrace.view.view import View


def sorted_by(view: View | Store, column: str | None = None, *, descending: bool = False) -> Subset:
    """The samples of a view, sorted by a record column, or by their number of rows; equal ones keep their order.

    A store stands for its records. Feed it with ``order=mr.Sequential(len(view))``, or mix slices of it by a schedule.

    >>> from millrace import Records, from_arrays
    >>> view = Records(from_arrays({"x": np.arange(6), "score": np.array([2, 0, 1])}, offsets=[0, 1, 3, 6]))
    >>> sorted_by(view, "score").ids.tolist(), sorted_by(view, descending=True).ids.tolist()
    ([1, 2, 0], [2, 1, 0])
    """
    view, made = as_view(view), {"split": "sorted", "column": column, "descending": bool(descending)}
    return Subset(view, sorted_part(view, made), by=made)


def sorted_part(view: View, by: dict[str, Any]) -> Int64s:
    """The numbers of all samples in the order that ``by`` describes."""
    column = by["column"]
    values = _rows(view) if column is None else sample_values(view, column)
    if values.dtype.kind == "f" and np.isnan(values).any():
        raise ConfigError(f"column {column!r} holds NaN, which has no place in an order; leave those out first")
    _, ranks = np.unique(values, return_inverse=True)
    found: Int64s = np.argsort(-ranks if by["descending"] else ranks, kind="stable")
    return found


def _rows(view: View) -> Int64s:
    found = np.empty(len(view), np.int64)
    for first in range(0, len(view), CHUNK):
        last = min(first + CHUNK, len(view))
        found[first:last] = view.spans(np.arange(first, last)).lengths
    return found
