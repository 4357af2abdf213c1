"""A feed in the loaders of torch and torchdata: its dataset has its state; what would stack or repeat batches is refused."""

import functools

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import millrace as mr
import millrace.torch


def loader_of(feed):
    return StatefulDataLoader(millrace.torch.IterableDataset(feed), batch_size=None)


@pytest.mark.parametrize("last", ["pad", "drop"])
@pytest.mark.parametrize("stop", range(1, 10))
def test_a_stateful_loader_resumes_within_and_between_passes(feed_of, stop, last):
    feed_of = functools.partial(feed_of, last=last)

    def run(loader, start, count):
        """The samples of steps [start, count) and the state after the last."""
        seen = []
        while start + len(seen) < count:
            for batch in loader:
                seen.append(batch.samples.tolist())
                if start + len(seen) == count:
                    return seen, loader.state_dict()
        return seen, loader.state_dict()

    whole, _ = run(loader_of(feed_of().by_epoch()), 0, 11)
    first, state = run(loader_of(feed_of().by_epoch()), 0, stop)
    loader = loader_of(feed_of().by_epoch())
    loader.load_state_dict(state)
    second, state = run(loader, stop, 10)
    loader = loader_of(feed_of().by_epoch())
    loader.load_state_dict(state)
    third, _ = run(loader, 10, 11)
    assert first + second + third == whole


def test_a_stateful_loader_of_an_endless_feed(feed_of):
    loader = loader_of(feed_of())
    batches = iter(loader)
    whole = [next(batches).samples.tolist() for _ in range(9)]
    again = loader_of(feed_of())
    batches = iter(again)
    for _ in range(4):
        next(batches)
    third = loader_of(feed_of())
    third.load_state_dict(again.state_dict())
    batches = iter(third)
    assert [next(batches).samples.tolist() for _ in range(5)] == whole[4:]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_batches_are_not_stacked(feed_of, kind, batch_size):
    """By torch's collate or any other: a forgotten batch_size=None is eight times the batch."""
    for options in ({}, {"collate_fn": list}):
        loader = kind(millrace.torch.IterableDataset(feed_of(epochs=1)), batch_size=batch_size, **options)
        with pytest.raises(
            mr.ConfigError, match="would stack whole batches of the feed into larger ones; give it batch_size=None"
        ):
            next(iter(loader))


def test_a_loader_passes_again_where_passes_do_and_is_refused_where_the_feed_has_ended(feed_of):
    loader = DataLoader(millrace.torch.IterableDataset(feed_of().by_epoch()), batch_size=None)
    assert [len(list(loader)) for _ in range(3)] == [4, 4, 4]
    loader = DataLoader(millrace.torch.IterableDataset(feed_of(epochs=1)), batch_size=None)
    assert len(list(loader)) == len(loader) == 4
    with pytest.raises(mr.ConfigError, match="delivered all of its epochs=1"):
        iter(loader).__next__()


class Passing(torch.utils.data.IterableDataset):
    """A user's own dataset, which passes on what it reads."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        yield from self.loader


@pytest.mark.parametrize(
    ("kind", "made"),
    [(DataLoader, "passes"), (StatefulDataLoader, "feed"), (DataLoader, "repeat"), (DataLoader, "ranked")],
)
def test_workers_of_a_users_own_dataset_are_refused(feed_of, kind, made):
    """Each of them would deliver every batch. One worker delivers each once."""
    feed = feed_of(epochs=1, **({"rank": 0, "world": 1} if made == "ranked" else {}))
    loader = {"passes": feed.by_epoch, "repeat": lambda: feed.by_epoch(repeat=True)}.get(made, lambda: feed)()
    message = r"num_workers=2: .*set num_workers=0 and loop over millrace\.torch\.IterableDataset\(feed\)"
    with pytest.raises(mr.ConfigError, match=message):
        list(kind(Passing(loader), batch_size=None, num_workers=2))
    if made == "passes":
        one = DataLoader(Passing(loader), batch_size=None, num_workers=1)
        assert sorted(sample for batch in one for sample in batch.samples[batch.valid].tolist()) == list(range(10))


def test_pinning_keeps_the_marks(feed_of, monkeypatch):
    """As a DataLoader pins: by the batch's own method, which it looks for."""
    from torch.utils.data._utils.pin_memory import pin_memory

    monkeypatch.setattr("torch.Tensor.pin_memory", lambda tensor: tensor.clone())
    batch = next(iter(feed_of()))
    pinned = pin_memory(batch)
    assert type(pinned) is mr.Batch
    assert pinned.samples.tolist() == batch.samples.tolist()
    assert pinned["x"].data_ptr() != batch["x"].data_ptr()
