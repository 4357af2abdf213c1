"""The steps: each row a function of its position alone, tensors as arrays, and what each step does."""

import pickle

import numpy as np
import pytest
import torch

import millrace as mr
from millrace.feed.rng import Rng

aug = mr.augment
IMAGES = [
    aug.RandomFlip(),
    aug.RandomCrop(2),
    aug.RandomCrop(0, (5, 7)),
    aug.ColorJitter(),
    aug.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
    aug.Mixup(0.4, group=4),
    aug.Mixup(group=2),
    aug.CutMix(group=4),
    aug.Compose([aug.RandomCrop(1), aug.RandomFlip(), aug.ColorJitter(), aug.CutMix(group=4)]),
]
WINDOWS = [aug.Jitter(), aug.Scale(), aug.MaskSpans(time=5, features=0.3, value=-1.0)]
TOKENS = [aug.MaskTokens(mask=99, vocab=90, special=(0, 1)), aug.ReplaceTokens(90, 0.2)]
COLUMNS = {
    **dict.fromkeys(map(repr, IMAGES), "image"), **dict.fromkeys(map(repr, WINDOWS), "x"), **dict.fromkeys(map(repr, TOKENS), "x"),
}  # fmt: skip


def batch_of(step, positions):
    """Samples that are functions of their positions."""
    rows = [np.random.default_rng(int(position) + 5) for position in positions]
    if step in IMAGES:
        return {"image": np.array([rng.random((3, 8, 9)) for rng in rows], np.float32), "label": np.array(positions)}
    if step in WINDOWS:
        return {"x": np.array([rng.normal(size=(12, 4)) for rng in rows], np.float32)}
    return {"x": np.array([rng.integers(0, 90, 40) for rng in rows])}


def bytes_of(result):
    return {name: np.ascontiguousarray(value).tobytes() for name, value in result.items()}


@pytest.mark.parametrize("step", [*IMAGES, *WINDOWS, *TOKENS], ids=repr)
def test_a_sample_is_the_same_in_any_batch_and_process(step):
    """Shares of 4 and of 12 positions hold whole groups, which only mixing asks for."""
    positions = np.arange(40, 52)
    whole = step(batch_of(step, positions), Rng(7, positions))
    again = pickle.loads(pickle.dumps(step))  # noqa: S301 - our own
    for first in range(0, 12, 4):
        part = again(batch_of(step, positions[first : first + 4]), Rng(7, positions[first : first + 4]))
        assert bytes_of(part) == bytes_of({name: value[first : first + 4] for name, value in whole.items()})
    if not isinstance(step, aug.Normalize):
        column = COLUMNS[repr(step)]
        assert whole[column].shape != batch_of(step, positions)[column].shape or np.any(
            whole[column] != batch_of(step, positions)[column]
        )
        other = step(batch_of(step, positions), Rng(8, positions))
        assert other[column].tolist() != whole[column].tolist()
    assert whole[COLUMNS[repr(step)]].dtype == batch_of(step, positions)[COLUMNS[repr(step)]].dtype


@pytest.mark.parametrize("step", [*IMAGES, *WINDOWS, *TOKENS], ids=repr)
def test_tensors_give_what_arrays_give(step):
    """As a GPU would: numbers are drawn on the host, and torch applies them."""
    positions = np.arange(16)
    given = batch_of(step, positions)
    marks = {"positions": positions, "samples": positions, "valid": np.ones(16, bool)}
    arrays = step(mr.Batch(given, **marks), Rng(3, positions))
    batch = mr.Batch({name: torch.from_numpy(value) for name, value in given.items()}, **marks)
    tensors = aug.on_device(batch, step, seed=3)
    assert list(tensors) == list(arrays)
    assert tensors.positions.tolist() == positions.tolist()
    for name, tensor in tensors.items():
        assert isinstance(tensor, torch.Tensor)
        assert np.abs(tensor.numpy() - arrays[name]).max() <= (1e-5 if arrays[name].dtype.kind == "f" else 0)


def test_crops_and_flips_only_move_pixels():
    positions = np.arange(200)
    image = np.broadcast_to(np.arange(1, 73, dtype=np.float32).reshape(1, 1, 8, 9), (200, 1, 8, 9))
    flipped = aug.RandomFlip(0.3)({"image": image}, Rng(0, positions))["image"]
    is_flipped = (flipped == image[..., ::-1]).all(axis=(1, 2, 3))
    assert ((flipped == image).all(axis=(1, 2, 3)) ^ is_flipped).all()
    assert 40 <= is_flipped.sum() <= 80
    cropped = aug.RandomCrop(2)({"image": image}, Rng(0, positions))["image"]
    padded = np.pad(image[0, 0], 2)
    places = [(top, left) for top in range(5) for left in range(5)]
    seen = {place for one in cropped for place in places if (one[0] == padded[place[0] :, place[1] :][:8, :9]).all()}
    assert len(seen) == 25
    assert all(any((one[0] == padded[top:, left:][:8, :9]).all() for top, left in places) for one in cropped)


def test_masking_is_bert_s():
    positions, step = np.arange(500), aug.MaskTokens(mask=99, vocab=90, p=0.15, special=(0,))
    tokens = np.tile(np.arange(40), (500, 1))
    result = step({"x": tokens}, Rng(1, positions))
    is_chosen = result["y"] != -100
    assert (result["y"][is_chosen] == tokens[is_chosen]).all()
    assert not is_chosen[:, 0].any()
    assert (result["x"] == tokens)[~is_chosen].all()
    assert abs(is_chosen[:, 1:].mean() - 0.15) < 0.01
    assert abs((result["x"] == 99)[is_chosen].mean() - 0.8) < 0.03
    assert abs((result["x"] == tokens)[is_chosen].mean() - 0.1) < 0.03


def test_spans_are_one_run_and_whole_features():
    positions = np.arange(300)
    hidden = aug.MaskSpans(time=5, value=0)({"x": np.ones((300, 12, 2), np.float32)}, Rng(1, positions))["x"] == 0
    lengths = hidden[:, :, 0].sum(axis=1)
    assert set(lengths) == set(range(6))
    edges = np.diff(hidden[:, :, 0].astype(int), axis=1, prepend=0, append=0)
    assert ((edges == 1).sum(axis=1) == (lengths > 0)).all()
    features = aug.MaskSpans(features=0.5)({"x": np.ones((300, 12, 2), np.float32)}, Rng(1, positions))["x"]
    assert (features == features[:, :1]).all()
    assert 0.4 < features.mean() < 0.6


def test_partners_are_others_of_the_group_and_weights_are_theirs():
    positions = np.arange(24)
    image = np.broadcast_to(positions.astype(np.float32)[:, None, None, None], (24, 1, 10, 10))
    for step in (aug.Mixup(group=8), aug.CutMix(group=8)):
        result = step({"image": image, "label": positions}, Rng(5, positions))
        partner, mix = result["label_partner"], result["mix"]
        assert (partner // 8 == positions // 8).all()
        assert (partner != positions).all()
        assert sorted(partner) == list(positions)
        mean = result["image"].mean(axis=(1, 2, 3))
        assert np.abs(mean - (mix * positions + (1 - mix) * partner)).max() < 1e-3


def test_samples_whose_partner_is_elsewhere_or_padding_stay_as_they_are():
    positions = np.array([6, 7, 8, 9, 10, 11, -1, -1])  # a pass that begins within a group, and ends
    image = np.random.default_rng(0).random((8, 1, 4, 4)).astype(np.float32)
    num_alone = set()
    for seed in range(9):
        result = aug.Mixup(group=4)({"image": image, "label": np.arange(8)}, Rng(seed, positions))
        is_alone = result["mix"] == 1
        assert (is_alone == (result["label_partner"] == np.arange(8))).all()
        assert (positions[result["label_partner"]] // 4 == positions // 4).all()
        assert is_alone[6:].all()
        assert not is_alone[2:6].any()
        assert (result["image"][is_alone] == image[is_alone]).all()
        num_alone.add(int(is_alone[:2].sum()))
    assert num_alone == {1, 2}  # by the turn of their group
    with pytest.raises(mr.ConfigError, match="a share of 6 samples does not hold whole groups of 4"):
        aug.Mixup(group=4)({"image": image[:6], "label": np.arange(6)}, Rng(0, positions[:6]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: aug.RandomFlip(2), "p=2; expected 0 to 1"),
        (lambda: aug.ColorJitter(-1), "brightness=-1"),
        (lambda: aug.Mixup(0), "alpha=0"),
        (lambda: aug.MaskTokens(1, 0), "vocab=0"),
        (lambda: aug.MaskSpans(-1), "time=-1"),
        (lambda: aug.Normalize((0,), (0,)), "std="),
        (lambda: aug.Compose([3]), "step 3 cannot be called"),
        (lambda: aug.Jitter()({"z": np.zeros(3)}, Rng(0, np.arange(3))), "no 'x'; it has z: give column="),
        (lambda: aug.RandomFlip()({"image": np.zeros(3)}, Rng(0, np.arange(3))), "expected an array of 4 axes"),
        (lambda: aug.Jitter()({"x": np.zeros((3, 2), int)}, Rng(0, np.arange(3))), "is int64; expected floats"),
        (lambda: aug.RandomCrop(1, (9, 9))({"image": np.zeros((2, 3, 4, 4))}, Rng(0, np.arange(2))), "lower size"),
        (lambda: aug.on_device(mr.Batch({"x": np.zeros(3)}), aug.Jitter()), "lost its positions"),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(mr.ConfigError, match=message):
        make()
