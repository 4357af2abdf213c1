"""Feeds over chosen records and samples: resumed with other worlds, from a spec, and in worker processes."""

import json

import numpy as np
import pytest

import millrace as mr
from millrace.feed.journal import arrays
from millrace.feed.proof import prove_resume


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(3)
    columns = {
        "hits": mr.Column("float32", (2,)), "energy": mr.Column("float32"), "tracks": mr.Column("int16", axis="tracks"),
        "label": mr.Column("int64", per="record"), "key": mr.Column("string", per="record"),
    }  # fmt: skip
    path = tmp_path_factory.mktemp("selections") / "store"
    with mr.StoreWriter(path, columns=columns, shard_bytes=4000) as writer:
        for k in range(300):
            hits, tracks = rng.integers(0, 9, 2)
            writer.append(
                {"hits": rng.normal(size=(hits, 2)), "energy": rng.normal(size=hits), "tracks": np.arange(tracks),
                 "label": k % 5, "key": f"event {k // 3}"}
            )  # fmt: skip
    return mr.open_store(path)


SELECTIONS = {
    "where": lambda store: mr.Records(store.where("label != 3 and n_hits > 1")),
    "padded where": lambda store: mr.Records(store.where("label == 2"), pad=4, mask=True, fill={"tracks": -1}),
    "random": lambda store: mr.random_split(store, [0.7, 0.3], seed=4)[0],
    "grouped": lambda store: mr.random_split(store.where("label < 4"), [0.6, 0.4], groups="key")[1],
    "stratified": lambda store: mr.random_split(store, [0.5, 0.5], labels="label")[1],
    "fold": lambda store: mr.k_fold(store, 4, 2, key="key")[0],
    "mask": lambda store: mr.Subset(mr.Records(store), np.arange(300) % 3 > 0),
}


@pytest.fixture(params=SELECTIONS)
def view(request, store):
    return SELECTIONS[request.param](store)


def same(one, other):
    return np.array_equal(one.values, other.values) if isinstance(one, mr.Ragged) else np.array_equal(one, other)


def test_the_rest_is_what_it_would_have_been_for_any_world(view, store, tmp_path):
    options = {"seed": 6, "epochs": 2, "device": "numpy"}
    whole = [s for batch in mr.Feed(view, batch=16, **options) for s in batch.samples[batch.valid].tolist()]
    first = mr.Feed(view, batch=12, run=tmp_path, **options)
    seen = [s for _, batch in zip(range(5), first, strict=False) for s in batch.samples.tolist()]
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    again = mr.from_spec(json.loads(json.dumps(view.spec())), store, arrays=arrays(tmp_path))
    shares = []
    for rank in range(3):
        feed = mr.Feed(again, batch=10, rank=rank, world=3, **options)
        feed.load_state_dict(state)
        shares.append([batch.samples[batch.valid].tolist() for batch in feed])
    rest = [s for step in zip(*shares, strict=True) for share in step for s in share]
    assert seen + rest == whole
    for samples in (whole[:40], whole[-40:]):  # each is what the view has there
        for sample, item in zip(samples, (view[k] for k in samples), strict=True):
            assert item["label"] == store.columns["label"][view.stored_records([sample])[0]]


def double(batch, rng):
    return {**batch, "label": batch["label"] * 2}


@pytest.mark.own_process
@pytest.mark.parametrize("name", ["where", "random", "mask"])
def test_worker_processes_make_the_same_batches(name, store):
    view = SELECTIONS[name](store)
    options = {"batch": 32, "seed": 6, "epochs": 1, "device": "numpy", "transform": double}
    with mr.Feed(view, processes=True, workers=1, **options) as feed:
        made = list(feed)
    expected = list(mr.Feed(view, **options))
    assert len(made) == len(expected) > 1
    for one, other in zip(made, expected, strict=True):
        assert one.samples.tolist() == other.samples.tolist()
        assert all(same(one[key], other[key]) for key in other)


def test_verify_resume_proves_it(store):
    trials = prove_resume(SELECTIONS["grouped"](store), batch=8, seed=1, steps=12, trials=3)
    assert [trial["difference"] for trial in trials] == [None] * 3
