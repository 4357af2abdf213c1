"""Which rank a feed takes itself for: what it is told, what torch.distributed says, or alone; never a silent guess."""

import json
import subprocess
import sys

import numpy as np
import pytest

import millrace as mr

VIEW = mr.Blocks(mr.from_arrays({"tokens": np.arange(31)}), length=1)


def feed_of(**options):
    return mr.Feed(VIEW, **{"batch": 10, "device": "numpy", "epochs": 1, **options})


@pytest.fixture
def torchrun(monkeypatch):
    """The environment torchrun gives to rank 2 of 4."""
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)


def test_alone_it_is_rank_0_of_1(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (feed_of().rank, feed_of().world) == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert (feed_of().rank, feed_of().world) == (0, 1)


@pytest.mark.usefixtures("torchrun")
def test_a_job_of_several_without_a_process_group_is_refused():
    with pytest.raises(mr.ConfigError, match=r"WORLD_SIZE=4 but torch\.distributed is not initialised"):
        feed_of()


@pytest.mark.usefixtures("torchrun")
def test_what_is_given_counts():
    """Data-parallel ranks are fewer than processes where a model is split over several of them."""
    feed = feed_of(rank=1, world=2)
    assert (feed.rank, feed.world) == (1, 2)
    assert next(iter(feed)).positions.tolist() == [5, 6, 7, 8, 9]


def test_shares_are_contiguous_and_cover_the_batch():
    parts = [next(iter(feed_of(rank=rank, world=4))).positions.tolist() for rank in range(4)]
    assert parts == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


def test_a_process_group_says_rank_and_world(tmp_path, monkeypatch):
    import torch.distributed as dist

    monkeypatch.setenv("WORLD_SIZE", "4")  # the group is what counts, once there is one
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        feed = feed_of()
        assert (feed.rank, feed.world) == (0, 1)
        assert [got.num_samples for got in feed] == [10, 10, 10]
        monkeypatch.setattr(dist, "get_rank", lambda: 2)
        monkeypatch.setattr(dist, "get_world_size", lambda: 3)
        feed = feed_of()
        assert (feed.rank, feed.world) == (2, 3)
        assert next(iter(feed)).positions.tolist() == [6, 7, 8, 9]
        assert feed_of(rank=0, world=1).world == 1
    finally:
        dist.destroy_process_group()
    with pytest.raises(mr.ConfigError, match="WORLD_SIZE=4"):
        feed_of()


RANK = """
import json, sys
import numpy as np
import torch.distributed as dist
import millrace as mr

rank, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=world)
view = mr.Blocks(mr.from_arrays({"tokens": np.arange(31)}), length=1)
feed = mr.Feed(view, batch=7, seed=3, epochs=1)
got = [batch.x[batch.valid, 0].tolist() for batch in feed]
dist.destroy_process_group()
print(json.dumps([feed.rank, feed.world, got]))
"""


def test_real_ranks_of_one_group_share_an_epoch(tmp_path):
    """Two processes that say nothing but init_process_group."""
    command = [sys.executable, "-c", RANK]
    jobs = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path / "group")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    found = [json.loads(job.communicate(timeout=100)[0]) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert [part[:2] for part in found] == [[0, 2], [1, 2]]
    assert len(found[0][2]) == len(found[1][2]) == 5
    together = [sample for batches in zip(found[0][2], found[1][2], strict=True) for one in batches for sample in one]
    assert together == mr.Shuffled(30, seed=3).samples(np.arange(30)).tolist()
