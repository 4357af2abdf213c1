"""The value of a record column for every sample of a view, as splits and folds need it."""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.errors import ConfigError, did_you_mean
from millrace.ragged import Array, Int64s
from millrace.store.store import Store
from millrace.view.compose import Concat, Subset
from millrace.view.records import Records
from millrace.view.view import View

CHUNK = 1 << 20  # samples at a time


def as_view(view: View | Store) -> View:
    """A store stands for its records."""
    return Records(view) if isinstance(view, Store) else view


def record_column(view: View, name: str) -> Any:
    """A record column of one value per record, of the store behind a view."""
    if isinstance(leaf(view), Concat):
        raise ConfigError("a Concat has records of several stores; split the views, then Concat the parts")
    declared: Any = view.store.layout.columns
    known = [column for column, own in declared.items() if own.axis is None and not own.shape]
    if name not in known:
        why = "has no single value per record" if name in declared else "is unknown"
        raise ConfigError(f"column {name!r} {why}{did_you_mean(name, known)}; there are {', '.join(known) or 'none'}")
    return view.store.columns[name]


def leaf(view: View) -> View:
    """The view that subsets were taken of."""
    return leaf(view.view) if isinstance(view, Subset) else view


def record_codes(view: View, name: str) -> Int64s:
    """For every sample the number of its value among those there are; 8 bytes a sample."""
    column = record_column(view, name)
    distinct, codes = np.unique(np.asarray(getattr(column, "codes", column)), return_inverse=True)
    if distinct.dtype.kind == "f" and np.isnan(distinct).any():
        raise ConfigError(
            f"column {name!r} holds NaN, which is no value to split by; leave those out: where('{name} < 1e999')"
        )
    return by_sample(view, codes.astype(np.int64).reshape(-1))


def sample_values(view: View, name: str) -> Array:
    """The value of a record column for every sample; the parts of a Concat are asked one by one."""
    if isinstance(view, Subset):
        return sample_values(view.view, name)[view.ids]
    if isinstance(view, Concat):
        return np.concatenate([sample_values(part, name) for part in view.views])
    return by_sample(view, np.asarray(record_column(view, name)))


def by_sample(view: View, per_record: Array) -> Array:
    """What is known of records, for every sample."""
    found = np.empty(len(view), per_record.dtype)
    for first in range(0, len(view), CHUNK):
        samples = np.arange(first, min(first + CHUNK, len(view)))
        found[samples] = per_record[view.records(samples)]
    return found
