"""Packed blocks and the marks of documents, against slow twins; the core's packing against its own."""

import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.native import core
from millrace.view import packing
from millrace.view.documents import mark_numpy
from millrace.view.packing import pack, reference_pack

lengths = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(lambda own: sum(own) > 0)

WORKERS = {"processes": hasattr(os, "memfd_create"), "workers": 2}  # threads on other platforms


def store_of(lengths, **columns):
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.uint32)
    own = {name: make(len(tokens)) for name, make in columns.items()}
    return mr.from_arrays({"tokens": tokens, **own}, offsets, per=dict.fromkeys(("tokens", *own), "row"))


def expected(store, pieces, length, after):
    """One block from its pieces (record, begin, end); ``after`` gives y at the end of a piece and whether it counts."""
    block = {name: np.zeros(length, np.int64) for name in ("x", "y", "place")}
    block |= {"document": np.full(length, -1), "mask": np.zeros(length, bool)}
    tokens, at = np.asarray(store.columns["tokens"]), 0
    for number, (record, begin, end) in enumerate(pieces):
        first = int(store.offsets[record])
        for row in range(begin, end):
            block["x"][at], block["document"][at], block["place"][at] = tokens[row], number, row - first
            block["mask"][at] = row + 1 < end or after(record, end)
            at += 1
    return block


def pieces_of(view, sample):
    spans = view.spans([sample])
    rows = zip(spans.starts.tolist(), spans.stops.tolist(), strict=True)
    return [(int(np.searchsorted(view.store.offsets, begin, side="right") - 1), begin, end) for begin, end in rows]


@given(lengths=lengths, length=st.integers(1, 40))
def test_every_token_is_in_one_block_and_marks_keep_documents_apart(lengths, length):
    store = store_of(lengths)
    view = mr.Packed(store, length=length)
    blocks = view[np.arange(len(view))]
    seen = np.sort(blocks["x"][blocks["document"] >= 0])
    assert seen.tolist() == list(range(1, store.num_rows + 1))
    for sample in range(len(view)):
        pieces = pieces_of(view, sample)
        assert all(end - begin == length or end == store.offsets[record + 1] for record, begin, end in pieces)
        wanted = expected(store, pieces, length, lambda record, end: False)
        for name in ("x", "document", "place", "mask"):
            assert blocks[name][sample].tolist() == wanted[name].tolist(), name
        counts = blocks["mask"][sample]
        assert np.array_equal(blocks["y"][sample][counts], blocks["x"][sample][counts.nonzero()[0] + 1])
        assert view.records([sample])[0] == pieces[0][0]


@given(lengths=lengths, length=st.integers(1, 40), stride=st.integers(1, 9))
def test_blocks_have_the_same_marks(lengths, length, stride):
    store = store_of(lengths)
    view, plain = (mr.Blocks(store, length=length, stride=stride, documents=own) for own in (True, False))
    if not len(view):
        return
    blocks, rows = view[np.arange(len(view))], plain[np.arange(len(view))]
    assert np.array_equal(blocks["x"], rows["x"])
    assert np.array_equal(blocks["y"], rows["y"])
    for sample in range(len(view)):
        stop = sample * stride + length
        pieces = [
            (record, max(sample * stride, int(begin)), min(stop, int(end)))
            for record, (begin, end) in enumerate(zip(store.offsets[:-1], store.offsets[1:], strict=True))
            if max(sample * stride, begin) < min(stop, end)
        ]
        wanted = expected(store, pieces, length, lambda record, end: end < store.offsets[record + 1])
        for name in ("document", "place", "mask"):
            assert blocks[name][sample].tolist() == wanted[name].tolist(), name


@given(
    lengths=st.lists(st.integers(0, 300) | st.integers(0, 5000), max_size=200),
    length=st.integers(1, 70) | st.just(4096),
)
def test_the_core_packs_as_its_twin(lengths, length):
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    for one, other in zip(pack(offsets, length), reference_pack(offsets, length), strict=True):
        assert one.tolist() == other.tolist()


@pytest.mark.needs_core
@given(
    blocks=st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2**40), st.booleans()), max_size=5), max_size=4
    ),
    padding=st.integers(0, 3),
)
def test_the_core_marks_as_its_twin(blocks, padding):
    length = max([sum(piece[0] for piece in block) for block in blocks] + [1]) + padding
    pieces = [piece for block in blocks for piece in block]
    counts = np.array([len(block) for block in blocks], np.int64)
    lengths, places = (np.array([piece[k] for piece in pieces], np.int64) for k in (0, 1))
    is_last = np.array([piece[2] for piece in pieces], bool)
    found = [[np.full((len(blocks), length), 7, kind) for kind in (np.int32, np.int64, np.bool_)] for _ in range(2)]
    mark_numpy(counts, lengths, places, is_last, length, *found[0])
    core.mark_documents(counts, lengths, places, is_last, length, *found[1])
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)


def test_log_normal_documents_fill_their_blocks():
    rng = np.random.default_rng(7)
    store = store_of(np.exp(rng.normal(np.log(600), 1, 20_000)).astype(np.int64) + 1)
    view = mr.Packed(store, length=8192)
    assert view.fill > 0.999
    assert "filled" in repr(view)


@settings(max_examples=20)
@given(data=st.data())
def test_the_mask_of_the_store_is_kept(data):
    store = store_of(data.draw(lengths), mask=lambda n: (np.arange(n) % 3 != 0).astype(np.uint8))
    view = mr.Packed(store, length=data.draw(st.integers(1, 20)))
    found = view[np.arange(len(view))]
    whole = mr.Packed(
        mr.from_arrays({"tokens": np.asarray(store.columns["tokens"])}, store.offsets), length=view.length
    )
    plain = whole[np.arange(len(view))]["mask"]
    own = np.asarray(store.columns["mask"])[np.maximum(found["y"] - 1, 0)] != 0
    assert np.array_equal(found["mask"], plain & own)


def transform(batch, rng):
    return {**batch, "drawn": rng.integers(0, 1 << 30)}


def test_feeds_resume_and_explain_packed_blocks_also_in_processes():
    view = mr.Packed(store_of([5, 9, 33, 2, 2, 7, 40, 1, 1, 16]), length=16)
    options = {"batch": 4, "seed": 3, "epochs": 3, "device": "numpy", "transform": transform}
    whole = list(mr.Feed(view, **options))
    for more in ({}, WORKERS):
        first = mr.Feed(mr.from_spec(view.spec(), view.store), **options, **more)
        with first:
            next(iter(first))
        second = mr.Feed(view, **options, **more)
        second.load_state_dict(first.state_dict())
        for one, other in zip(second, whole[1:], strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in other)
    row = mr.Feed(view, **options).explain(0).rows[0]
    assert len(row["pieces"]) == len(pieces_of(view, row["sample"]))


def test_ranks_share_a_packing_in_a_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packing, "MIN_CACHED", 10)
    with mr.StoreWriter(tmp_path / "store", kind="text", columns={"tokens": mr.Column("uint16")}) as writer:
        writer.extend({"tokens": np.arange(600, dtype=np.uint16)}, np.arange(0, 601, 6))
    store = mr.open_store(tmp_path / "store")
    first = mr.Packed(store, length=16)
    (folder,) = (tmp_path / "cache").iterdir()
    monkeypatch.setattr(packing, "pack", None)  # the second takes the first one's
    second = mr.Packed(store, length=16)
    assert np.array_equal(second[[0, 5]]["x"], first[[0, 5]]["x"])
    monkeypatch.undo()
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packing, "MIN_CACHED", 10)
    data = (folder / "documents.npy").read_bytes()
    for damaged in (data[:-4] + b"\0\0\0\0", data[:-9], b""):  # made again
        (folder / "documents.npy").write_bytes(damaged)
        assert np.array_equal(mr.Packed(store, length=16)[[0, 5]]["x"], first[[0, 5]]["x"])
        assert (folder / "documents.npy").read_bytes() == data
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_cu_seqlens_of_arrays_and_tensors():
    torch = pytest.importorskip("torch")
    document = mr.Packed(store_of([5, 9, 2, 2, 7]), length=16)[[0, 1]]["document"]
    ends = mr.cu_seqlens(document)
    assert ends.dtype == np.int32
    assert np.array_equal(mr.cu_seqlens(torch.from_numpy(document)).numpy(), ends)
    flat = document.reshape(-1)
    for begin, end in pairwise(ends):
        assert len(set(flat[begin:end].tolist())) == 1
    assert ends[-1] == flat.size


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(mr.ConfigError, match="length=0"):
        mr.Packed(store_of([3]), length=0)
    with pytest.raises(mr.ConfigError, match="Packed needs a row column of single integers"):
        mr.Packed(mr.from_arrays({"values": np.zeros((4, 2))}), length=4)
