"""Bitmaps against the numbers of their samples, in numpy and in the core, and what they cost."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.view.bitmap import BLOCK, Bitmap


def masks():
    lengths = st.integers(0, 40) | st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77])
    shares = st.sampled_from([0.0, 0.001, 0.5, 1.0])
    made = st.tuples(lengths, shares, st.integers(0, 99))
    return made.map(lambda drawn: np.random.default_rng(drawn[2]).random(drawn[0]) < drawn[1])


@given(mask=masks())
def test_a_bitmap_is_the_numbers_of_its_samples(mask):
    ids, bits = np.flatnonzero(mask), Bitmap.of(mask)
    assert len(bits) == len(ids)
    assert bits.ids().tolist() == ids.tolist()
    assert bits.select(np.arange(len(ids))[::-1]).tolist() == ids[::-1].tolist()
    again = Bitmap(bits.packed, len(mask))
    assert np.array_equal(again.words, bits.words)


@given(mask=masks().filter(np.any), batch=st.integers(1, 70))
def test_the_core_finds_the_same_samples(mask, batch):
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(len(mask) + 1)}), length=1)
    subset, ids = mr.Subset(view, mask), np.flatnonzero(mask)
    feed = mr.Feed(subset, batch=batch, seed=3, epochs=1, device="numpy")
    found = [x for batch in feed for x in batch.x[batch.valid, 0].tolist()]
    expected = ids[mr.Shuffled(len(ids), 3).samples(np.arange(len(ids)))]
    assert found == expected.tolist()
    assert mr.Subset(view, ids).fingerprint == subset.fingerprint


def test_a_mask_costs_a_bit_for_each_sample():
    mask = np.ones(100_000_000, bool)
    tracemalloc.start()
    bits = Bitmap.of(mask)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (bits.words.nbytes + bits.ranks.nbytes) * 10 < 135e6
    assert peak < 15e6  # not twice the bits, also while they are packed
    view = mr.Blocks(mr.from_arrays({"tokens": np.zeros(1001, np.uint8)}), length=1)
    assert isinstance(mr.Subset(view, np.arange(1000) % 2 == 0).chosen, Bitmap)
    assert isinstance(mr.Subset(view, np.arange(1000) % 100 == 0).chosen, np.ndarray)  # numbers are fewer bytes


def test_bits_that_do_not_fit_are_refused():
    view = mr.Blocks(mr.from_arrays({"tokens": np.zeros(101, np.uint8)}), length=1)
    for bits in (Bitmap.of(np.ones(99, bool)), Bitmap.of(np.ones(90, bool)).packed):
        with pytest.raises(mr.ConfigError, match="samples"):
            mr.Subset(view, bits)


def test_the_files_of_some_samples_are_found_without_the_numbers_of_all(tmp_path, monkeypatch):
    with mr.StoreWriter(tmp_path / "store", columns={"tokens": mr.Column("uint16")}) as writer:
        writer.append({"tokens": np.arange(1000, dtype=np.uint16)})
    view = mr.Blocks(mr.open_store(tmp_path / "store"), length=10)
    part = mr.Subset(view, np.arange(len(view)) % 3 == 1)
    expected = [ranges for _, ranges in view.files(np.array([1, 4]))]
    monkeypatch.setattr(mr.Subset, "ids", property(lambda _: pytest.fail("8 bytes for every chosen sample")))
    assert [ranges for _, ranges in part.files(np.array([0, 1]))] == expected
