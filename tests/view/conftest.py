"""Stores in memory and on disk from the same records, and one check that every view must pass."""

import itertools
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.store.layout import Layout
from millrace.store.memory import array_store
from millrace.store.values import Normaliser

WHERE = ("memory", "shards", "disk")


class Stores:
    """Makes stores of records: ``memory`` has one shard, ``shards`` a few records in each, ``disk`` tiny files."""

    where = WHERE

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()

    def make(self, where, columns, records, *, splits=None, cuts=None, meta=None):
        splits = splits or ["train"] * len(records)
        if where == "disk":
            return self._disk(columns, records, splits, cuts, meta)
        return self._memory(columns, records, splits, cuts, meta, 2 if where == "shards" else len(records) or 1)

    def _disk(self, columns, records, splits, cuts, meta):
        path = self._folder / str(next(self._numbers))
        names = tuple(sorted(set(splits))) if cuts is None else ()
        with mr.StoreWriter(path, columns=columns, splits=names, shard_bytes=70, cuts=cuts, meta=meta) as writer:
            for record, split in zip(records, splits, strict=True):
                writer.append(record, split=split)
        return mr.open_store(path)

    def _memory(self, columns, records, splits, cuts, meta, per_shard):
        names = tuple(sorted(set(splits))) or ("train",)
        normaliser = Normaliser(Layout(columns))
        made = []
        for number, name in enumerate(names):
            mine = [normaliser.record(r) for r, split in zip(records, splits, strict=True) if split == name]
            made += [(number, mine[first : first + per_shard]) for first in range(0, len(mine), per_shard)]
        layout = Layout(normaliser.columns())
        files = [(f"memory-{k}", _files(layout, part)) for k, (_, part) in enumerate(made)]
        return array_store(
            layout, files, kind="records", splits=names, split_of=[n for n, _ in made], cuts=cuts, meta=meta
        )


def _files(layout, part):
    found = []
    for file in layout.files:
        if file.column is None:
            found.append(np.cumsum([0, *(lengths[file.axis] for _, lengths in part)], dtype=np.int64))
        else:
            found.append(np.concatenate([arrays[file.column] for arrays, _ in part]))
    return found


@pytest.fixture(scope="session")
def stores(tmp_path_factory) -> Stores:
    return Stores(tmp_path_factory.mktemp("stores"))


def same(found, expected) -> None:
    """Equal values, dtypes and shapes; NaN equals NaN."""
    if isinstance(expected, str):
        assert found == expected
        return
    assert isinstance(found, np.ndarray | np.generic), type(found)
    expected = np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


def same_item(found, expected) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        same(found[name], value)


def same_batch(found, items, ragged) -> None:
    """A batch is its items: stacked, or joined with offsets where they are ragged."""
    if items:
        assert list(found) == list(items[0])
    for name, value in found.items():
        parts = [item[name] for item in items]
        if name in ragged:
            assert isinstance(value, mr.Ragged)
            assert value.offsets.tolist() == np.cumsum([0, *map(len, parts)]).tolist()
            if parts:
                same(value.values, np.concatenate(parts))
        elif parts and isinstance(parts[0], str):
            assert value.dtype == object
            assert value.tolist() == parts
        elif parts:
            same(value, np.stack(parts))
            assert value.flags.c_contiguous


def empty_batch(view, ragged) -> None:
    """No samples are a batch too, of the dtypes and shapes that others have."""
    found = view[[]]
    assert list(found) == [field.name for field in view.fields]
    for field in view.fields:
        value = found[field.name]
        if field.name in ragged:
            assert value.offsets.tolist() == [0]
            assert (value.values.dtype, value.values.shape) == (field.dtype, (0, *field.shape[1:]))
        else:
            assert (value.dtype, value.shape) == (field.dtype, (0, *field.shape))


def check(view, items, spans=None, *, ragged=(), seed=0) -> None:
    """A view is exactly these items: one by one, from the end, in batches, by slices; nothing outside."""
    n = len(items)
    assert len(view) == n
    if spans is not None:
        found = view.spans(np.arange(n))
        assert found.offsets is None
        assert list(zip(found.starts.tolist(), found.stops.tolist(), strict=True)) == spans
        assert found.starts.dtype == found.stops.dtype == np.int64
        assert len(view.spans([])) == 0
    for i in range(n):
        same_item(view[i], items[i])
    for key in (slice(None), slice(None, None, -1), slice(1, -1, 2), slice(n, None), slice(-3, None)):
        same_batch(view[key], items[key], ragged)
    empty_batch(view, ragged)
    if n:
        same_item(view[-1], items[-1])
        same_item(view[np.int64(-n)], items[0])
        for count in (1, 5, 40):
            chosen = np.random.default_rng(seed).integers(-n, n, count)
            same_batch(view[chosen], [items[i] for i in chosen], ragged)
            same_batch(view[chosen.tolist()], [items[i] for i in chosen], ragged)
    # Neither is a mask or a fraction rounded to some sample.
    for wrong in (n, -n - 1, [0, n], [-n - 1], np.array([(1 << 64) - 1], np.uint64), [True], [0.5], [[0]], "0", None):
        with pytest.raises(IndexError):
            view[wrong]
        if spans is not None and not isinstance(wrong, int):
            with pytest.raises(IndexError):
                view.spans(wrong)


@pytest.fixture(scope="session")
def check_view():
    return check
