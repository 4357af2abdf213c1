"""Batches from a queue on a device: payloads are received into pinned memory and copied as they are."""

import threading

import numpy as np
import pytest

import millrace as mr
from millrace.feed import compose
from millrace.feed.remote.worker import Functions, Lines, Worker
from millrace.queues.memory import server
from millrace.queues.open import open_queue

from .slow_gpu import SlowGpu

pytestmark = [pytest.mark.needs_core, pytest.mark.one_way]
URL = "memory://device?deadline_s=60"


def ragged(record, rng):
    return {"x": mr.Ragged.one(record["x"][: int(record["x"][0]) % 5]), "y": record["y"]}


@pytest.mark.parametrize("decode", [None, ragged])
@pytest.mark.parametrize("is_eager", [False, True])
def test_batches_are_those_of_the_host(tmp_path, monkeypatch, decode, is_eager):
    with mr.StoreWriter(tmp_path / "store", columns={"tokens": mr.Column("uint16")}) as writer:
        writer.append({"tokens": np.random.default_rng(0).integers(0, 1000, 3000, np.uint16)})
    view = mr.Blocks(mr.open_store(tmp_path / "store"), length=16)
    gpu = SlowGpu(is_eager)
    monkeypatch.setattr(compose, "Gpu", lambda device: gpu)
    server("device").flush()
    queue = open_queue(URL)
    worker = Worker(queue, "exp1", Lines(queue, "exp1", Functions(decode), [], threads=2).maker, threads=2, say=len)
    thread = threading.Thread(target=worker.serve)
    thread.start()
    while not queue.status("exp1").workers:
        pass
    options = {"batch": 8, "seed": 3, "epochs": 2, "decode": decode}
    with mr.Feed(view, device="cuda", queue=URL, run=tmp_path / "exp1", **options) as feed:
        for batch, expected in zip(feed, mr.Feed(view, device="numpy", **options), strict=True):
            gpu.queue("loop", lambda batch=batch, expected=expected: check(batch, expected))
            gpu.run("loop", len(gpu.queues["loop"]))  # the kernel, after the copy that it waits for
        report = feed.report()
    assert report.made_by_workers == report.batches
    thread.join()


def check(batch, expected):
    assert batch.positions.tolist() == expected.positions.tolist()
    for name, value in dict.items(expected):
        own = batch[name]
        if isinstance(value, mr.Ragged):
            assert own.offsets.tolist() == value.offsets.tolist()
            own, value = own.values, value.values
        assert own.tolist() == value.tolist()
