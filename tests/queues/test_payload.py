"""A payload is the batch that was asked for, byte for byte, or it is refused: whatever it holds, nothing else happens."""

import json
import pickle

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.feed.processes.packing import HEAD_BYTES, Layout
from millrace.feed.remote import payload
from millrace.feed.remote.payload import CHECKSUM, PREFIX, SIZES, PayloadRefused, Stamp, pack, unpack

STAMP = Stamp("11" * 16, "a0-1", "22" * 16, "33" * 16, "44" * 16, "55" * 16)
N = 6


def a_batch():
    marks = {"positions": np.arange(N), "samples": np.arange(N) * 7, "valid": np.ones(N, bool)}
    ragged = mr.Ragged(np.arange(9.0), np.array([0, 2, 2, 5, 5, 8, 9]))
    x, names = np.arange(N * 4, dtype=np.int32).reshape(N, 4), [f"n{k}" for k in range(N)]
    return mr.Batch({"x": x, "r": ragged, "name": names, "values": x + 1, "positions": x + 2, "_marks": x + 3}, **marks)


def memory(size):
    return np.empty(size, np.uint8)


def packed(**options):
    return np.frombuffer(bytes(pack(a_batch(), STAMP, 0, memory, **options)), np.uint8).copy()


def read(data):
    text, area = unpack(data, STAMP.prefix(0, N), memory)
    return Layout(text).batch(area)


def sealed(data, text=None, sizes=None):
    """With another text or sizes, and a checksum that fits: what only an attacker makes."""
    data = bytearray(data)
    flags, text_bytes, num_bytes = SIZES.unpack_from(data, PREFIX.size)
    if text is not None:
        data[num_bytes:] = text
        text_bytes = len(text)
    SIZES.pack_into(data, PREFIX.size, *(sizes or (flags, text_bytes, num_bytes)))
    check = xxhash.xxh3_128(bytes(data[:CHECKSUM]))
    check.update(bytes(data[HEAD_BYTES:]))
    data[CHECKSUM : CHECKSUM + 16] = check.digest()
    return np.frombuffer(bytes(data), np.uint8)


@pytest.mark.parametrize("compress", [False, True])
def test_a_batch_comes_back_as_it_was(compress):
    batch, expected = read(packed(compress=compress)), a_batch()
    assert batch["name"] == expected["name"]
    for name in ("x", "positions", "samples", "valid"):
        assert getattr(batch, name).tolist() == getattr(expected, name).tolist()
    for name in ("values", "positions", "_marks"):  # of attributes too
        assert batch[name].tolist() == expected[name].tolist()
    assert batch["r"].values.tolist() == expected["r"].values.tolist()
    assert batch["r"].offsets.tolist() == expected["r"].offsets.tolist()
    assert packed().tobytes() == packed().tobytes()


@given(data=st.data())
@pytest.mark.parametrize("compress", [False, True])
def test_any_changed_byte_and_any_cut_is_refused(compress, data):
    good = packed(compress=compress)
    if data.draw(st.booleans()):
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    else:
        bad, place = good.copy(), data.draw(st.sampled_from([*range(CHECKSUM + 16), *range(HEAD_BYTES, len(good))]))
        bad[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PayloadRefused):
        read(bad)


@given(st.binary(max_size=2000))
def test_any_bytes_are_refused(data):
    for start in (b"", STAMP.prefix(0, N)):
        with pytest.raises(PayloadRefused):
            read(np.frombuffer(start + data, np.uint8))


def test_pickles_are_never_loaded(tmp_path):
    class Touch:
        def __reduce__(self):
            return open, (str(tmp_path / "made"), "w")

    data = pickle.dumps(Touch())
    for bad in (data, data.ljust(HEAD_BYTES, b".")):
        with pytest.raises(PayloadRefused):
            read(np.frombuffer(bad, np.uint8))
    with pytest.raises(PayloadRefused):
        read(sealed(packed(), text=data))
    assert not (tmp_path / "made").exists()


TEXT = json.loads(bytes(packed())[SIZES.unpack_from(packed(), PREFIX.size)[2] :])
KIND, DTYPE, SHAPE, BEGIN = TEXT[1]["x"]
HOSTILE = [
    [KIND, DTYPE, [1 << 60, 4], BEGIN], [KIND, DTYPE, [N, 1 << 62], BEGIN], [KIND, DTYPE, [N, -4], BEGIN], [KIND, DTYPE, [], BEGIN],
    [KIND, DTYPE, SHAPE, 1 << 62], [KIND, DTYPE, SHAPE, -8], [KIND, DTYPE, SHAPE, 0], [KIND, DTYPE, SHAPE, 1.5],
    [KIND, "O", SHAPE, BEGIN], [KIND, "|O8", [N], BEGIN], [KIND, "<i4,<f8", SHAPE, BEGIN], [KIND, "V16", [N], BEGIN],
    ["torch.load", DTYPE, SHAPE, BEGIN], ["torch.float33", DTYPE, SHAPE, BEGIN], ["eval", DTYPE, SHAPE, BEGIN],
    ["list", str(1 << 60), [N], BEGIN], ["list", "-5", [N], BEGIN], ["text", "9", [1 << 40], BEGIN],
    [KIND, DTYPE, [N - 1, 4], BEGIN],
    [[KIND, DTYPE, SHAPE, BEGIN], [KIND, "<i8", [N + 1], BEGIN]], [[KIND, DTYPE, SHAPE, BEGIN]], [[[]]], {}, None, 7, "x", [],
]  # fmt: skip


@pytest.mark.parametrize("entry", HOSTILE, ids=str)
def test_hostile_tables_are_refused(entry, monkeypatch):
    monkeypatch.setattr(Layout, "__init__", lambda self, text: pytest.fail("it was believed"))
    with pytest.raises(PayloadRefused):
        read(sealed(packed(), text=json.dumps([N, {"x": entry}]).encode()))


@given(offset=st.integers(0, N), by=st.integers(-(2**62), 2**62).filter(bool))
def test_offsets_that_lead_elsewhere_are_refused(offset, by):
    data = packed()
    begin = TEXT[1]["r"][1][3]
    data[begin : begin + 8 * (N + 1)].view("<i8")[offset] += by
    try:
        batch = read(sealed(data))
    except PayloadRefused:
        return
    assert [len(item) for item in batch["r"]] == np.diff(batch["r"].offsets).tolist()  # another, but in order
    assert batch["r"].offsets[-1] == len(batch["r"].values)


@pytest.mark.parametrize("text", [b"", b"[" * 60_000, b"{}", b"[6]", b'[6,{"_marks":[]}]', b"[true,{}]", b"[1e99,{}]"])
def test_hostile_texts_are_refused(text):
    with pytest.raises(PayloadRefused):
        read(sealed(packed(), text=text))


@pytest.mark.parametrize("sizes", [(0, 5, 1 << 62), (7, 5, 600), (0, 1 << 31, 600), (1, 100, 1000), (0, 0, 0)])
def test_sizes_are_refused_before_anything_is_allocated(sizes, monkeypatch):
    data = sealed(packed(), sizes=sizes)
    monkeypatch.setattr(payload, "_check_text", lambda *given: pytest.fail("it was believed"))
    monkeypatch.setattr(np, "empty", lambda *given: pytest.fail("it was allocated"))
    with pytest.raises(PayloadRefused):
        unpack(data, STAMP.prefix(0, N), lambda size: pytest.fail("it was allocated"))


@pytest.mark.parametrize("field", range(len(STAMP)))
def test_what_belongs_to_something_else_is_refused_by_name(field):
    other = STAMP._replace(**{STAMP._fields[field]: "b1-9" if STAMP._fields[field] == "attempt" else "ab" * 16})
    with pytest.raises(PayloadRefused, match=r"another (run|attempt|store|view|order|transform)"):
        unpack(packed(), other.prefix(0, N), memory)
    with pytest.raises(PayloadRefused, match="another first position"):
        unpack(packed(), STAMP.prefix(6, N), memory)
