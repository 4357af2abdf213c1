"""A batch is a dict that frameworks may take apart and rebuild, with marks that stay where they can."""

import copy
import json
import pickle
import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import default_collate

import millrace as mr
from millrace.augment import Compose
from millrace.feed.pytrees import torch_pytrees


def batch_of(n=7):
    lengths = np.arange(n) % 4
    hits = mr.Ragged(np.arange(lengths.sum() * 2.0).reshape(-1, 2), np.concatenate(([0], np.cumsum(lengths))))
    values = {"x": np.arange(n * 3).reshape(n, 3), "hits": hits, "key": np.array([f"k{i}" for i in range(n)], object)}
    marks = {"positions": np.arange(10, 10 + n), "samples": np.arange(n)[::-1], "valid": np.arange(n) < n - 2}
    return mr.Batch(values, **marks)


def assert_marks_equal(one, other):
    for mark in ("positions", "samples", "valid"):
        assert np.array_equal(getattr(one, mark), getattr(other, mark))


def test_names_are_keys_and_attributes():
    batch = batch_of()
    assert batch.x is batch["x"]
    assert batch.hits is batch["hits"]
    assert list(batch) == ["x", "hits", "key"]
    assert isinstance(batch, dict)
    batch["new"] = batch.x * 2
    assert batch.new[0].tolist() == [0, 2, 4]
    with pytest.raises(AttributeError, match="the batch has no 'z'; it has x, hits, key, new"):
        batch.z  # noqa: B018
    assert not hasattr(batch, "z")
    assert getattr(batch, "z", None) is None


def test_num_samples_counts_padding_too():
    assert batch_of(5).num_samples == 5
    assert mr.Batch({"x": np.zeros((4, 2))}).num_samples == 4
    assert mr.Batch().num_samples == 0


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_micro_is_contiguous_views_that_make_the_whole(count):
    batch = batch_of()
    parts = batch.micro(count)
    assert len(parts) == count
    sizes = [part.num_samples for part in parts]
    assert sum(sizes) == 7
    assert max(sizes) - min(sizes) <= 1
    for name in ("x", "key"):
        assert np.array_equal(np.concatenate([part[name] for part in parts]), batch[name])
        assert all(np.shares_memory(part[name], batch[name]) for part in parts)
    for mark in ("positions", "samples", "valid"):
        assert np.array_equal(np.concatenate([getattr(part, mark) for part in parts]), getattr(batch, mark))
    items = [item for part in parts for item in part.hits]
    assert [item.tolist() for item in items] == [item.tolist() for item in batch.hits]
    for part in parts:
        assert isinstance(part, mr.Batch)
        assert len(part.hits) == part.num_samples
        assert part.hits.offsets[0] == 0
        assert np.shares_memory(part.hits.values, batch.hits.values) or not part.hits.values.size


@pytest.mark.parametrize("count", [0, -1, 8])
def test_micro_of_more_parts_than_samples_is_refused(count):
    with pytest.raises(mr.ConfigError, match=rf"micro\({count}\) of a batch of 7"):
        batch_of().micro(count)


def test_micro_of_a_batch_without_marks():
    parts = mr.Batch({"x": np.arange(5)}).micro(2)
    assert [part.x.tolist() for part in parts] == [[0, 1], [2, 3, 4]]
    assert parts[0].positions is None


def test_a_framework_that_rebuilds_it_keeps_the_marks():
    """As Lightning, Accelerate, transformers and DistributedDataParallel do."""
    batch = batch_of()
    for rebuilt in (
        type(batch)({name: value for name, value in batch.items()}),  # noqa: C416
        type(batch)(OrderedDict(batch.items())),
        type(batch)(tuple((name, value) for name, value in batch.items())),
        type(batch)({name: value for name, value in batch.items() if name != "x"}),
    ):
        assert type(rebuilt) is mr.Batch
        assert all(rebuilt[name] is batch[name] for name in rebuilt)
        assert_marks_equal(rebuilt, batch)
        assert {type(name) for name in rebuilt} == {str}
    assert type(batch)() == {}


def test_marks_do_not_go_to_other_samples():
    batch = batch_of()
    for other in (
        type(batch)({name: value[:3] for name, value in batch.items()}),
        type(batch)({name: np.zeros(()) for name in batch}),
        type(batch)(dict(batch)),
    ):
        assert other.positions is other.samples is other.valid is None
    odd = type(batch)({"words": [["a"], ["b", "c"]], **{name: value[:3] for name, value in batch.items()}})
    assert odd.samples is None
    given = type(batch)({name: value[:3] for name, value in batch.items()}, positions=np.arange(3))
    assert given.positions.tolist() == [0, 1, 2]
    assert given.samples is None
    assert {type(name) for name in given} == {str}


def test_its_items_are_those_of_a_dict():
    batch = batch_of()
    assert len(batch.items()) == 3
    assert [name for name, _ in batch.items()] == list(batch)
    assert {**batch} == dict(batch)
    assert {type(name) for name in {**batch}} == {str}
    assert json.dumps({name: 1 for name, _ in batch.items()}) == '{"x": 1, "hits": 1, "key": 1}'


def test_it_moves_with_its_marks():
    batch = batch_of()
    for moved in (batch.to("cpu"), batch.to(torch.device("meta"), non_blocking=True)):
        assert_marks_equal(moved, batch)
        assert isinstance(moved.x, torch.Tensor)
        assert moved.hits.values.device == moved.hits.offsets.device == moved.x.device
        assert moved.key is batch.key  # text stays
    assert np.array_equal(batch.to("cpu").hits[3], batch.hits[3])
    assert isinstance(batch.x, np.ndarray)


def test_batches_and_ragged_columns_are_pytrees_of_torch():
    torch_pytrees()
    one, other = batch_of(), batch_of(3)
    doubled = tree_map(lambda value: value if value.dtype == object else value * 2, one)
    assert type(doubled) is mr.Batch
    assert_marks_equal(doubled, one)
    assert np.array_equal(doubled.hits.values, one.hits.values * 2)
    (leaves, spec), (_, same) = tree_flatten(one), tree_flatten(other)
    assert len(leaves) == 4
    assert spec == same  # whatever the samples are
    assert tree_flatten(mr.Batch({"x": one.x}))[1] != spec
    with FakeTensorMode() as mode:
        traced = tree_unflatten([mode.from_tensor(torch.zeros(7)), *leaves[1:]], spec)
    assert traced.positions is traced.samples is traced.valid is None


def test_copies_keep_the_marks():
    batch = batch_of()
    shallow, deep = copy.copy(batch), copy.deepcopy(batch)
    for copied in (shallow, deep):
        assert type(copied) is mr.Batch
        assert list(copied) == list(batch)
        assert_marks_equal(copied, batch)
    assert shallow.x is batch.x
    assert not np.shares_memory(deep.x, batch.x)
    shallow.update(x=0)
    assert batch.x is not shallow.x


def test_torch_converts_it_with_its_marks():
    import torch
    from torch.utils.data import default_convert

    batch = mr.Batch({"x": np.arange(4.0)}, positions=np.arange(4), samples=np.arange(4), valid=np.ones(4, bool))
    converted = default_convert(batch)
    assert type(converted) is mr.Batch
    assert isinstance(converted.x, torch.Tensor)
    assert_marks_equal(converted, batch)


def test_the_repr_names_every_field():
    text = repr(batch_of())
    assert text == "<Batch of 7: x int64[7, 3], hits ragged of 9 rows, key object[7]>"
    assert repr(mr.Batch({"names": ["a", "b"]})) == "<Batch of 2: names list[2]>"
    assert repr(mr.Batch()) == "<Batch of 0: >"


def test_tensors_have_micro_and_repr_too():
    import torch

    store = mr.from_arrays({"hits": np.arange(12.0), "label": [0, 1, 2, 3]}, offsets=[0, 3, 3, 8, 12])
    (batch,) = mr.Feed(mr.Records(store), batch=4, order=mr.Sequential(4), epochs=1, device="cpu")
    assert repr(batch) == "<Batch of 4: hits ragged of 12 rows, label torch.int64[4]>"
    first, second = batch.micro(2)
    assert isinstance(second.hits.values, torch.Tensor)
    assert second.hits.values.tolist() == list(range(3, 12))
    assert [item.tolist() for item in first.hits] == [[0, 1, 2], []]
    assert second.label.tolist() == [2, 3]
    assert second.label.data_ptr() == batch.label.data_ptr() + 16


def test_marks_of_a_fed_batch_are_its_own():
    store = mr.from_arrays({"tokens": np.arange(1000, dtype=np.uint16)})
    feed = mr.Feed(mr.Blocks(store, length=4), batch=7, epochs=1, device="numpy", depth=2)
    batches = [(pickle.loads(pickle.dumps(batch)), copy.copy(batch), batch) for batch in feed]  # noqa: S301
    positions = np.arange(249, dtype=np.int64)
    for number, copies in enumerate(batches):
        own = positions[number * 7 : number * 7 + 7]
        padding = 7 - len(own)
        for batch in copies:
            assert batch.num_samples == 7
            assert batch.valid.tolist() == [True] * len(own) + [False] * padding
            assert batch.positions.tolist() == [*own.tolist(), *[-1] * padding]
            assert batch.samples[: len(own)].tolist() == feed.order.samples(own).tolist()
            assert batch.positions.flags.writeable
            assert [part.positions.tolist() for part in batch.micro(7)] == [[n] for n in batch.positions]


def test_marks_that_are_set_stay():
    size = 8
    store = mr.from_arrays({"tokens": np.arange(1000, dtype=np.uint16)})
    batch = next(iter(mr.Feed(mr.Blocks(store, length=4), batch=size, device="numpy")))
    batch.valid = np.zeros(size, bool)
    assert batch.positions.tolist() == list(range(size))
    assert not batch.valid.any()
    other = next(iter(mr.Feed(mr.Blocks(store, length=4), batch=size, device="numpy")))
    other.positions = other.positions[:4]
    assert other.num_samples == 4
    third = next(iter(mr.Feed(mr.Blocks(store, length=4), batch=size, device="numpy")))
    third.positions = np.arange(3)
    assert third.num_samples == 3
    assert len(third.samples) == size


def test_one_part_of_a_batch_is_another_dict():
    batch = batch_of()
    [part] = batch.micro(1)
    part["x"] = part.x * 2
    del part["key"]
    assert list(batch) == ["x", "hits", "key"]
    assert batch.x is not part.x
    assert_marks_equal(part, batch)


def test_threads_may_look_at_the_marks_of_a_batch_at_once(at_once):
    store, rounds, problems = mr.from_arrays({"tokens": np.arange(1000, dtype=np.uint16)}), 1000, []
    together, batches = threading.Barrier(4), []

    def look():
        for _ in range(rounds):
            together.wait()
            try:
                assert (batches[-1].num_samples, len(batches[-1].samples), len(batches[-1].valid)) == (8, 8, 8)
            except Exception as error:  # noqa: BLE001 - asserted below
                problems.append(error)
            together.wait()

    def give():
        for _, batch in zip(range(rounds), mr.Feed(mr.Blocks(store, length=4), batch=8, device="numpy"), strict=False):
            batches[:] = [batch]
            together.wait()
            together.wait()

    at_once(give, look, look, look)
    assert problems == []


NAMES = [
    "values",
    "keys",
    "items",
    "to",
    "get",
    "update",
    "micro",
    "pin_memory",
    "positions",
    "samples",
    "valid",
    "num_samples",
]
NAMES += ["_marks", "_span", "bins", "marks", "__array__", "__len__", "__deepcopy__", "self", "name"]


def named_columns(rows):
    return {name: np.arange(rows) * (2 + k) for k, name in enumerate(NAMES)}


def keep_all(batch, rng):
    return {**batch, "drawn": rng.integers(0, 9)}


def keep_record(record, rng):
    return dict(record)


FEEDS = {
    "plain": {}, "large": {"workers": 2}, "threads": {"transform": keep_all, "workers": 2}, "decode": {"decode": keep_record},
    "processes": {"transform": Compose([]), "processes": True, "workers": 1}, "tensors": {"device": "cpu"},
    "budget": {"max_rows": 12}, "renamed": {"rename": {"x": "setdefault", "self": "clear"}},
}  # fmt: skip


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=[pytest.mark.one_way, pytest.mark.needs_core] if how == "processes" else [])
        for how in FEEDS
    ],
)
def test_columns_may_have_any_name(how):
    """Half of them are columns of rows, half of records."""
    options = {"device": "numpy", **FEEDS[how]}
    columns, rename = {**named_columns(64), "x": np.arange(64)}, options.get("rename", {})
    if how == "large":  # enough that the core's threads make batches
        columns["wide"] = np.arange(64 * 600).reshape(64, 600)
    per = dict.fromkeys(NAMES[::2], "record")
    view = mr.Records(mr.from_arrays(columns, np.arange(65), per=per))
    with mr.Feed(view, batch=8, epochs=1, order=mr.Sequential(64), **options) as feed:
        delivered = []
        for batch in feed:
            parts = [
                batch, copy.deepcopy(batch), batch.micro(1)[0], batch.to("cpu"),
                type(batch)(dict(batch.items())),
            ]  # fmt: skip
            for part in parts:
                for name, values in columns.items():
                    column = part[rename.get(name, name)]
                    column = column.values if isinstance(column, mr.Ragged) else column
                    assert np.array_equal(np.ravel(column), values[batch.samples].ravel())
                assert_marks_equal(part, batch)
            assert len(batch.values()) == len(batch.keys()) == len(batch.items()) == len(batch)
            delivered += batch.samples.tolist()
    assert sorted(delivered) == list(range(64))


def test_pytrees_keep_columns_of_any_name():
    torch_pytrees()
    batch = next(iter(mr.Feed(mr.Records(mr.from_arrays(named_columns(8))), batch=4, device="cpu")))
    again = tree_map(lambda leaf: leaf + 1, batch)
    assert again.positions.tolist() == batch.positions.tolist()
    assert all(again[name].values.tolist() == (batch[name].values + 1).tolist() for name in NAMES)


def test_whole_batches_are_not_stacked():
    """Whoever hands them to a DataLoader."""
    torch_pytrees()
    with pytest.raises(
        mr.ConfigError, match="would stack whole batches of the feed into larger ones; give it batch_size=None"
    ):
        default_collate([batch_of(), batch_of()])


def test_marks_are_dropped_by_pytrees_of_another_number_of_rows():
    torch_pytrees()
    columns = {"x": torch.arange(7), "hits": batch_of().hits.map(torch.from_numpy)}
    batch = mr.Batch(columns, positions=np.arange(7), samples=np.arange(7), valid=np.ones(7, bool))
    assert tree_map(lambda tensor: tensor[:3], batch).samples is None
    assert tree_map(lambda tensor: tensor.sum(), batch).samples is None
    assert tree_map(lambda one, other: torch.cat([one, other]), batch, batch).valid is None
    assert_marks_equal(tree_map(lambda tensor: tensor * 2, batch), batch)
    assert_marks_equal(tree_map(lambda tensor: "a name", batch), batch)
