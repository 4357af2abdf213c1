"""Any change of manifest or shard table: only our own errors, little memory, nothing opened outside."""

import copy
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr

names = st.sampled_from(
    ["../x", "/etc/passwd", "a\0b", "", "..", "int8", "float64", "rows", "pixels", "x", "train", "record"]
)
wild_text = names | st.text(max_size=8) | st.text(st.characters(), max_size=4)  # the last with lone surrogates
wild_ints = st.integers(0, 9) | st.integers() | st.sampled_from([-1, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30])
wild = st.recursive(
    st.none() | st.booleans() | wild_ints | st.floats() | wild_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(wild_text, inner, max_size=3),
    max_leaves=6,
)


def places(tree, path=()):
    yield path
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def mutate(data, body):
    """Replaces, removes or adds one value anywhere in the tree."""
    path = data.draw(st.sampled_from([path for path in places(body) if path]))
    parent = body
    for key in path[:-1]:
        parent = parent[key]
    match data.draw(st.sampled_from(["replace", "remove", "add"])):
        case "replace":
            parent[path[-1]] = data.draw(wild)
        case "remove":
            del parent[path[-1]]
        case "add" if isinstance(parent, dict):
            parent[data.draw(wild_text)] = data.draw(wild)
        case "add":
            parent.insert(data.draw(st.integers(0, len(parent))), data.draw(wild))


@pytest.fixture(scope="module")
def read_or_refuse(shared_victim, opened, lies_inside):
    """Reads everything, or gives the error of ours; fails on any other, on much memory, on a path outside."""

    def attempt() -> mr.MillraceError | None:
        tracemalloc.start()
        refusal = None
        try:
            with opened() as paths:
                try:
                    read_everything(mr.open_store(shared_victim.path))
                except mr.MillraceError as error:
                    refusal = error
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 20 * (shared_victim.path / "store.json").stat().st_size + (4 << 20)
        assert all(lies_inside(path, shared_victim.path) for path in paths), paths
        str(refusal).encode()  # can be printed
        return refusal

    shared_victim.reset()
    assert attempt() is None
    return attempt


def read_everything(store: mr.Store) -> None:
    for axis in store.axes:
        store.axis_offsets(axis)
    for column in store.columns.values():
        np.asarray(column)
    for split in store.splits:
        assert store.split(split).fingerprint


@settings(max_examples=400)
@given(data=st.data())
def test_any_change_of_the_manifest_is_read_or_refused(shared_victim, read_or_refuse, data):
    body = copy.deepcopy(shared_victim.body)
    for _ in range(data.draw(st.integers(1, 3))):
        if body:
            mutate(data, body)
    shared_victim.reset()
    shared_victim.forge(body)  # rightly signed, so that the lie is met by the checks behind the checksum
    read_or_refuse()
    shared_victim.reset()


def flipped(data, raw: bytes) -> bytes:
    changed = bytearray(raw)
    bits = data.draw(st.sets(st.integers(0, 8 * len(raw) - 1), min_size=1, max_size=4))
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@settings(max_examples=200)
@given(data=st.data())
def test_flipped_bits_of_the_manifest_are_refused_unless_it_says_the_same(shared_victim, read_or_refuse, data):
    raw = flipped(data, shared_victim.manifest)
    shared_victim.reset()
    shared_victim.put("store.json", raw)
    assert isinstance(read_or_refuse(), mr.StoreError) or json.loads(raw) == shared_victim.body  # white space
    shared_victim.reset()


@settings(max_examples=200)
@given(data=st.data())
def test_flipped_bits_of_the_shard_table_are_refused(shared_victim, read_or_refuse, data):
    shared_victim.reset()
    shared_victim.put("shards.bin", flipped(data, shared_victim.table))
    assert isinstance(read_or_refuse(), mr.StoreCorrupt)
    shared_victim.reset()


@settings(max_examples=200)
@given(data=st.data())
def test_a_forged_shard_table_is_refused_by_its_sums(shared_victim, read_or_refuse, data):
    shared_victim.reset()
    shared_victim.forge(shared_victim.body, flipped(data, shared_victim.table))
    assert isinstance(read_or_refuse(), mr.StoreCorrupt)
    shared_victim.reset()
