"""From a batch back to its rows: what ``explain`` says is what the loop got and what lies in the files."""

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.testing import tiny_records, tiny_series, tiny_text


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explain")
    return {
        "text": tiny_text(folder / "text"),
        "series": tiny_series(folder / "series"),
        "records": tiny_records(folder / "records"),
    }


def views_of(stores):
    text, series, records = (stores[name] for name in ("text", "series", "records"))
    blocks = mr.Blocks(text.split("train"), length=7, stride=5)
    return {
        "blocks": blocks,
        "windows": mr.Windows(series, lookback=5, horizon=2, lead=1),
        "val windows": mr.Windows(series.split("val"), lookback=5, horizon=2, stride=2),
        "records": mr.Records(records.split("train")),
        "all records": mr.Records(records),
        "subset": mr.Subset(blocks, np.arange(len(blocks))[::-3]),
        "concat": mr.Concat([blocks, mr.Blocks(text.split("val"), length=7), mr.Subset(blocks, [3, 3, 1])]),
    }


NAMES = ["blocks", "windows", "val windows", "records", "all records", "subset", "concat"]
COLUMN = {"text": "tokens", "series": "values", "records": "hits"}
FILES = {"tokens": ("tokens.u16", "<u2"), "values": ("values.f32", "<f4"), "hits": ("hits.f32", "<f4")}


@pytest.mark.parametrize("name", NAMES)
def test_positions_and_samples_are_those_the_loop_got(stores, name):
    view = views_of(stores)[name]
    feed = mr.Feed(view, batch=5, epochs=2, seed=3, device="numpy")
    for number, got in enumerate(feed):
        found = feed.explain(number)
        assert found.batch == number
        assert found.positions.tolist() == got.positions[got.valid].tolist()
        assert found.samples.tolist() == got.samples[got.valid].tolist()
        assert found.epochs.tolist() == (found.positions // len(view)).tolist()
        assert [row["position"] for row in found.rows] == found.positions.tolist()
        assert [row["sample"] for row in found.rows] == found.samples.tolist()
        assert [row["epoch"] for row in found.rows] == found.epochs.tolist()
        assert [row["shard"] for row in found.rows] == found.shards


def leaf(view, sample):
    """The view without others in it that a sample is of, and its number there: one at a time, by counting."""
    if isinstance(view, mr.Subset):
        return leaf(view.view, int(view.ids[sample]))
    if isinstance(view, mr.Concat):
        for part in view.views:
            if sample < len(part):
                return leaf(part, sample)
            sample -= len(part)
    return view, sample


def record_of(store, row):
    """The record a row lies in, by looking at one after the other."""
    ends = store.offsets[1:].tolist()
    return next((k for k, end in enumerate(ends) if row < end), len(ends) - 1)


@pytest.mark.parametrize("name", NAMES)
def test_rows_records_and_columns_are_those_of_the_view(stores, name):
    view = views_of(stores)[name]
    seen = 0
    feed = mr.Feed(view, batch=9, epochs=1, seed=1, device="numpy")
    for number in range(len(feed)):
        for row in feed.explain(number).rows:
            of, inside = leaf(view, row["sample"])
            spans = of.spans(np.array([inside]))
            assert row["rows"] == (int(spans.starts[0]), int(spans.stops[0]))
            record = inside if isinstance(of, mr.Records) else record_of(of.store, row["rows"][0])
            assert row["record"] == record
            assert row["store"] == of.store.path
            assert row["split"] == of.store.split_name
            for column, value in row["columns"].items():
                assert value == np.asarray(of.store.columns[column][record]).tolist()
            seen += 1
    assert seen == len(view)


@pytest.mark.parametrize("name", NAMES)
def test_the_named_shard_holds_the_rows(stores, name):
    """Read from the file itself, without the store."""
    view = views_of(stores)[name]
    feed = mr.Feed(view, batch=len(view), epochs=1, seed=2, device="numpy")
    (batch,) = feed
    for place, row in enumerate(feed.explain(0).rows):
        of, _ = leaf(view, row["sample"])
        column = COLUMN[of.store.kind]
        file, dtype = FILES[column]
        shape = of.store.layout.columns[column].shape
        delivered = batch["hits" if column == "hits" else "x"][place]
        pieces = []
        for piece in row["pieces"]:
            rows = np.fromfile(Path(row["store"]) / "shards" / piece["shard"] / file, dtype).reshape(-1, *shape)
            first, last = piece["shard_rows"]
            assert 0 <= first <= last <= len(rows)
            assert piece["columns"] == {
                name: np.asarray(of.store.columns[name][[piece["record"]]]).tolist()[0] for name in piece["columns"]
            }
            pieces.append(rows[first:last])
        joined = np.concatenate(pieces)
        assert len(joined) >= len(delivered)  # a block has its y, a window its horizon, behind its x
        assert np.array_equal(joined[: len(delivered)], delivered)


def test_empty_records_are_in_the_shard_they_were_written_to(tmp_path):
    with mr.StoreWriter(
        tmp_path / "s", columns={"x": mr.Column("int64"), "k": mr.Column("int64", per="record")}, shard_bytes=1
    ) as writer:
        for k, rows in enumerate([0, 2, 0, 0, 3, 0]):
            writer.append({"x": np.arange(rows), "k": k})
    store = mr.open_store(tmp_path / "s")
    assert store.num_shards == 6
    rows = mr.Feed(mr.Records(store), batch=6, order=mr.Sequential(6), epochs=1, device="numpy").explain(0).rows
    assert [row["shard"] for row in rows] == [f"train-{k:05d}" for k in range(6)]
    assert [row["rows"] for row in rows] == [(0, 0), (0, 2), (2, 2), (2, 2), (2, 5), (5, 5)]
    assert [row["shard_rows"] for row in rows] == [(0, 0), (0, 2), (0, 0), (0, 0), (0, 3), (0, 0)]


def test_records_without_any_rows_are_explained():
    store = mr.from_arrays({"x": np.zeros(0), "label": [3, 4]}, offsets=[0, 0, 0])
    rows = mr.Feed(mr.Records(store), batch=2, order=mr.Sequential(2), device="numpy").explain(0).rows
    assert [(row["shard"], row["rows"], row["columns"]["label"]) for row in rows] == [
        ("memory", (0, 0), 3),
        ("memory", (0, 0), 4),
    ]


def test_names_and_sources_are_told(stores):
    rows = mr.Feed(mr.Windows(stores["series"], lookback=4, horizon=1), batch=50, device="numpy").explain(0).rows
    assert {row["columns"]["name"] for row in rows} == {"ACME", "Bäcker", "sensor 7", "東京"}
    rows = mr.Feed(mr.Blocks(stores["text"].split("val"), length=8), batch=9, device="numpy").explain(0).rows
    assert {row["columns"]["source"] for row in rows} <= {"books/a.txt", "books/b.txt", "web.jsonl"}
    json.dumps(rows)  # as the command line prints them


def test_the_part_of_a_concat_is_told(stores):
    view = views_of(stores)["concat"]
    rows = mr.Feed(view, batch=len(view), order=mr.Sequential(len(view)), device="numpy").explain(0).rows
    sizes = [len(part) for part in view.views]
    assert [row["part"] for row in rows] == np.repeat(np.arange(3), sizes).tolist()


@pytest.mark.parametrize("world", [1, 3])
def test_it_tells_of_the_global_batch_since_construction_or_restore(stores, world):
    view = views_of(stores)["blocks"]
    feeds = [mr.Feed(view, batch=6, rank=rank, world=world, device="numpy") for rank in range(world)]
    for feed in feeds:
        feed.load_state_dict(feed.state_dict() | {"position": 100})
    shares = [next(iter(feed)) for feed in feeds]
    assert [feed.explain(0).samples.tolist() for feed in feeds] == [
        np.concatenate([share.samples for share in shares]).tolist()
    ] * world
    assert feeds[0].explain(2).positions.tolist() == list(range(112, 118))


def test_steps_of_is_the_inverse(stores):
    view = views_of(stores)["blocks"]
    feed = mr.Feed(view, batch=7, seed=5, device="numpy")
    feed.load_state_dict(feed.state_dict() | {"position": 2 * len(view) + 3})
    for number in (0, 1, 5):
        found = feed.explain(number)
        for epoch in set(found.epochs.tolist()):
            mine = found.samples[found.epochs == epoch]
            assert feed.steps_of(mine, epoch).tolist() == [number] * len(mine)
    before = feed.order.samples(np.arange(2 * len(view), 2 * len(view) + 3))
    assert feed.steps_of(before).tolist() == [-1, -1, -1]  # delivered before the restore


def test_a_batch_outside_the_feed_is_refused(stores):
    feed = mr.Feed(views_of(stores)["blocks"], batch=4, epochs=1, device="numpy")
    for number in (-1, len(feed)):
        with pytest.raises(mr.ConfigError, match=f"batch {number} is outside the feed"):
            feed.explain(number)
    last = feed.explain(len(feed) - 1)
    assert last.positions[-1] == len(feed.view) - 1


def test_ten_thousand_million_samples_are_explained_without_memory(tmp_path):
    path = tmp_path / "tokens.bin"
    path.touch()
    os.truncate(path, 10**10 + 8)
    view = mr.Blocks(mr.open_store(path, dtype="uint8"), length=8, stride=1)
    feed = mr.Feed(view, batch=32, seed=7, device="numpy")
    feed.explain(0)
    tracemalloc.start()
    found = feed.explain(10**9)  # in the fourth epoch
    steps = feed.steps_of(found.samples, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000
    assert steps.tolist() == [10**9] * 32
    assert found.positions[0] == 32 * 10**9
    assert all(row["rows"] == (row["sample"], row["sample"] + 9) == row["shard_rows"] for row in found.rows)


def test_batches_are_counted_through_the_passes_of_by_epoch(stores):
    view = mr.Subset(views_of(stores)["blocks"], range(10))
    feed = mr.Feed(view, batch=4, seed=2, device="numpy")
    loader = feed.by_epoch()
    seen, states = [], [feed.state_at(0)]
    for _ in range(3):
        for batch in loader:
            seen.append(batch)
            states.append(feed.state_dict())
    for number, batch in enumerate(seen):
        found = feed.explain(number)
        assert found.samples.tolist() == batch.samples[batch.valid].tolist()
        assert feed.state_at(number + 1) == states[number + 1]
        assert feed.steps_of(found.samples, epoch=number // 3).tolist() == [number] * len(found.samples)
