"""A state of something else is refused by name; what is no state at all is a ConfigError. Neither moves the feed."""

import json

import numpy as np
import pytest

import millrace as mr

STORE = mr.from_arrays({"tokens": np.arange(41)})
OTHER = mr.from_arrays({"tokens": np.arange(41)[::-1].copy()})
VIEW = mr.Blocks(STORE, length=4)


def feed_of(view=VIEW, **options):
    return mr.Feed(view, device="numpy", **{"batch": 2, "seed": 7, **options})


def state_of(**options):
    feed = feed_of(**options)
    next(iter(feed))
    return json.loads(json.dumps(feed.state_dict()))


STATE = state_of()


def test_the_same_is_accepted_whatever_else_differs():
    feed = feed_of(
        mr.Blocks(mr.from_arrays({"tokens": np.arange(41)}), length=4),
        batch=5,
        epochs=4,
        rank=1,
        world=3,
        depth=2,
        transform=lambda batch, rng: batch,
        workers=2,
    )
    feed.load_state_dict(STATE)
    assert feed.state_dict() == STATE


OTHERS = {
    "store": feed_of(mr.Blocks(OTHER, length=4)),
    "view": feed_of(mr.Blocks(STORE, length=3, stride=4)),
    "order": feed_of(order=mr.BlockShuffled(len(VIEW), block=2, window=2, seed=7)),
    "seed": feed_of(seed=8, order=mr.Shuffled(len(VIEW), seed=7)),
}
MORE = {
    "view": [mr.Subset(VIEW, np.arange(len(VIEW))), mr.Subset(VIEW, [1, 0]), mr.Blocks(STORE, length=5)],
    "store": [mr.Concat([VIEW, mr.Blocks(OTHER, length=4)])],
}


@pytest.mark.parametrize("part", OTHERS)
def test_another_part_is_named(part):
    feed = OTHERS[part]
    says = "of seed 7, this feed has seed 8" if part == "seed" else f"another {part}"
    with pytest.raises(mr.ResumeMismatch, match=says) as caught:
        feed.load_state_dict(STATE)
    assert caught.value.part == part
    assert caught.value.found == STATE[part]
    assert caught.value.expected == feed.state_dict()[part]
    assert feed.state_dict()["position"] == 0


@pytest.mark.parametrize(("part", "view"), [(part, view) for part, views in MORE.items() for view in views])
def test_views_made_of_views_are_told_apart(part, view):
    with pytest.raises(mr.ResumeMismatch) as caught:
        feed_of(view).load_state_dict(STATE)
    assert caught.value.part == part


def test_subsets_are_told_apart_by_their_ids():
    first, second = (feed_of(mr.Subset(VIEW, ids)) for ids in ([0, 1, 2], [0, 2, 1]))
    with pytest.raises(mr.ResumeMismatch) as caught:
        second.load_state_dict(first.state_dict())
    assert caught.value.part == "view"


def test_another_seed_is_told_as_such_though_the_order_differs_too():
    with pytest.raises(mr.ResumeMismatch, match="the state is of seed 7, this feed has seed 8; give seed=7") as caught:
        feed_of(seed=8).load_state_dict(STATE)
    assert caught.value.part == "seed"


def test_a_state_from_before_an_append_names_the_snapshot_that_continues_it(tmp_path):
    columns = {"tokens": mr.Column("uint16")}
    with mr.StoreWriter(tmp_path / "store", columns=columns) as writer:
        writer.append({"tokens": np.arange(41, dtype=np.uint16)})
    before = mr.open_store(tmp_path / "store")
    feed = feed_of(mr.Blocks(before, length=4))
    expected = [batch.samples.tolist() for batch, _ in zip(feed, range(3), strict=False)]
    feed = feed_of(mr.Blocks(before, length=4))
    next(iter(feed))
    state = feed.state_dict()
    with mr.StoreWriter(tmp_path / "store", columns=columns, append=True) as writer:
        writer.append({"tokens": np.arange(41, dtype=np.uint16)})
    after = feed_of(mr.Blocks(mr.open_store(tmp_path / "store"), length=4))
    with pytest.raises(mr.ResumeMismatch, match="the store was appended to since") as caught:
        after.load_state_dict(state)
    assert f"snapshot='{before.fingerprint}'" in str(caught.value)
    found = mr.open_store(tmp_path / "store", snapshot=before.fingerprint)  # as it says
    again = feed_of(mr.Blocks(found, length=4))
    again.load_state_dict(state)
    assert [batch.samples.tolist() for batch, _ in zip(again, range(2), strict=False)] == expected[1:]


def test_a_store_that_is_no_path_is_only_named(tmp_path):
    with mr.StoreWriter(tmp_path / "store", columns={"tokens": mr.Column("uint16")}) as writer:
        writer.append({"tokens": np.arange(41, dtype=np.uint16)})
    feed = feed_of(mr.Blocks(mr.open_store(tmp_path / "store"), length=4))
    for other in ("../store", "0" * 32, STATE["store"]):
        with pytest.raises(mr.ResumeMismatch, match="another store"):
            feed.load_state_dict(feed.state_dict() | {"store": other})


def test_another_split_of_a_store_is_another_view(tmp_path):
    from millrace.testing import tiny_text

    store = tiny_text(tmp_path / "text")
    train, val = (mr.Blocks(store.split(name), length=2, stride=50) for name in ("train", "val"))
    order = mr.Sequential(1)
    state = feed_of(mr.Subset(train, [0]), batch=1, order=order).state_dict()
    with pytest.raises(mr.ResumeMismatch) as caught:
        feed_of(mr.Subset(val, [0]), batch=1, order=order).load_state_dict(state)
    assert caught.value.part == "view"


MALFORMED = [
    None,
    [],
    "state",
    {},
    {"position": 3},
    {key: value for key, value in STATE.items() if key != "version"},
    *({key: value for key, value in STATE.items() if key != part} for part in ("store", "view", "order", "seed")),
    STATE | {"version": 2},
    STATE | {"version": None},
    *(STATE | {"position": bad} for bad in (-1, 2.0, "2", None, True, [2], float("nan"), 1 << 63)),
    *(STATE | {part: bad} for part in ("store", "view", "order") for bad in (None, 3)),
    *(STATE | {"seed": bad} for bad in (None, "7", 7.0, True)),
]


@pytest.mark.parametrize("state", MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_no_state_is_refused(state):
    feed = feed_of()
    with pytest.raises(mr.ConfigError, match="state"):
        feed.load_state_dict(state)
    assert feed.state_dict()["position"] == 0
