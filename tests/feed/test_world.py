"""Which rank a feed takes itself for: what it is told, what torch.distributed says, or alone; never a silent guess."""

import pickle

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
    """When it is iterated: it may be made before the group, as Lightning does, and its length be asked for."""
    feed = feed_of()
    assert len(feed) == len(feed.by_epoch()) == 3
    assert feed.explain(0).positions.tolist() == list(range(10))
    for begin in (iter, lambda feed: next(iter(feed.by_epoch())), lambda feed: next(iter(feed.by_epoch(repeat=True)))):
        with pytest.raises(mr.ConfigError, match="WORLD_SIZE=4, but there is no process group"):
            begin(feed)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_tasks_of_other_launchers_are_never_all_rank_0_of_1(name, monkeypatch):
    """srun, mpirun and mpiexec start the tasks; which of them is whom, a process group says or the user."""
    monkeypatch.setenv(name, "2")
    for begin in (iter, lambda feed: next(iter(feed.by_epoch()))):
        with pytest.raises(mr.ConfigError, match=f"^{name}=2, but there is no process group; .*rank=0, world=1"):
            begin(feed_of())
    assert next(iter(feed_of(rank=0, world=1))).num_samples == 10
    monkeypatch.setenv(name, "1")
    assert (feed_of().rank, feed_of().world) == (0, 1)


def test_the_tasks_of_a_batch_script_say_nothing(monkeypatch):
    """sbatch and salloc set SLURM_NTASKS for the script, which runs once."""
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert next(iter(feed_of())).num_samples == 10


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
        feed, early = feed_of(), feed_of()
        assert (feed.rank, feed.world) == (0, 1)
        assert [got.num_samples for got in feed] == [10, 10, 10]
        monkeypatch.setattr(dist, "get_rank", lambda: 2)
        monkeypatch.setattr(dist, "get_world_size", lambda: 3)
        feed = feed_of()
        assert (feed.rank, feed.world) == (2, 3)
        for made in (feed, early):
            assert next(iter(made)).positions.tolist() == [6, 7, 8, 9]
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
        assert (feed_of().rank, feed_of().world) == (2, 3)
        assert next(iter(feed_of(rank=0, world=1))).num_samples == 10  # explicit ones are the data-parallel ones
        with pytest.raises(mr.ConfigError, match="world=2, but the process group has 3 processes"):
            iter(feed_of(rank=0, world=2))
        with pytest.raises(mr.ConfigError, match="batch=2 is smaller than world=3"):
            iter(feed_of(batch=2))
    finally:
        dist.destroy_process_group()
    with pytest.raises(mr.ConfigError, match="WORLD_SIZE=4"):
        iter(feed_of())


@pytest.mark.parametrize("transform", [None, np.copy])
def test_a_feed_survives_being_sent_to_another_process(transform, tmp_path):
    """As its options and its position; it opens its store anew."""
    with mr.StoreWriter(tmp_path / "s", columns={"tokens": mr.Column("uint16")}) as writer:
        writer.append({"tokens": np.arange(31)})
    view = mr.Blocks(mr.open_store(tmp_path / "s"), length=1)
    feed = mr.Feed(view, batch=5, seed=3, rank=1, world=2, epochs=2, device="numpy", last="drop", transform=transform,
                   rename={"x": "a"} if transform is None else None, workers=2, depth=3, run=tmp_path / "run")  # fmt: skip
    if transform is None:
        next(iter(feed))
    sent = pickle.dumps(feed)
    assert len(sent) < 3000
    again = pickle.loads(sent)  # noqa: S301
    assert again.state_dict() == feed.state_dict()
    options = (
        "batch",
        "seed",
        "epochs",
        "rank_option",
        "device",
        "transform",
        "rename",
        "last",
        "workers",
        "depth",
        "run",
    )
    assert all(getattr(again, name) == getattr(feed, name) for name in options)
    if transform is None:
        assert [got.samples.tolist() for got in again] == [got.samples.tolist() for got in feed]
    passes = pickle.loads(pickle.dumps(feed.by_epoch(repeat=True)))  # noqa: S301
    assert passes.is_repeated
    assert len(passes) == 6
