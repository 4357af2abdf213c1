"""The adapters for torch's DataLoader."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import millrace as mr
import millrace.torch


@pytest.fixture
def windows() -> mr.Windows:
    values = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    return mr.Windows(mr.from_arrays({"values": values}, offsets=[0, 100, 180, 300]), lookback=8, horizon=2)


@pytest.fixture
def events() -> mr.Records:
    hits = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    columns = {"hits": hits, "label": np.arange(10), "key": [f"k{i}" for i in range(10)]}
    return mr.Records(mr.from_arrays(columns, offsets=np.arange(0, 51, 5)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_dataloader_gets_whole_batches(windows: mr.Windows, workers: int) -> None:
    dataset = millrace.torch.Dataset(windows)
    loader = DataLoader(
        dataset, batch_size=7, num_workers=workers, multiprocessing_context="spawn" if workers else None
    )
    seen = 0
    for batch in loader:
        rows = len(batch["x"])
        expected = windows[np.arange(seen, seen + rows)]
        assert isinstance(batch["x"], torch.Tensor)
        assert torch.equal(batch["x"], torch.from_numpy(expected["x"]))
        assert torch.equal(batch["y"], torch.from_numpy(expected["y"]))
        seen += rows
    assert seen == len(windows)


def test_a_batch_is_gathered_in_one_call_and_not_copied_again(windows: mr.Windows, monkeypatch) -> None:
    dataset = millrace.torch.Dataset(windows)
    items = dataset.__getitems__([3, 1, 2])
    batch = millrace.torch.collate_items(items)
    assert items[0].batch is not None
    assert batch["x"].data_ptr() == items[0].batch["x"].ctypes.data
    calls = []
    original = type(windows).located
    monkeypatch.setattr(
        type(windows), "located", lambda self, samples: calls.append(len(samples)) or original(self, samples)
    )
    next(iter(DataLoader(dataset, batch_size=16)))
    assert calls == [16]


def test_items_in_another_order_are_stacked(windows: mr.Windows) -> None:
    dataset = millrace.torch.Dataset(windows)
    first, second = dataset.__getitems__([3, 1])
    batch = millrace.torch.collate_items([second, first])
    assert torch.equal(batch["x"][0], torch.from_numpy(windows[1]["x"]))
    single = millrace.torch.collate_items([dataset[5], dataset[6]])
    assert torch.equal(single["y"][1], torch.from_numpy(windows[6]["y"]))


def test_ragged_and_text_fields_come_through(events: mr.Records) -> None:
    batch = next(iter(DataLoader(millrace.torch.Dataset(events), batch_size=4)))
    assert isinstance(batch["hits"], mr.Ragged)
    assert torch.equal(batch["hits"][1], torch.from_numpy(events[1]["hits"]))
    assert list(batch["key"]) == ["k0", "k1", "k2", "k3"]


def test_items_of_different_lengths_are_joined(events: mr.Records) -> None:
    lengths = mr.Records(mr.from_arrays({"hits": np.arange(6.0)}, offsets=[0, 4, 6]))
    stacked = millrace.torch.collate_items([millrace.torch.Dataset(lengths)[k] for k in (1, 0)])
    assert stacked["hits"].offsets.tolist() == [0, 2, 6]
    assert stacked["hits"].values.tolist() == [4.0, 5.0, 0.0, 1.0, 2.0, 3.0]


def test_a_feed_in_a_dataloader_is_the_feed(windows: mr.Windows) -> None:
    def samples(batches) -> list[list[int]]:
        return [batch.samples.tolist() for batch in batches]

    expected = samples(mr.Feed(windows, batch=16, seed=7, epochs=1))
    feed = mr.Feed(windows, batch=16, seed=7, epochs=1)
    loader = DataLoader(millrace.torch.IterableDataset(feed), batch_size=None)
    assert len(loader) == len(feed)
    assert samples(loader) == expected


def test_workers_are_refused_with_the_reason(windows: mr.Windows) -> None:
    loader = DataLoader(millrace.torch.IterableDataset(mr.Feed(windows, batch=16)), batch_size=None, num_workers=1)
    with pytest.raises(Exception, match="every worker would deliver every batch"):
        next(iter(loader))
