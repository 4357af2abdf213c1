"""A batch holds what the view says of its samples, for every kind of view, rank, order and device."""

import numpy as np
import pytest

import millrace as mr
from millrace.feed.make.plan import PlanMake
from millrace.testing import tiny_records, tiny_series, tiny_text


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contents")
    text, series, records = tiny_text(folder / "text"), tiny_series(folder / "series"), tiny_records(folder / "records")
    blocks = mr.Blocks(text.split("train"), length=7, stride=3)
    windows = mr.Windows(series.split("train"), lookback=6, horizon=2, target=["close"])
    return {
        "blocks": blocks,
        "windows": windows,
        "records": mr.Records(records.split("train")),
        "padded": mr.Records(records, columns=["hits", "label", "class"], pad=4, fill={"hits": -1.5}),
        "subset": mr.Subset(windows, np.arange(len(windows)) % 3 == 1),
        "concat": mr.Concat([blocks, mr.Blocks(text.split("val"), length=7)]),
        "ragged concat": mr.Concat([mr.Records(records.split(name)) for name in ("val", "train")]),
    }


KINDS = ["blocks", "windows", "records", "padded", "subset", "concat", "ragged concat"]


def same(batch, rng):
    return batch


def lists(value):
    if isinstance(value, mr.Ragged):
        return lists(value.values), value.offsets.tolist()
    return np.asarray(value).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", [None, same])
@pytest.mark.parametrize("world", [1, 3])
def test_every_batch_is_the_view_at_its_samples(views, kind, transform, world):
    """Padding rows too: they are the first sample of the global batch."""
    view, order = views[kind], mr.BlockShuffled(len(views[kind]), block=4, window=3, seed=1)
    options = {"batch": 7, "order": order, "epochs": 2, "transform": transform, "device": "numpy"}
    feeds = [mr.Feed(view, rank=rank, world=world, **options) for rank in range(world)]
    for batches in zip(*feeds, strict=True):
        for got in batches:
            expected = view[np.where(got.valid, got.samples, batches[0].samples[0])]
            assert list(got) == list(expected)
            for name, value in expected.items():
                assert lists(got[name]) == lists(value)
                assert getattr(got[name], "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_hold_the_same_as_arrays(views, kind):
    import torch

    options = {"batch": 5, "epochs": 1, "seed": 3}
    arrays = mr.Feed(views[kind], device="numpy", **options)
    tensors = mr.Feed(views[kind], device="cpu", **options)
    for expected, got in zip(arrays, tensors, strict=True):
        for name, value in expected.items():
            if isinstance(value, np.ndarray) and value.dtype == object:
                assert got[name].tolist() == value.tolist()
                continue
            tensor, array = (got[name].values, value.values) if isinstance(value, mr.Ragged) else (got[name], value)
            assert isinstance(tensor, torch.Tensor)
            assert torch.equal(tensor, torch.from_numpy(array.copy()))


@pytest.mark.parametrize("order", [mr.Sequential(30), mr.Shuffled(30, seed=9), mr.BlockShuffled(30, block=4, window=2)])
def test_the_order_is_the_one_given(order):
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(31)}), length=1)
    got = np.concatenate(
        [batch.x[batch.valid, 0] for batch in mr.Feed(view, batch=8, order=order, epochs=2, device="numpy")]
    )
    assert np.array_equal(got, order.samples(np.arange(60)))


def test_a_view_may_have_an_order_of_its_own():
    class Backwards(mr.Blocks):
        def default_order(self, seed):
            self.asked = seed
            return mr.Sequential(len(self))

    view = Backwards(mr.from_arrays({"tokens": np.arange(31)}), length=1)
    feed = mr.Feed(view, batch=30, seed=5, epochs=1, device="numpy")
    assert next(iter(feed)).samples.tolist() == list(range(30))
    assert view.asked == 5


def test_the_default_order_is_shuffled_by_the_seed():
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(31)}), length=1)
    for seed in (0, 7):
        (batch,) = mr.Feed(view, batch=30, seed=seed, epochs=1, device="numpy")
        assert np.array_equal(batch.samples, mr.Shuffled(30, seed=seed).samples(np.arange(30)))


def test_plans_of_batches_long_made_are_dropped():
    """Whatever the order in which threads come to them; one plan may be hundreds of megabytes."""
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(31)}), length=1)
    feed = mr.Feed(view, batch=128, device="numpy")
    line = feed.line(0, None)
    for transform, most in ((None, 1), (same, 3)):
        maker = PlanMake(line, slots=2, in_threads=transform is not None)
        size = line.plan_size()
        for number in (0, 1, 0, 2, 1, 4, 3, 2, 5, 6, 4, 7):
            plan = maker._plan(number * size)
            assert plan.first == number * size
            assert len(maker._plans) <= most or number < max(maker._plans)
        maker._plan(8 * size)
        assert len(maker._plans) <= 2
