"""What the loop holds is never overwritten; what nobody holds is used again."""

import itertools

import numpy as np
import pytest

import millrace as mr
from millrace.feed.make import slots as ring
from millrace.native import core
from millrace.testing import tiny_records

N = 500


def dense_view():
    values = np.random.default_rng(0).normal(size=(N + 4, 3)).astype(np.float32)
    return mr.Windows(mr.from_arrays({"values": values}), lookback=4, horizon=1)


def ragged_view():
    lengths = np.random.default_rng(1).integers(0, 30, N)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return mr.Records(mr.from_arrays({"hits": np.arange(offsets[-1]), "label": np.arange(N)}, offsets))


VIEWS = {
    "dense": dense_view(),
    "ragged": ragged_view(),
    "concat": mr.Concat([dense_view(), dense_view()]),
    "widened": mr.Blocks(mr.from_arrays({"tokens": np.arange(N, dtype=np.uint16)}), length=4, stride=1),
}


def same(batch, rng):
    return batch


def in_place(batch, rng):
    """Augments in the slot's own memory."""
    for value in batch.values():
        (value.values if isinstance(value, mr.Ragged) else value)[...] += 1
    return batch


HOWS = {
    "alone": {},
    "threads": {"transform": same, "workers": 3, "depth": 5},
    "in place": {"transform": in_place, "workers": 2, "depth": 2},
}


def feed_of(view, **options):
    return mr.Feed(VIEWS[view], **{"batch": 8, "seed": 1, "device": "numpy", **options})


def bytes_of(value):
    if isinstance(value, mr.Ragged):
        return bytes_of(value.values), bytes_of(value.offsets)
    return np.array(value).tobytes()


def fields(batch):
    return dict(batch)


def views_only(batch):
    """The batch itself is dropped."""
    found = {}
    for name, value in batch.items():
        array = value.values if isinstance(value, mr.Ragged) else value
        found[name] = array.T[..., 1:]
    return found


def parts(batch):
    return {f"{name} {k}": value for k, part in enumerate(batch.micro(3)) for name, value in part.items()}


def buffers(batch):
    return {name: memoryview(value) for name, value in batch.items() if isinstance(value, np.ndarray)}


def plain_bytes_view(batch):
    """A new array object over the same memory, by way of the buffer protocol."""
    return {
        name: np.frombuffer(value.reshape(-1), np.uint8) for name, value in batch.items() if hasattr(value, "reshape")
    }


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("hold", [fields, views_only, parts, buffers, plain_bytes_view])
def test_what_is_held_stays_as_it_was(view, how, hold):
    """Fifty held, many more delivered meanwhile; some are let go again, so that slots come and go."""
    held = []
    for number, batch in enumerate(itertools.islice(feed_of(view, **HOWS[how]), 150)):
        if number % 3 == 0:
            kept = hold(batch)
            held.append((kept, {name: bytes_of(value) for name, value in kept.items()}))
        if number % 5 == 0 and len(held) > 40:
            del held[number % 40]
    assert len(held) > 30
    for kept, expected in held:
        assert {name: bytes_of(value) for name, value in kept.items()} == expected


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("how", HOWS)
def test_a_list_of_all_batches_is_right(view, how):
    expected = {}
    for batch in feed_of(view, epochs=1, **HOWS[how]):
        for row in np.flatnonzero(batch.valid):
            expected[int(batch.positions[row])] = {name: bytes_of(value[row]) for name, value in batch.items()}
    found = {}
    for batch in list(feed_of(view, epochs=1, **HOWS[how])):
        for row in np.flatnonzero(batch.valid):
            found[int(batch.positions[row])] = {name: bytes_of(value[row]) for name, value in batch.items()}
    assert found == expected
    assert len(found) == len(VIEWS[view])


@pytest.mark.parametrize("how", HOWS)
def test_batches_outlive_their_feed(how):
    feed = feed_of("dense", **HOWS[how])
    batch = next(iter(feed))
    expected = bytes_of(batch.x)
    feed.close()
    del feed
    others = list(itertools.islice(feed_of("dense", **HOWS[how]), 30))
    assert bytes_of(batch.x) == expected
    assert len(others) == 30


# torch holds numpy's memory in its own ways.


@pytest.mark.parametrize("how", HOWS)
def test_tensors_stay_as_they_were(how):
    import torch

    held = []
    for batch in itertools.islice(feed_of("dense", **HOWS[how]), 60):
        tensor = torch.from_numpy(batch.x)
        held.append((tensor[2:4], tensor[2:4].clone()))
        del tensor, batch
    for batch in itertools.islice(feed_of("dense", device="cpu", **HOWS[how]), 60):
        held += [(batch.x.permute(2, 0, 1), batch.x.permute(2, 0, 1).clone()), (batch.y.detach(), batch.y.clone())]
        del batch
    assert all(torch.equal(kept, copy) for kept, copy in held)


@pytest.mark.parametrize("how", ["alone", "threads"])
def test_tensors_saved_for_backward_stay_as_they_were(how):
    import torch

    weight = torch.ones(4, 3, requires_grad=True)
    losses, expected = [], torch.zeros(4, 3)
    for number, batch in enumerate(itertools.islice(feed_of("dense", device="cpu", **HOWS[how]), 100)):
        if number % 2 == 0:
            losses.append((batch.x * weight).sum())  # the graph keeps x, and nobody else does
            expected += batch.x.clone().sum(0)
        del batch
    for loss in losses:
        loss.backward()
    assert torch.allclose(weight.grad, expected, rtol=1e-4, atol=1e-4)
    assert len(losses) == 50


# What nobody holds.


class CountedNumpy:
    """numpy as the slots see it, counting what they allocate."""

    def __init__(self):
        self.allocated = 0

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, *args):
        self.allocated += 1
        return np.empty(*args)


@pytest.fixture
def counted(monkeypatch):
    counting = CountedNumpy()
    monkeypatch.setattr(ring, "np", counting)
    return counting


PER_SLOT = 2 if core is None else 1  # numpy has a buffer per field, x and y; the core one for all


@pytest.mark.parametrize(("how", "slots"), [("alone", 2), ("threads", 7), ("in place", 4)])
def test_memory_is_used_again(counted, how, slots, way):
    """The loop holds one batch while it asks for the next: in line that takes two slots, with threads those ahead."""
    slots = 7 if how == "alone" and way == "ring" else slots
    addresses = [batch.x.ctypes.data for batch in itertools.islice(feed_of("dense", **HOWS[how]), 1000)]
    assert len(set(addresses)) <= slots
    assert len(addresses) == 1000
    assert counted.allocated <= PER_SLOT * slots


def test_a_loop_that_lets_go_first_needs_one_slot(counted, way):
    iterator = iter(feed_of("dense"))
    addresses = {next(iterator).x.ctypes.data for _ in range(100)}
    slots = 7 if way == "ring" else 1  # threads fill others meanwhile
    assert len(addresses) <= slots
    assert counted.allocated <= PER_SLOT * slots


@pytest.mark.parametrize("how", HOWS)
def test_ragged_buffers_grow_a_few_times_only(counted, how):
    for _ in itertools.islice(feed_of("ragged", **HOWS[how]), 1000):
        pass
    assert counted.allocated < 80


def test_tensors_give_their_memory_back(counted, way):
    for batch in itertools.islice(feed_of("dense", device="cpu"), 1000):
        (batch.x + 1).sum()
    assert counted.allocated <= (7 if way == "ring" else 2 * PER_SLOT)


def test_held_batches_take_new_memory_and_no_more_than_that(counted, way):
    held = list(itertools.islice(feed_of("dense"), 50))
    assert len({batch.x.ctypes.data for batch in held}) == 50
    ahead = 7 if way == "ring" else 0
    assert 50 * PER_SLOT <= counted.allocated <= 50 * PER_SLOT + ahead


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("how", ["alone", "in place"])
def test_memory_is_aligned_for_those_who_take_it_as_it_is(view, how):
    held = list(itertools.islice(feed_of(view, **HOWS[how]), 20))
    arrays = [part for batch in held for value in batch.values() for part in flat(value)]
    assert {array.ctypes.data % 64 for array in arrays if array.size} == {0}
    assert all(array.flags.writeable for array in arrays)


def flat(value):
    if isinstance(value, mr.Ragged):
        return [value.values] if core is None else [value.values, value.offsets]  # numpy's offsets are in no slot
    return [value]


def test_text_is_not_in_slots(tmp_path):
    view = mr.Records(tiny_records(tmp_path / "store").split("train"))
    got = list(mr.Feed(view, batch=3, epochs=1, device="numpy"))
    keys = [key for batch in got for key in batch.key[batch.valid]]
    samples = [sample for batch in got for sample in batch.samples[batch.valid]]
    assert keys == [view[int(sample)]["key"] for sample in samples]
