"""Several threads on one iterator: whoever comes second is refused, and the first goes on, whichever way batches are made."""

import contextlib
import gc
import itertools
import threading
import time

import numpy as np
import pytest

import millrace as mr
from millrace.feed import compose
from millrace.feed.make import slots as ring
from millrace.native import core

from .slow_gpu import SlowGpu


class Gate:
    """Holds whoever makes a batch until it is opened."""

    def __init__(self):
        self.is_open = threading.Event()

    def through(self, function):
        def waits(*args, **options):
            self.is_open.wait()
            return function(*args, **options)

        return waits


def held_feed(how, gate, monkeypatch):
    """A feed whose first batch is not made before the gate is opened."""
    options = {"batch": 8, "device": "numpy"}
    kind = mr.Windows
    if how == "core":
        monkeypatch.setattr(ring, "new_memory", gate.through(ring.new_memory))
    elif how == "transform":
        options["transform"] = gate.through(lambda batch, rng: batch)
    elif how == "numpy":
        kind = type("Own", (mr.Windows,), {"spans": gate.through(mr.Windows.spans)})
    else:
        gpu = SlowGpu()
        gpu.host_memory = gate.through(gpu.host_memory)
        monkeypatch.setattr(compose, "Gpu", lambda device: gpu)
        options["device"] = "cuda"
    return mr.Feed(kind(mr.from_arrays({"values": np.arange(300.0)}), lookback=4, horizon=1), **options)


HOWS = ["transform", "numpy", *(["core", "device"] if core is not None else [])]


@pytest.mark.parametrize("how", HOWS)
def test_a_second_thread_is_refused_and_the_first_goes_on(how, monkeypatch):
    gate, got = Gate(), []
    iterator = iter(held_feed(how, gate, monkeypatch))
    first = threading.Thread(target=lambda: got.append(next(iterator)))
    first.start()
    while not iterator._takers:
        time.sleep(0.001)
    for _ in range(3):
        with pytest.raises(mr.FeedError, match="two threads take batches from one iterator"):
            next(iterator)
    gate.is_open.set()
    first.join()
    assert got[0].positions.tolist() == list(range(8))
    assert next(iterator).positions.tolist() == list(range(8, 16))
    iterator.close()


@pytest.mark.parametrize("how", HOWS)
def test_threads_that_try_again_share_all_batches(how, monkeypatch, at_once):
    gate, got, errors = Gate(), [], []
    gate.is_open.set()
    feed = held_feed(how, gate, monkeypatch)
    iterator = iter(feed)

    def take():
        while len(got) < 200:
            try:
                got.append(int(next(iterator).positions[0]))
            except mr.FeedError as error:
                errors.append(str(error))

    at_once(take, take, take)
    assert sorted(got) == list(range(0, 8 * len(got), 8))
    assert feed.position == 8 * len(got)
    assert all("two threads" in error for error in errors)
    feed.close()


@pytest.mark.parametrize("how", HOWS)
def test_a_batch_that_comes_after_another_thread_closed_the_feed_counts(how, monkeypatch):
    gate, got = Gate(), []
    feed = held_feed(how, gate, monkeypatch)
    iterator = iter(feed)

    def loop():
        with contextlib.suppress(mr.FeedError):  # the feed was closed while a batch was awaited
            got.extend(batch.positions[-1] for batch in iterator)

    thread, closing = threading.Thread(target=loop), threading.Thread(target=feed.close)
    thread.start()
    while not iterator._takers:
        time.sleep(0.001)
    closing.start()
    closing.join(timeout=0.1)  # where it waits for the batch, that comes first
    gate.is_open.set()
    thread.join()
    closing.join()
    assert feed.position == feed.state_dict()["position"] == 8 * len(got)


def test_an_iterator_that_could_not_be_started_tells_no_position_later(monkeypatch):
    start = threading.Thread.start

    def refused(thread):
        raise RuntimeError("can't start new thread")

    feed = held_feed("transform", gate := Gate(), monkeypatch)
    gate.is_open.set()
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start") as kept:
        iter(feed)
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in itertools.islice(feed, 5):
        pass
    feed.close()
    assert feed.position == 40
    del kept
    gc.collect()
    assert feed.position == 40


def test_what_is_collected_with_an_iterator_still_finds_where_the_feed_stands(monkeypatch):
    feed = held_feed("transform", gate := Gate(), monkeypatch)
    gate.is_open.set()
    found = []

    class Saver:
        def __del__(self):
            found.append(feed.state_dict()["position"])

    saver = Saver()
    saver.iterator, saver.own = iter(feed), saver
    for _ in itertools.islice(saver.iterator, 5):
        pass
    del saver
    gc.collect()
    assert found == [40]
