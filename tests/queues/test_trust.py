"""A worker compares its copy of the store with its hashes: what is damaged there never reaches the loop."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.feed.remote.record import Record, ticket_of
from millrace.feed.remote.worker import Functions, Lines, Worker
from millrace.queues.address import read_address
from millrace.queues.memory import MemoryQueue, Server
from millrace.queues.protocol import Offer
from millrace.store import checked_copy
from millrace.testing import tiny_records, tiny_series
from millrace.view.spec import view_arrays

from .conftest import until


@pytest.fixture
def blocks_read(monkeypatch):
    """The blocks that were compared: the shard and name of the file, and the number."""
    compared, real = [], checked_copy.check_block

    def check(fd, num_bytes, block, expected):
        compared.append(("/".join(os.readlink(f"/proc/self/fd/{fd}").split("/")[-2:]), block))
        return real(fd, num_bytes, block, expected)

    monkeypatch.setattr(checked_copy, "check_block", check)
    return compared


def copy_of(store, folder, damaged=None, at=0):
    """A copy of a store; one byte of every file of this name is another."""
    shutil.copytree(store.path, folder)
    for path in Path(folder).rglob(damaged) if damaged else ():
        os.chmod(path, 0o644)
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
    return str(folder)


def worker_of(view, copy, batches=3, trust="noted"):
    """A worker with a copy of the store, and what it put for the first batches: None for those left to the trainer."""
    feed, queue = mr.Feed(view, batch=4, seed=3, device="numpy"), MemoryQueue(Server(), read_address("memory://here"))
    line = feed.line(0, None)
    tickets = [ticket_of(line, "a0-1", batch) for batch in range(batches)]
    for key, ids in view_arrays(view).items():
        queue.put_array("exp1", key, ids)
    queue.offer("exp1", "a0", "/runs/exp1", [Offer("a0-1", Record.of(feed, line).write(), tickets)])
    said = []
    lines = Lines(queue, "exp1", Functions(), [copy], threads=1, trust=trust)
    worker = Worker(queue, "exp1", lines.maker, say=said.append)
    for ticket in tickets:
        worker._do(ticket)
    return said, [queue.get("exp1", ticket, bytearray) for ticket in tickets]


def test_a_damaged_copy_never_reaches_the_loop(server, train, work, view, tmp_path):
    copy = copy_of(view.stores[0], tmp_path / "copy", "tokens.u16", at=30_000)
    worker = work(server.url, stores=[copy])
    trainer = train(server.url, "deadline_s=60&lease_s=1&alive_s=60")
    until(lambda: trainer.feed.link.threads)
    trainer.take(40)  # each is compared with that of a local feed
    assert trainer.here == 40
    assert any("tokens.u16: block 0 changed since it was written" in text for text in worker.said), worker.said
    assert worker.thread.is_alive()


def windows(store):
    return mr.Windows(store.split("train"), lookback=4, horizon=1)


def selected(store):
    return mr.Records(store.where("label > 0"), columns=["hits"])


@pytest.mark.parametrize(
    ("make", "view", "damaged"),
    [
        (tiny_series, windows, "offsets.i64"), (tiny_series, windows, "cuts.i64"), (tiny_records, selected, "label.i64"),
        (tiny_records, selected, "offsets.i64"), (tiny_records, mr.Records, "offsets.key.i64"),
    ],
    ids=["windows-offsets", "windows-cuts", "where-column", "where-offsets", "text-offsets"],
)  # fmt: skip
def test_what_says_which_rows_a_sample_has_is_compared_before_the_first_batch(tmp_path, make, view, damaged):
    """A damaged offset or label makes other samples, not other bytes."""
    store = make(tmp_path / "store")
    with pytest.raises(mr.StoreCorrupt, match="block 0 changed since it was written"):
        worker_of(view(store), copy_of(store, tmp_path / "copy", damaged, at=8))


@pytest.mark.parametrize("damaged", ["values.f32", "time.i64", "name.u8"])
def test_only_what_a_batch_is_made_of_is_compared(tmp_path, damaged):
    store = tiny_series(tmp_path / "store")
    said, payloads = worker_of(windows(store), copy_of(store, tmp_path / "copy", damaged))
    assert (payloads == [None] * 3) == (damaged == "values.f32"), said


def test_only_the_blocks_of_a_batch_are_compared_and_each_once(tmp_path, blocks_read, monkeypatch):
    for module in ("layout", "columns", "shard"):
        monkeypatch.setattr(f"millrace.store.{module}.BLOCK_BYTES", 512)
    with mr.StoreWriter(tmp_path / "store", columns={"tokens": mr.Column("uint16")}, shard_bytes=40_000) as writer:
        for k in range(10):
            writer.append({"tokens": np.arange(10_000, dtype=np.uint16) + k})
    view = mr.Subset(
        mr.Blocks(mr.open_store(tmp_path / "store"), length=16), [0, 1, 2, 3, 5000, 5001, 0, 1, 700, 701, 0, 1]
    )
    said, payloads = worker_of(view, copy_of(view.stores[0], tmp_path / "copy"))
    assert None not in payloads, said
    assert len(blocks_read) == len(set(blocks_read)) <= 8


def test_a_copy_is_read_once_for_all_workers_of_a_machine_until_it_changes(tmp_path, blocks_read):
    store = tiny_series(tmp_path / "store")
    copy = copy_of(store, tmp_path / "copy")
    assert None not in worker_of(windows(store), copy)[1]
    first = len(blocks_read)
    assert first > 0
    worker_of(windows(store), copy)
    assert len(blocks_read) == first  # noted
    worker_of(windows(store), copy, trust="nothing")
    assert len(blocks_read) == 2 * first
    (path,) = Path(copy).glob("shards/*0/values.f32")
    os.utime(path)
    worker_of(windows(store), copy)
    assert blocks_read[2 * first :] == [(f"{path.parent.name}/values.f32", 0)]
    worker_of(windows(store), copy_of(store, tmp_path / "wrong", "values.f32"), trust="copy")
    assert len(blocks_read) == 2 * first + 1  # what is trusted is not compared


def test_a_worker_without_a_place_for_notes_compares_each_block_itself(tmp_path, blocks_read, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "file"))
    store = tiny_series(tmp_path / "store")
    for count in (1, 2):
        assert None not in worker_of(windows(store), store.path)[1]
        assert len(blocks_read) == count * len(set(blocks_read))
