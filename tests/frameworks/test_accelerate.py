"""A feed in Accelerate: each rank reads its share, metrics leave out padding, and what would dispatch or stack is refused."""

import itertools

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import DataLoaderConfiguration, recursively_apply, send_to_device
from torch.distributed.utils import _recursive_to
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import millrace as mr
import millrace.torch
from millrace.accelerate import Loader


@pytest.fixture
def accelerator():
    # One for the process: a loader that a test before this one left in the middle would stand in it until it is collected.
    GradientState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=3)


def test_it_is_left_as_it_is_and_saved_with_the_rest(accelerator, feed_of, tmp_path):
    loader = feed_of().by_epoch()
    assert accelerator.prepare(loader) is loader
    accelerator.register_for_checkpointing(loader)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    accelerator.save_state(tmp_path)
    rest = [batch.samples.tolist() for batch in batches]
    accelerator.load_state(tmp_path)
    assert [batch.samples.tolist() for batch in loader] == rest
    assert len(rest) == 2


@pytest.mark.parametrize("last", ["pad", "drop"])
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_prepared_loader_is_saved_with_the_rest(accelerator, feed_of, tmp_path, registered, last, stop):
    """By prepare() alone, as any DataLoader is given to it; registering it too is the same."""

    def begun(accelerator):
        train, val = Loader(feed_of(last=last).by_epoch()), Loader(feed_of().by_epoch(repeat=True))
        model, optimizer = torch.nn.Linear(1, 1), torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 1e-3)
        prepared = accelerator.prepare(model, optimizer, train, val)
        assert prepared[2:] == (train, val)
        if registered:
            accelerator.register_for_checkpointing(train)
        return train, val

    train, val = begun(accelerator)
    samples = [batch.samples.tolist() for _ in range(2) for batch in train]
    train, val = begun(saved := Accelerator(cpu=True))
    batches = itertools.chain.from_iterable(itertools.repeat(train))
    assert [next(batches).samples.tolist() for _ in range(stop)] == samples[:stop]
    assert len(list(val)) == 4
    saved.save_state(tmp_path)
    train, val = begun(again := Accelerator(cpu=True))
    again.load_state(tmp_path)
    assert again.prepare(train) is train
    seen = []
    while len(seen) < len(samples) - stop:
        seen += [batch.samples.tolist() for batch in train]
    assert seen == samples[stop:]
    assert len(list(val)) == 4


def test_a_checkpoint_without_the_loader_is_no_error(accelerator, feed_of, tmp_path):
    """As those of 0.1 are, which hold no state of a loader that was only prepared."""
    accelerator.save_state(tmp_path)
    loader = accelerator.prepare(Loader(feed_of().by_epoch()))
    accelerator.load_state(tmp_path)
    assert len(list(loader)) == 4


def test_skipping_what_a_checkpoint_has_restored_is_refused(accelerator, feed_of):
    """Scripts skip after load_state(): a loader that stands there already would skip twice."""
    message = r"accelerator\.prepare\(loader\) accelerator\.load_state\(\) restores where it stands, so leave it out"
    for loader in (Loader(feed_of().by_epoch()), accelerator.prepare(Loader(feed_of()))):
        with pytest.raises(mr.ConfigError, match=message):
            next(iter(accelerator.skip_first_batches(loader, 2)))


@pytest.mark.parametrize("last", ["pad", "short"])
@pytest.mark.parametrize("repeat", [False, True])
def test_metrics_count_every_sample_once(accelerator, feed_of, last, repeat):
    loader = Loader(feed_of(last=last).by_epoch(repeat=repeat))
    for _ in range(2):
        seen = [accelerator.gather_for_metrics(batch["x"][:, 0]) for batch in loader]
        assert sorted(torch.cat(seen).tolist()) == list(range(10))
    assert not accelerator.gradient_state.in_dataloader
    assert len(loader) == 4
    assert len(loader.dataset) == 10


def test_gradients_are_applied_at_the_end_of_a_pass_too(accelerator, feed_of):
    model = torch.nn.Linear(1, 1)
    synced = []
    for _ in Loader(feed_of(last="drop").by_epoch()):
        with accelerator.accumulate(model):
            synced.append(accelerator.sync_gradients)
    assert synced == [False, False, True]
    for _ in Loader(feed_of(batch=5).by_epoch()):
        with accelerator.accumulate(model):
            synced.append(accelerator.sync_gradients)
    assert synced[3:] == [False, True]


def test_steps_on_padding_that_nobody_chose_are_warned_of_once(feed_of, warned_of_padding):
    """An evaluation takes no steps: it repeats its pass, or is without gradients."""

    def passes_of(loader):
        return lambda: [list(loader) for _ in range(2)]

    (message,) = warned_of_padding(passes_of(Loader(feed_of().by_epoch())))
    assert "Accelerate takes a step on it; give the feed last='drop'" in message
    assert len(warned_of_padding(lambda: list(Loader(feed_of(batch=6, epochs=2))))) == 1
    for loader in (feed_of(last="pad").by_epoch(), feed_of(batch=5).by_epoch(), feed_of().by_epoch(repeat=True)):
        assert warned_of_padding(passes_of(Loader(loader))) == []
    assert warned_of_padding(lambda: next(iter(Loader(feed_of())))) == []
    assert warned_of_padding(lambda: list(Loader(feed_of(epochs=3, last="drop")))) == []
    assert warned_of_padding(lambda: list(Loader(feed_of(batch=5, epochs=1)))) == []
    with torch.no_grad():
        assert warned_of_padding(lambda: list(Loader(feed_of(epochs=1)))) == []


def test_a_finite_feed_that_ends_between_epochs(accelerator, feed_of):
    seen = [accelerator.gather_for_metrics(batch["x"][:, 0]) for batch in Loader(feed_of(batch=6, epochs=2))]
    assert [len(part) for part in seen] == [6, 6, 6, 2]


def test_a_batch_that_moves_keeps_its_marks_and_its_ragged_columns(events):
    batch = next(iter(mr.Feed(events, batch=4)))
    moved = send_to_device(batch, torch.device("meta"), non_blocking=True)
    assert {moved["label"].device.type, moved["hits"].values.device.type} == {"meta"}
    rebuilt = recursively_apply(lambda tensor: tensor * 2, mr.Batch({"label": batch.label}, positions=batch.positions))
    (wrapped,) = _recursive_to((batch,), torch.device("cpu"), False)[0]  # as DistributedDataParallel does on a GPU
    for other in (moved, rebuilt, wrapped):
        assert np.array_equal(other.positions, batch.positions)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_what_would_be_dispatched_is_refused(feed_of, kind):
    """On one rank it would be read one batch ahead, on several rank 0's share would go to all."""
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=kind is StatefulDataLoader)
    )
    loader = kind(millrace.torch.IterableDataset(feed_of(epochs=1)), batch_size=None)
    message = r"sends rank 0's share to all ranks; loop over millrace\.accelerate\.Loader\(feed\.by_epoch\(\)\)"
    with pytest.raises(mr.ConfigError, match=message):
        next(iter(accelerator.prepare(loader)))


def test_a_dataset_of_the_users_own_is_seen_through(feed_of):
    class Own(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from feed_of(epochs=1)

    with pytest.raises(mr.ConfigError, match="sends rank 0's share to all ranks"):
        next(iter(Accelerator(cpu=True).prepare(DataLoader(Own(), batch_size=None))))


def test_evaluation_by_unequal_shares_is_refused(feed_of):
    loader = Loader(feed_of(batch=3, rank=0, world=2).by_epoch(repeat=True))
    with pytest.raises(mr.ConfigError, match=r"batch=3 is no multiple of the 2 ranks.*take batch=2"):
        next(iter(loader))
