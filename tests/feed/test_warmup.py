"""Warm-up of the length: the same tokens at the same positions, as shorter blocks; also after a resume."""

import json

import numpy as np
import pytest

import millrace as mr

STORE = mr.from_arrays({"tokens": np.arange(2000)}, np.arange(0, 2001, 25))
WARMUP = mr.Warmup([(0, 4), (24, 8), (48, 16)])


def feed_of(batch, view=None, **options):
    return mr.Feed(view or mr.Blocks(STORE, length=16), batch=batch, seed=3, **{"device": "numpy", **options})


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_short_blocks_hold_the_tokens_of_the_long_ones(device):
    for step, batch in zip(range(16), feed_of(6, device=device), strict=False):
        short, length = WARMUP(batch), (4, 8, 16)[min(2, step // 4)]
        assert short["x"].shape == short["y"].shape == (6 * 16 // length, length)
        assert short["x"].reshape(-1).tolist() == batch["x"].reshape(-1).tolist()
        assert (short["y"] == short["x"] + 1).all()
        assert short.positions.tolist() == np.repeat(batch.positions, 16 // length).tolist()
        assert short.samples.tolist() == (short["x"][:, 0] // 16).tolist()
        assert short.valid.all()


def test_a_resumed_run_with_another_batch_and_world_goes_on_at_its_length():
    whole = [WARMUP(batch) for _, batch in zip(range(12), feed_of(6), strict=False)]
    feed = feed_of(6)
    iterator = iter(feed)
    got = [WARMUP(next(iterator))["x"].tolist() for _ in range(5)]
    feed.close()
    state, parts = json.loads(json.dumps(feed.state_dict())), []
    for rank in range(3):
        again = feed_of(3, rank=rank, world=3)
        again.load_state_dict(state)
        parts.append([WARMUP(batch)["x"].tolist() for _, batch in zip(range(14), again, strict=False)])
    got += [rows for step in zip(*parts, strict=True) for rows in step]
    assert [row for rows in got for row in rows] == [row for batch in whole for row in batch["x"].tolist()]


def test_packed_blocks_keep_documents_places_and_masks():
    for batch in feed_of(4, mr.Packed(STORE, length=32), epochs=1):
        short = mr.Warmup([(0, 8)])(batch)
        for name in ("x", "y", "document", "place", "mask"):
            assert np.array_equal(short[name], batch[name].reshape(16, 8))


def test_what_cannot_be_cut_is_refused():
    batch = next(iter(feed_of(4)))
    with pytest.raises(mr.ConfigError, match="blocks of 16 cannot be cut into parts of 6"):
        mr.Warmup([(0, 6)])(batch)
    for schedule in ([], [(5, 4)], [(0, 4), (0, 8)]):
        with pytest.raises(mr.ConfigError, match="expected 0 first"):
            mr.Warmup(schedule)
    with pytest.raises(mr.ConfigError, match="expected 1 or more"):
        mr.Warmup([(0, 0)])
    with pytest.raises(mr.ConfigError, match="'tokens' is not of blocks"):
        WARMUP(next(iter(feed_of(4, mr.Records(STORE)))))
    with pytest.raises(mr.ConfigError, match="lost them"):
        WARMUP(mr.Batch({"x": np.zeros((2, 16))}))
