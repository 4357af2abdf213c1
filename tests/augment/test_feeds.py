"""Augmented feeds: any batch, world and resume give the samples of the uninterrupted run."""

import os

import numpy as np
import pytest

import millrace as mr

aug = mr.augment
STEPS = aug.Compose([aug.RandomCrop(1), aug.RandomFlip(), aug.ColorJitter(0.2), aug.Mixup(group=4)])


def add_one(batch, rng):
    """A user's own function among the steps: it sees a batch."""
    return {**batch, "sum": batch.image.sum(axis=(1, 2, 3)) + rng.uniform()}


@pytest.fixture(scope="module")
def store():
    rng = np.random.default_rng(0)
    columns = {"row": np.arange(26), "image": rng.random((26, 3, 6, 6)).astype(np.float32), "label": np.arange(26)}
    return mr.from_arrays(columns, offsets=np.arange(27), per={"row": "row", "image": "record", "label": "record"})


def feed_of(store, **options):
    transform = aug.Compose([STEPS, add_one])
    return mr.Feed(
        mr.Records(store), **{"batch": 8, "seed": 3, "device": "numpy", "epochs": 2, "transform": transform, **options}
    )


def samples_of(feed, most=100):
    found = {}
    with feed:
        for _, batch in zip(range(most), feed, strict=False):
            for k in np.flatnonzero(batch.valid):
                found[int(batch.positions[k])] = {name: value[k].tobytes() for name, value in dict.items(batch)}
    return found


def test_mixed_samples_are_the_same_in_every_world_and_after_a_resume(store):
    expected = samples_of(feed_of(store))
    assert len(expected) == 52
    assert samples_of(feed_of(store, batch=16, workers=2)) == expected
    if hasattr(os, "memfd_create"):  # hidden in `make hidden`
        assert samples_of(feed_of(store, processes=True, workers=2)) == expected
    ranks = [feed_of(store, rank=rank, world=2) for rank in range(2)]
    first = samples_of(ranks[0], 3) | samples_of(ranks[1], 3)
    rest = feed_of(store, batch=4)
    rest.load_state_dict(ranks[0].state_dict())
    assert len(first) == 24
    assert first | samples_of(rest) == expected


def test_the_same_steps_on_tensors_are_those_of_the_feed(store):
    with feed_of(store, transform=None, device="cpu") as plain, feed_of(store, transform=STEPS) as augmented:
        for batch, expected in zip(plain, augmented, strict=True):
            found = aug.on_device(batch, STEPS, seed=3)
            assert np.abs(found.image.numpy() - expected.image).max() < 1e-5
            assert found.label_partner.tolist() == expected.label_partner.tolist()
