"""Shards that ask for it hear which files each batch needs: in order, once, and before its turn."""

import numpy as np
import pytest

import millrace as mr
from millrace.feed.foresight import Foresight
from millrace.store.reader import DiskShards
from millrace.testing import tiny_records, tiny_series, tiny_text

LOOKAHEAD = 3


class FarShards(DiskShards):
    """A tier that is far away: whoever asks for a column that was not named has come too early."""

    lookahead = LOOKAHEAD

    def expect(self, files):
        self.named.append(set(files))

    def array(self, shard, file, *, random=False):
        is_offsets = self.layout.files[file].axis is not None  # which are read when a view is made
        assert is_offsets or any((shard, file) in files for files in self.named), (shard, file)
        return super().array(shard, file, random=random)


def far(store):
    store._shards.__class__, store._shards.named = FarShards, []
    return store


def windows(folder, **options):
    return mr.Windows(far(tiny_series(folder)), lookback=5, horizon=2, **options)


VIEWS = {
    "blocks": lambda folder: mr.Blocks(far(tiny_text(folder)).split("train"), length=8),
    "windows": lambda folder: windows(folder, include=["time"]),
    "subset": lambda folder: mr.Subset(windows(folder), np.arange(60)[::-2]),
    "records": lambda folder: mr.Records(far(tiny_records(folder)).split("train")),
}


def needed(view, samples):
    """The oracle: the files of samples, row by row."""
    files = set()
    for sample in samples.tolist():
        for field in view.fields:
            column = view.store.columns[field.column]
            stored = getattr(column, "codes", getattr(column, "raw", column))
            if field.axis is None:
                record = int(view.records([sample])[0])
                rows = range(*view.store.axis_offsets(field.column)[record : record + 2]) if field.is_text else [record]
            else:
                spans = view.spans([sample], field.axis)
                rows = [row for span in zip(spans.starts, spans.stops, strict=True) for row in range(*span)]
            shards = {int(np.searchsorted(stored.starts, row, side="right")) - 1 for row in rows}
            files |= {(int(stored._ids[k]), view.store.layout.file_of[field.column]) for k in shards}
    return files


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("options", [{}, {"rank": 1, "world": 3}, {"transform": lambda batch, rng: batch}])
def test_every_batch_is_named_once_and_before_its_turn(tmp_path, kind, options):
    view = VIEWS[kind](tmp_path / "store")
    named = view.store.root._shards.named
    expected, heard = [], []
    with mr.Feed(view, batch=7, seed=3, device="numpy", epochs=2, depth=2, **options) as feed:
        for batch in feed:
            heard.append(len(named))
            expected.append((needed(view, batch.samples[batch.valid]), bool(batch.valid.all())))
    assert len(named) == len(expected)
    for own, (files, is_full) in zip(named, expected, strict=True):
        assert files == own if is_full else files <= own  # padding reads the first sample of the whole batch
    assert all(k < count <= min(k + 1 + LOOKAHEAD, len(named)) for k, count in enumerate(heard))


def test_each_store_of_a_concat_hears_of_its_own_files(tmp_path):
    parts = [windows(tmp_path / name) for name in "ab"]
    view = mr.Concat(parts)
    expected = [[], []]
    with mr.Feed(view, batch=4, seed=1, device="numpy", epochs=1) as feed:
        for batch in feed:
            views, inside = view.parts(batch.samples[batch.valid])
            for k in np.unique(views):
                expected[k].append(needed(parts[k], inside[views == k]))
    assert [part.store._shards.named for part in parts] == expected


def test_a_resumed_feed_names_what_comes_after_its_position(tmp_path):
    view = windows(tmp_path / "store")
    with mr.Feed(view, batch=5, seed=2, device="numpy") as feed:
        batches = iter(feed)
        for _ in range(4):
            next(batches)
        state = feed.state_dict()
        expected = [needed(view, next(batches).samples) for _ in range(3)]
    named = view.store._shards.named
    named.clear()
    feed = mr.Feed(view, batch=5, seed=2, device="numpy")
    feed.load_state_dict(state)
    with feed:
        next(iter(feed))
    assert named[:3] == expected


def test_local_shards_hear_nothing(tmp_path):
    with mr.Feed(mr.Windows(tiny_series(tmp_path / "store"), lookback=5, horizon=2), batch=4, device="numpy") as feed:
        assert Foresight.of(iter(feed).line) is None
