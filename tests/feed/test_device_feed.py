"""Whole feeds on a device: every way of making batches, through pinned memory, against the same feed on the host."""

import contextlib
import ctypes
import gc
import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

import millrace as mr
from millrace.feed import compose
from millrace.feed.ahead.threads import Threads
from millrace.gather.core_gather import Native
from millrace.store import platform, reader

from .slow_gpu import SIDE, SlowGpu

pytestmark = [pytest.mark.needs_core, pytest.mark.one_way]
DEPTH = 3


@pytest.fixture(params=[False, True], ids=["late", "eager"])
def gpu(request, monkeypatch):
    found = SlowGpu(request.param)
    monkeypatch.setattr(compose, "Gpu", lambda device: found)
    return found


class OwnWindows(mr.Windows):
    """Without a plan: only Python knows it."""

    def spans(self, samples, axis=None):
        return super().spans(samples, axis)


def augment(batch, rng):
    """Columns of many types; the sizes of some change from batch to batch."""
    count = int(batch.positions[0]) % 5
    lengths = np.arange(len(batch.x)) % (count + 1)
    return {
        "x": batch.x * 2,
        "flipped": batch.x[:, ::-1],
        "tensor": torch.from_numpy(batch.y).to(torch.bfloat16),
        "wide": np.ones((len(batch.x), count), bool),
        "ragged": mr.Ragged(rng.uniform(int(lengths.max()) + 1)[:, 0].repeat(lengths), np.cumsum([0, *lengths])),
        "name": [f"sample {sample}" for sample in batch.samples],
    }


def windows(kind=mr.Windows, features=3, horizon=1):
    values = np.random.default_rng(0).normal(size=(500, features)).astype(np.float32)
    return kind(mr.from_arrays({"values": values}), lookback=4, horizon=horizon)


def records():
    offsets = np.concatenate(([0], np.cumsum(np.random.default_rng(1).integers(0, 30, 200))))
    return mr.Records(mr.from_arrays({"hits": np.arange(offsets[-1]), "label": np.arange(200)}, offsets))


HOWS = {
    "ring": {"view": windows()},
    "together": {"view": windows(features=16, horizon=4)},  # columns of whole lines: batches share a slot
    "ragged": {"view": records()},
    "transform": {"view": windows(), "transform": augment, "workers": 2},
    "numpy": {"view": windows(OwnWindows)},
}


def feed_of(how, device, **options):
    return mr.Feed(**HOWS[how], batch=8, seed=3, depth=DEPTH, device=device, **options)


def flat(batch):
    found = {}
    for name, value in batch.items():
        if isinstance(value, mr.Ragged):
            found |= {f"{name}.values": value.values, f"{name}.offsets": value.offsets}
        else:
            found[name] = value
    return found


def snapshot(batch):
    return {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in flat(batch).items()}


def check_equal(found, wanted):
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)
        else:
            assert found[name] == value


def test_a_copy_waits_for_no_recent_step_also_if_batches_are_never_ready(gpu, monkeypatch):
    """With two pieces of memory each copy would wait for the step before it."""
    take = Threads.take
    monkeypatch.setattr(Threads, "take", lambda self, batch, wait=True: take(self, batch) if wait else None)
    for batch in itertools.islice(feed_of("transform", "cuda"), 20):
        assert batch.positions is not None
    assert gpu.allocated.count(max(gpu.allocated)) == 3  # the first ones were too small


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("lag", [0, 20])
def test_every_way_gives_the_batches_of_the_host(how, lag, gpu):
    """Kernels read their batch as many steps late as the GPU is behind; nothing but the kernel knows where it lies."""
    read, ends, most = [], [], 0
    wanted = [(b.positions.tolist(), snapshot(b)) for b in itertools.islice(feed_of(how, "cpu"), 120)]
    feed = feed_of(how, "cuda")
    for number, batch in enumerate(itertools.islice(feed, 120)):
        assert batch.positions.tolist() == wanted[number][0]
        tensors, rest = flat(batch), {k: v for k, v in flat(batch).items() if not isinstance(v, torch.Tensor)}
        bare = {k: (v.data_ptr(), v.dtype, v.shape) for k, v in tensors.items() if k not in rest}
        gpu.queue("loop", lambda bare=bare, rest=rest: read.append({k: peek(*b) for k, b in bare.items()} | rest))
        ends.append(len(gpu.queues["loop"]))
        del batch, tensors
        if number >= lag:
            gpu.run("loop", ends[number - lag])
        most = max(most, gpu.num_alive)
    gpu.run("loop", len(gpu.queues["loop"]))
    for found, (_, other) in zip(read, wanted, strict=True):
        check_equal({name: found[name] for name in other}, other)
    assert most <= 2 * DEPTH + 1
    sizes_grow = how in ("ragged", "transform")
    assert len(gpu.host) <= (5 if sizes_grow else 1) * (2 * DEPTH + 1)
    feed.close()


def peek(address, dtype, shape):
    count = int(np.prod(shape)) * dtype.itemsize
    raw = bytearray((ctypes.c_char * count).from_address(address)) if count else bytearray()
    return torch.frombuffer(raw, dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("how", HOWS)
def test_held_batches_stay_as_they_were(how, gpu):
    held = list(itertools.islice(feed_of(how, "cuda"), 40))
    gpu.run("loop", len(gpu.queues["loop"]))
    for batch, other in zip(held, feed_of(how, "cpu"), strict=False):
        check_equal(flat(batch), snapshot(other))


def test_a_transform_is_packed_by_its_threads(gpu):
    """The loop's own thread asks for no memory of the host."""
    threads, ask = set(), gpu.host_memory

    def host_memory(num_bytes):
        threads.add(threading.current_thread().name.rsplit("-", 1)[0])
        return ask(num_bytes)

    gpu.host_memory = host_memory
    for _ in itertools.islice(feed_of("transform", "cuda"), 30):
        pass
    assert threads == {"millrace-transform"}


@pytest.mark.parametrize("size", [4, 8])  # alone in a slot, and together
def test_an_error_comes_with_its_own_batch(size, gpu, tmp_path):
    with mr.StoreWriter(tmp_path / "store", columns={"tokens": mr.Column("uint16")}, shard_bytes=64) as writer:
        for k in range(8):
            writer.append({"tokens": np.full(32, k, np.uint16)})
    view = mr.Blocks(mr.open_store(tmp_path / "store"), length=4)
    victim = sorted((tmp_path / "store" / "shards").iterdir())[3] / "tokens.u16"
    os.chmod(victim, 0o644)
    os.truncate(victim, 10)
    got = []
    with pytest.raises(mr.StoreCorrupt, match=r"tokens\.u16"):
        got.extend(b.positions[0] for b in mr.Feed(view, batch=size, order=mr.Sequential(63), device="cuda", workers=2))
    assert got == list(range(0, 23 - size, size))  # sample 23 reaches one row into the shard


def test_an_error_comes_with_its_own_batch_where_no_maps_are_left(gpu, tmp_path, monkeypatch):
    """Batches that shared a slot are made alone; another feed has taken the maps that they would need."""
    for name in "ab":
        with mr.StoreWriter(tmp_path / name, columns={"tokens": mr.Column("uint16")}, shard_bytes=64) as writer:
            for k in range(40):
                writer.append({"tokens": np.full(32, k, np.uint16)})
    gc.collect()
    monkeypatch.setattr(reader, "MAX_MAPS", platform.num_maps() + 60)  # which are of all stores
    views = [mr.Blocks(mr.open_store(tmp_path / name), length=4) for name in "ab"]
    victim = sorted((tmp_path / "a" / "shards").iterdir())[3] / "tokens.u16"
    os.chmod(victim, 0o644)
    os.truncate(victim, 10)
    batches = iter(mr.Feed(views[0], batch=8, order=mr.Sequential(len(views[0])), device="cuda", workers=1))
    while not batches.report().fill_s:  # until its first slot is found wrong
        time.sleep(0.01)
    other = iter(mr.Feed(views[1], batch=64, device="cuda"))
    for _ in range(6):
        next(other)
    got = []
    with pytest.raises(mr.StoreCorrupt, match=r"tokens\.u16"):
        got.extend(batch.positions[0] for batch in batches)
    assert got == [0, 8]
    other.close()


@pytest.mark.parametrize("how", ["ring", "together"])
def test_what_a_handler_of_a_signal_raises_reaches_the_loop(how, gpu, monkeypatch):
    give, ended = Native.give, threading.Event()

    def slow(*arguments):
        if threading.current_thread() is not threading.main_thread():
            ended.wait(1)
        return give(*arguments)

    def ring(*_):
        raise TimeoutError("no batch for a while")

    monkeypatch.setattr(Native, "give", slow)
    before = signal.signal(signal.SIGALRM, ring)
    batches = iter(feed_of(how, "cuda", workers=1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError, match="no batch for a while"):
            all(time.sleep(0.01) is None for _ in batches)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        ended.set()
        batches.close()


def test_an_error_of_a_transform_comes_with_its_own_batch(gpu):
    def fail(batch, rng):
        if batch.positions[0] == 40:
            raise KeyError("my bug")
        return batch

    got = []
    with pytest.raises(mr.StageFailed, match="my bug"):
        got.extend(b.positions[0] for b in mr.Feed(windows(), batch=8, device="cuda", transform=fail, workers=2))
    assert got == [0, 8, 16, 24, 32]


def test_more_shards_than_may_be_mapped_are_read_instead(gpu, tmp_path):
    with mr.StoreWriter(tmp_path / "store", columns={"tokens": mr.Column("uint16")}, shard_bytes=64) as writer:
        for k in range(50):
            writer.append({"tokens": np.full(32, k, np.uint16)})
    view = mr.Blocks(mr.open_store(tmp_path / "store"), length=4)
    expected = [batch.x.copy() for batch in mr.Feed(view, batch=16, epochs=2, device="numpy")]
    store = mr.open_store(tmp_path / "store")
    store._shards._max_maps = 20
    feed = mr.Feed(mr.Blocks(store, length=4), batch=16, epochs=2, device="cuda")
    found = list(feed)
    gpu.run("loop", len(gpu.queues["loop"]))
    assert feed.report().way == "numpy"
    assert all(np.array_equal(one.x.numpy(), other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("how", ["ring", "ragged", "transform"])
@pytest.mark.parametrize("held_for", [0, 6])
@pytest.mark.parametrize("eager", [False, True])
def test_a_loop_on_a_stream_of_its_own_reads_what_it_was_given(how, held_for, eager, monkeypatch):
    """Memory that is dropped, since batches grow or the loop holds many, is not given away under kernels of that stream."""
    gpu, read, held = SlowGpu(eager, SIDE), [], []
    monkeypatch.setattr(compose, "Gpu", lambda device: gpu)
    wanted = [snapshot(b) for b in itertools.islice(feed_of(how, "cpu"), 60)]
    feed = feed_of(how, "cuda")
    for batch in itertools.islice(feed, 60):
        tensors = {k: v for k, v in flat(batch).items() if isinstance(v, torch.Tensor)}
        bare = {k: (v.data_ptr(), v.dtype, v.shape) for k, v in tensors.items()}
        gpu.queue("side", lambda bare=bare: read.append({k: peek(*b) for k, b in bare.items()}))
        held.append(batch)
        del batch, tensors
        del held[: max(0, len(held) - held_for)]
    gpu.run("side", len(gpu.queues["side"]))
    feed.close()
    for found, other in zip(read, wanted, strict=True):
        check_equal(found, {k: v for k, v in other.items() if isinstance(v, torch.Tensor)})


def test_a_feed_that_another_thread_closes_keeps_its_memory_until_it_was_copied(gpu):
    values = np.random.default_rng(0).normal(size=(50_000, 3)).astype(np.float32)
    view = mr.Windows(mr.from_arrays({"values": values}), lookback=64, horizon=1)
    for number in range(0, 30, 3):
        feed = mr.Feed(view, batch=2048, device="cuda", depth=3, workers=1)
        iterator, got = iter(feed), threading.Event()

        def loop(iterator=iterator, got=got):
            with contextlib.suppress(mr.FeedError):
                for _ in iterator:
                    got.set()

        thread = threading.Thread(target=loop)
        thread.start()
        got.wait()
        time.sleep(0.0002 * number)
        feed.close()
        thread.join()
        del iterator, thread, loop
        gc.collect()
        waiting = [work for _, work in gpu.queues["copies"][gpu.done["copies"] :] if work is not None]
        assert not waiting
