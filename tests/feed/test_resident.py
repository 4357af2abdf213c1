"""tier="device": the batches, marks and states of every other tier. The device here computes with torch on the host."""

import copy
import itertools
import threading

import numpy as np
import pytest
import torch

import millrace as mr
from millrace.feed import compose
from millrace.gather.gather import new_array
from millrace.gather.reference import Reference
from millrace.testing import tiny_series, tiny_text

from .slow_gpu import LOOP, SIDE, PromptGpu

pytestmark = [pytest.mark.needs_core, pytest.mark.one_way]
TYPES = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
TYPES += ["bool", "float16", "float32", "float64", "bfloat16"]


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    found = PromptGpu()
    monkeypatch.setattr(compose, "Gpu", lambda device: found)
    return found


def offsets_of(count, most, seed=1):
    return np.concatenate(([0], np.cumsum(np.random.default_rng(seed).integers(0, most, count))))


def series(rows=700, features=16, seed=0):
    values = np.random.default_rng(seed).normal(size=(rows, features)).astype(np.float32)
    return mr.from_arrays({"values": values}, np.array([0, 90, 93, 400, rows]))


def tokens(count, seed=0):
    return mr.from_arrays({"tokens": np.random.default_rng(seed).integers(0, 65_536, count).astype(np.uint16)})


def every_type(path):
    """Records of every type, their bits all different, with two axes and a matrix per row."""
    columns = {name: mr.Column(name, (3,) if name == "float64" else ()) for name in TYPES}
    columns |= {"pixels": mr.Column("uint8", (2, 2), axis="pixels"), "label": mr.Column("float16", per="record")}
    offsets, pixels = offsets_of(60, 40), offsets_of(60, 9, 2)
    bits = np.random.default_rng(3).integers(0, 256, (int(offsets[-1]), 24), np.uint8)
    with mr.StoreWriter(path, columns=columns, shard_bytes=6_000) as writer:
        for k in range(60):
            own = bits[offsets[k] : offsets[k + 1]]
            record = {name: _as_type(name, own) for name in TYPES}
            record["pixels"] = np.arange(4 * pixels[k], 4 * pixels[k + 1]).reshape(-1, 2, 2).astype(np.uint8)
            writer.append({**record, "label": np.float16(k)})
    return mr.open_store(path)


def _as_type(name, own):
    if name == "bool":
        return own[:, 0] % 2 == 0
    if name == "bfloat16":
        return np.float32(own[:, 0]) / 16
    size = np.dtype(name).itemsize * (3 if name == "float64" else 1)
    found = np.ascontiguousarray(own[:, :size]).view(name)
    return found if name == "float64" else found[:, 0]


FILL = {
    "bool": True, "int8": -128, "uint8": 255, "uint16": -100, "uint64": 2**64 - 1, "int64": -100, "float16": -0.0,
    "bfloat16": "nan", "float32": "-inf", "float64": 0.1, "pixels": 7,
}  # fmt: skip
VIEWS = {
    "windows": lambda path: mr.Windows(series(), lookback=4, horizon=4, lead=2, target=[3]),
    "picked": lambda path: mr.Windows(series(), lookback=5, horizon=1, inputs=[5, 2, 9], target=[4, 5]),
    "by time": lambda path: mr.Windows(tiny_series(path).split("val"), lookback=5, horizon=2, include=["time"]),
    "tokens": lambda path: mr.Blocks(tiny_text(path).split("train"), length=8, stride=3),
    "records": lambda path: mr.Records(every_type(path)),
    "padded": lambda path: mr.Records(every_type(path), pad=12, mask=True),
    "filled": lambda path: mr.Records(every_type(path), pad=12, fill=FILL),
    "where": lambda path: mr.Records(every_type(path).where("label > 20"), columns=["float16", "label"]),
    "subset": lambda path: mr.Subset(mr.Windows(series(), lookback=4, horizon=4), np.arange(600)[::-2]),
    "mask": lambda path: mr.Subset(mr.Blocks(tokens(3_000), length=64, stride=2), np.arange(1_468) % 3 != 1),
    "concat": lambda path: mr.Concat([mr.Blocks(tokens(n, n), length=32, stride=s) for n, s in ((900, 2), (400, 1))]),
    "mixture": lambda path: mr.Mixture([(mr.Blocks(tokens(n, n), length=32, stride=1), n) for n in (900, 400)]),
}
PARTS = {"whole": None, "part": 7_000, "none": 1}


def feeds(view, **options):
    made = {"batch": 12, "seed": 3, **options}
    part = {"device_bytes": made.pop("device_bytes", None)}
    return mr.Feed(view, device="numpy", **made), mr.Feed(view, device="cuda", tier="device", **part, **made)


def check_same(one, other):
    assert list(one) == list(other)
    for mark in ("positions", "samples", "valid"):
        np.testing.assert_equal(getattr(other, mark), getattr(one, mark))
    for name, value in one.items():
        found = other[name]
        pairs = [(value, found)]
        if isinstance(value, mr.Ragged):
            pairs = [(value.values, found.values), (value.offsets, found.offsets)]
        for wanted, tensor in pairs:
            array = tensor.numpy()
            assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape), name
            assert array.tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", VIEWS)
def test_batches_and_states_are_those_of_the_host(tmp_path, kind, part):
    """All batches are held to the end; then each feed goes on where the other one stands."""
    view = VIEWS[kind](tmp_path / "store")
    options = {"device_bytes": PARTS[part], "epochs": None if kind == "mixture" else 2}
    host, there = feeds(view, **options)
    for count in (5, 40):
        pairs = list(zip(itertools.islice(host, count), list(itertools.islice(there, count)), strict=True))
        for one, other in pairs:
            check_same(one, other)
        host.close(), there.close()
        report, states = there.report(), (host.state_dict(), there.state_dict())
        assert states[0] == states[1]
        assert report.way == "resident"
        if part != "part":
            assert report.hit_rate == 1.0 if part == "whole" else report.hit_rate < 0.2
        host, there = feeds(view, **options)
        host.load_state_dict(states[1]), there.load_state_dict(states[0])


@pytest.mark.parametrize("device_bytes", [None, 20_000])
@pytest.mark.parametrize("last", ["pad", "drop", "short"])
def test_last_batches_ranks_and_passes(last, device_bytes):
    view = mr.Windows(series(), lookback=4, horizon=4)
    for rank, world in ((0, 1),) if last == "short" else ((0, 1), (1, 3)):
        host, there = feeds(view, batch=30, epochs=2, last=last, rank=rank, world=world, device_bytes=device_bytes)
        for one, other in zip(host, list(there), strict=True):
            check_same(one, other)
        host, there = feeds(view, batch=30, last=last, rank=rank, world=world, device_bytes=device_bytes)
        passes = host.by_epoch(), there.by_epoch()
        for _ in range(2):
            for one, other in zip(*passes, strict=True):
                check_same(one, other)


def test_rows_are_loaded_once_and_slots_are_used_again(gpu, tmp_path):
    """Feeds of the same rows share them; the places of many batches take as many slots as those of a few."""
    view = mr.Windows(tiny_series(tmp_path / "store"), lookback=5, horizon=2)
    _, one = feeds(view)
    for _ in itertools.islice(one, 2_000):
        pass
    assert len(gpu.allocated) <= 6
    _, other = feeds(view, seed=4)
    next(iter(other))
    assert other.residency.held[0] is one.residency.held[0]
    twin = copy.copy(mr.Feed(view, batch=4, device="cuda", tier="device", device_bytes="1kB"))
    assert (twin.tier, twin.device_bytes) == ("device", 1_000)
    expected = view[np.arange(len(view))]["x"]
    for path in (tmp_path / "store").rglob("values.f32"):
        path.unlink()  # nothing is read from the files any more
    one.close()
    batch = next(iter(one))
    np.testing.assert_equal(batch.x.numpy(), expected[batch.samples])


def test_the_most_used_rows_are_held(tmp_path):
    """A mixture draws mostly from a small store: its rows come first, and the hits are counted."""
    large, small = (mr.Blocks(tokens(n, n), length=32, stride=1) for n in (4_000, 1_000))
    view = mr.Mixture([(large, 1), (small, 3)])
    feed = mr.Feed(view, batch=32, seed=1, device="cuda", tier="device", device_bytes=2_000)
    for _ in itertools.islice(feed, 64):
        pass
    report = feed.report()
    assert (report.held_bytes, report.row_bytes) == (2_000, 10_000)
    assert report.hit_rate == pytest.approx(0.75, abs=0.01)
    assert "75.0% of the samples lay on the GPU, which holds 2,000 of 10,000 bytes" in str(report)


def test_a_loop_that_changes_its_stream_waits_for_the_group(gpu):
    """Batches of a group were gathered on the stream before: the next one follows it, and the allocator hears of it."""
    followed = []
    gpu.follow = lambda stream, other, event: followed.append((stream, other))
    view = mr.Windows(series(), lookback=4, horizon=4)
    host, there = feeds(view)
    for number, (one, other) in enumerate(zip(host, there, strict=False)):
        check_same(one, other)
        gpu.stream = SIDE if number == 2 else gpu.stream
        if number == 6:
            break
    assert followed == [(SIDE, LOOP)]


def test_columns_may_be_used_for_training_after_inference_mode():
    view = mr.Windows(series(), lookback=4, horizon=4)
    batches = iter(feeds(view)[1])
    with torch.inference_mode():
        next(batches)
    weight = torch.ones(1, requires_grad=True)
    (next(batches).x * weight).sum().backward()


@pytest.mark.parametrize("kind", ["windows", "records"])
def test_places_are_the_same_with_and_without_the_core(tmp_path, kind):
    feed = feeds(VIEWS[kind](tmp_path / "store"))[1]
    next(iter(feed))
    twin, samples = feed.residency.twin, np.arange(40)[::-1].copy()
    spans = {field.axis: twin.spans(samples, field.axis) for field in twin.fields if field.axis is not None}
    found = twin.located(samples).fill(0, 40)
    wanted = Reference(twin._sources, twin.fields, spans, samples).fill(0, 40, new_array)
    assert any(name.startswith("start") for name in found)
    np.testing.assert_equal(found, wanted)


def test_two_feeds_in_threads_load_rows_once(gpu):
    view, sums = mr.Windows(series(), lookback=4, horizon=4), []

    def loop():
        sums.append(sum(float(batch.y.sum()) for batch in feeds(view, epochs=1)[1]))

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums[0] == sums[1]


def test_what_cannot_be_is_refused_with_a_remedy(gpu, tmp_path):
    view = mr.Windows(series(), lookback=4, horizon=4)

    def refused(message, view=view, **options):
        with pytest.raises(mr.ConfigError, match=message):
            next(iter(mr.Feed(view, **{"batch": 8, "device": "cuda", "tier": "device", **options})))

    refused("device='cpu'; rows lie on a GPU: give device='cuda'", device="cpu")
    refused("with transform=: batches are made on the GPU.*tier='ram'", transform=lambda batch, rng: batch)
    refused("with processes=", processes=True)
    refused("with max_rows=", mr.Records(series()), max_rows=400)
    refused("device_bytes=5 is for tier='device', not tier='ram'", tier="ram", device="cpu", device_bytes=5)
    refused("device_bytes='a lot'; expected a size", device_bytes="a lot")
    refused(r"samples of Blocks\(documents=True\)", mr.Blocks(tokens(900), length=8, documents=True))
    refused("store 'y' in different types", mr.Concat([view, mr.Windows(series(), lookback=4, horizon=4, lead=1)]))
    refused("no text columns.*take tier='ram'", mr.Records(tiny_series(tmp_path / "store"), columns=["time", "name"]))
    gpu.free_bytes = (256 << 20) + 40_000
    refused("needs 44,800 bytes on the GPU for the rows of this view, and 40,000 are free.*device_bytes=.*'ram'")
    next(iter(mr.Feed(view, batch=8, device="cuda", tier="device", device_bytes=40_000)))
