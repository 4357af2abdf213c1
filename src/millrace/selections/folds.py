"""``k_fold``: folds by a hash of each record, so that a record stays in its fold when others are appended."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from millrace.errors import ConfigError
from millrace.order.hashing import UInt64s, mix64, mix64s
from millrace.ragged import as_integer
from millrace.selections.splits import bitmaps_of
from millrace.selections.values import as_view, by_sample, record_column
from millrace.store.store import Store
from millrace.view.bitmap import Bitmap
from millrace.view.compose import Subset
from millrace.view.view import View


def k_fold(view: View | Store, k: int, fold: int, *, seed: int = 0, key: str | None = None) -> tuple[Subset, Subset]:
    """The samples outside fold ``fold`` of ``k`` (to train on), and those inside it.

    The fold of a sample is a hash of ``seed`` and its record: of the number of the record, or of the record column ``key``.
    All samples of a record, and of all records with the same key, are in one fold. Folds are about equally large.

    >>> from millrace import Records, from_arrays
    >>> view = Records(from_arrays({"x": np.arange(10)}, offsets=np.arange(11)))
    >>> train, held_out = k_fold(view, 3, 0)
    >>> len(train) + len(held_out), sorted({*train.ids.tolist()} & {*held_out.ids.tolist()})
    (10, [])
    """
    view = as_view(view)
    k, fold, seed = as_integer("k", k), as_integer("fold", fold), as_integer("seed", seed)
    if k < 2 or not 0 <= fold < k:
        raise ConfigError(f"k={k}, fold={fold}; expected 2 or more folds, and a fold from 0 to k - 1")
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed={seed}; expected 0 to 2^64 - 1")
    made: dict[str, Any] = {
        "split": "fold",
        "k": k,
        "fold": fold,
        "seed": seed,
        **({} if key is None else {"key": key}),
    }
    outside, inside = (Subset(view, bits, by={**made, "part": part}) for part, bits in enumerate(_bitmaps(view, made)))
    return outside, inside


def fold_part(view: View, by: dict[str, Any]) -> Bitmap:
    """The samples of one part again, from how they were chosen."""
    return _bitmaps(view, by)[int(by["part"])]


def _bitmaps(view: View, by: dict[str, Any]) -> list[Bitmap]:
    is_inside = by_sample(view, folds(view, by["k"], by["seed"], by.get("key")) == by["fold"])
    return bitmaps_of(len(view), 2, lambda first, last: is_inside[first:last])


def folds(view: View, k: int, seed: int, key: str | None) -> UInt64s:
    """The fold of every record of the store behind a view."""
    if key is None:
        chosen = view.store.chosen  # of the numbers that records had before ``where``
        hashed = _of_numbers(np.arange(view.store.num_records) if chosen is None else chosen, seed)
    else:
        column = record_column(view, key)
        if column.dtype == object:
            texts = (xxhash.xxh3_64_intdigest(str(text).encode(), seed) for text in column)
            hashed = np.fromiter(texts, np.uint64, len(column))
        elif column.dtype.kind in "iub":
            hashed = _of_numbers(np.asarray(column), seed)
        else:
            raise ConfigError(f"key {key!r} is {column.dtype}; expected integers or text")
    return (hashed >> np.uint64(32)) * np.uint64(k) >> np.uint64(32)


def _of_numbers(numbers: Any, seed: int) -> UInt64s:
    return mix64s(mix64s(numbers.astype(np.int64).view(np.uint64)) ^ np.uint64(mix64(seed ^ 0x666F6C64)))
