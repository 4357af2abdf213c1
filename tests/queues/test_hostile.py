"""Whatever bytes stand in the keys of a run: batches are those of a local feed, no thread ends, and workers serve again."""

import json
import random
import threading

import numpy as np
import pytest

import millrace as mr
from millrace.cli import run as millrace
from millrace.feed.processes.packing import Layout
from millrace.feed.remote.payload import PayloadRefused, check_marks, unpack
from millrace.feed.remote.record import Record, batch_of, ticket_of
from millrace.feed.remote.worker import Functions, Lines, Worker
from millrace.queues.address import read_address
from millrace.queues.memory import MemoryQueue, Server
from millrace.queues.open import open_queue
from millrace.queues.protocol import Offer
from millrace.view.spec import view_arrays

from .conftest import OPTIONS, bytes_of, until

QUICK = f"{OPTIONS}&deadline_s=0.2"
FOREIGN = [b"", b"\xff", b"\x80\x05cos\nsystem\n.", b"a-1:0:16\r\n", b"\xe2\x80\xae\x1b[2J", b"a" * 5000]


def flipped(data, rng):
    """The bytes with one of them changed."""
    data = bytearray(data or b"\0")
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def damage(client, key, rng):
    """Changes what a key holds, by its type: a byte of an entry, and an entry more."""
    foreign = rng.choice(FOREIGN)
    match client.type(key):
        case b"string":
            client.set(key, rng.choice([flipped(client.get(key), rng), foreign]), keepttl=True)
        case b"zset":
            for member, at in client.zrange(key, 0, -1, withscores=True):
                client.zrem(key, member)
                client.zadd(key, {flipped(member, rng): at})
            client.zadd(key, {foreign: 0})
        case b"hash":
            for field, value in client.hgetall(key).items():
                client.hset(key, field, flipped(value, rng))
            client.hset(key, foreign, foreign)
        case b"list":
            client.rpush(key, foreign, flipped(client.lindex(key, 0), rng))


def threads_of(trainer):
    names = ("millrace-queue-link", "millrace-queue-fetch")
    return [thread for thread in threading.enumerate() if thread.name in names and thread.is_alive()]


@pytest.mark.parametrize("seed", range(3))
def test_q12_foreign_bytes_in_any_key(server, train, work, view, seed):
    rng, client = random.Random(seed), server.client()
    worker = work(server.url)
    trainer = train(server.url, QUICK, of=mr.Subset(view, [True] * len(view)))
    trainer.take_from_workers(3)
    for kind in "rdfetlhwiqnab" * 2:
        for key in client.keys(f"{kind}:exp1*"):
            damage(client, key, rng)
        client.rpush(f"n:exp1:{trainer.feed.link._windows[0].attempt}", rng.choice(FOREIGN))
        trainer.take(3)
        assert len(threads_of(trainer)) == 2, kind
        if not worker.thread.is_alive():  # it may refuse what it finds, in words
            assert isinstance(worker.error, mr.MillraceError), worker.said
            worker = work(server.url)
    client.flushall()
    if not worker.thread.is_alive():
        worker = work(server.url)
    trainer.take_from_workers(5)


@pytest.mark.parametrize("foreign", FOREIGN[1:4])
def test_q12_one_foreign_word_of_finished_tickets_stops_nobody(server, train, work, foreign):
    work(server.url)
    trainer = train(server.url)
    client, attempt = server.client(), trainer.feed.link._windows[0].attempt
    trainer.take_from_workers(3)
    client.rpush(f"n:exp1:{attempt}", foreign)
    client.zadd("t:exp1", {foreign: 0, f"{attempt}:-16:16": 0, f"{attempt}:16:\xff": 0, f"{attempt}:{1 << 70}:16": 0})
    trainer.take_from_workers(20)
    assert trainer.here == 0
    until(lambda: client.zcard("t:exp1") == 0)


def lines_of(record, arrays):
    """The lines of a worker that finds this record in a queue."""
    queue = MemoryQueue(Server(), read_address("memory://here"))
    for key, ids in arrays.items():
        queue.put_array("exp1", key, ids)
    queue.offer("exp1", "a0", "/runs/exp1", [Offer("a0-1", record)])
    return queue, Lines(queue, "exp1", Functions(), [], threads=1)


def maker_or_refusal(lines):
    """What a worker makes batches with, or why it refuses, on one line."""
    try:
        return lines.maker("a0-1")
    except mr.MillraceError as error:
        (line,) = str(error).splitlines()
        return line


def memory(size):
    return np.empty(size, np.uint8)


def test_a_record_with_a_changed_byte_is_refused_in_words_or_changes_nothing(view):
    """Of the padded last batch: where the line ends, no fingerprint says."""
    feed = mr.Feed(mr.Subset(view, np.arange(len(view)) % 2 == 0), batch=50, epochs=1, seed=3, device="numpy")
    *_, expected = iter(feed)
    line = feed.line(0, len(feed.view))
    record, arrays, batch = Record.of(feed, line), view_arrays(feed.view), line.num_batches - 1
    ticket, good, rng, outcomes = ticket_of(line, "a0-1", batch), record.write(), random.Random(1), set()
    for at in (*range(0, len(good), 3), *[good.index(b'"stop":') + 7 + k for k in range(3) for _ in range(4)]):
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        queue, lines = lines_of(bytes(bad), arrays)
        maker = maker_or_refusal(lines)
        if isinstance(maker, str):
            outcomes.add("refused")
            continue
        if maker is None or batch_of(maker.line, ticket) is None:
            outcomes.add("left to the trainer")
            continue
        payload = Worker(queue, "exp1", lines.maker, say=lambda text: None)._payload(maker, ticket, batch)
        _, first, count = ticket.split(":")
        try:
            text, packed = unpack(payload, record.stamp("exp1", "a0-1", line).prefix(int(first), int(count)), memory)
            check_marks(packed, line.marked_positions(batch))
        except PayloadRefused as error:
            outcomes.add("padding" if "padding" in str(error) else "stamp")
            continue
        assert bytes_of(Layout(text).batch(packed)) == bytes_of(expected)
        outcomes.add("the same")
    assert outcomes >= {"refused", "left to the trainer", "padding", "stamp"}, outcomes


LIES = [
    {"start": -16}, {"start": 1 << 63}, {"stop": -1}, {"batch": 0}, {"batch": -1}, {"batch": 1 << 40}, {"rank": 2}, {"rank": -1},
    {"world": 0}, {"last": "x"}, {"seed": -1}, {"seed": 1 << 64}, {"view": {"view": "blocks", "length": -3}}, {"view": {}},
    {"order": {"order": "sequential", "n": 0}}, {"order": {"order": []}}, {"stores": {"00": "/dev/zero"}}, {"stores": {"\0": "\0"}},
    {"arrays": ["\ud800"]},
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_record_whose_fields_lie_is_refused_in_words(view, lie):
    feed = mr.Feed(view, batch=16, device="numpy")
    fields = {**json.loads(Record.of(feed, feed.line(0, None)).write()), **lie}
    _, lines = lines_of(json.dumps(fields).encode(), {})
    assert isinstance(maker_or_refusal(lines), str)


def test_a_record_nested_without_end_is_refused_in_words():
    _, lines = lines_of(b'{"view":' + b'{"of":' * 200_000, {})
    with pytest.raises(mr.ConfigError, match="cannot be read"):
        lines.maker("a0-1")


POINTS = ["leased", "put", "announced", "left"]


@pytest.mark.parametrize("point", POINTS)
def test_q4_a_worker_that_dies_at_any_point_leaves_its_tickets_to_others(server, train, work, view, point):
    """What it did until then is done by hand; the bytes of a payload come whole or not at all, as Redis sets them."""
    queue = open_queue(f"{server.url}?{OPTIONS}")
    trainer = train(server.url)
    info = {"threads": 1, "host": "dead", "pid": 1}
    lines = Lines(queue, "exp1", Functions(), [], threads=1)
    worker = Worker(queue, "exp1", lines.maker, say=lambda text: None)
    until(lambda: queue.lease("exp1", worker.id, info).state == "ticket")
    for _ in range(2):
        ticket = queue.lease("exp1", worker.id, info).ticket
        maker = lines.maker(ticket.split(":")[0])
        payload = worker._payload(maker, ticket, batch_of(maker.line, ticket))
        if point in ("put", "left"):  # the payload lies there, and nobody was told
            queue._wire.set_new(f"b:exp1:{ticket}".encode(), payload, 60_000)
        elif point == "announced":
            queue.put("exp1", worker.id, ticket, payload)
    work(server.url)
    if point == "left":
        queue.leave("exp1", worker.id)
    until(lambda: trainer.feed.link.threads)
    trainer.take_from_workers(10)
    assert trainer.here == 0
    queue.close()


@pytest.mark.parametrize("holder", [b"", b"17x w1", b"nan w1", b"\xff"])
def test_a_lease_with_an_unreadable_holder_ends_as_others_do(server, holder):
    queue, client = open_queue(f"{server.url}?lease_s=0.01"), server.client()
    queue.offer("exp1", "a0", "/runs/exp1", [Offer("a0-1", b"record", ["a0-1:0:8"])])
    assert queue.lease("exp1", "w1", {}).ticket == "a0-1:0:8"
    client.hset("h:exp1", "a0-1:0:8", holder)
    until(lambda: queue.lease("exp1", "w2", {}).ticket == "a0-1:0:8")
    queue.close()


def test_the_status_of_a_queue_shows_whatever_workers_say_of_themselves(server, capsys, train):
    client, hostile = (
        server.client(),
        ['{"threads": "\x1b[2J", "made": "x"}', '{"made": 1e999, "seconds": NaN}', "[" * 9000, "7"],
    )
    train(server.url)
    for k, info in enumerate([*hostile, b"\xff"]):
        client.zadd("w:exp1", {b"\xff\x1b[2J%d" % k: 1e15})
        client.hset("i:exp1", b"\xff\x1b[2J%d" % k, info)
    for more in ([], ["--json"]):
        assert millrace(["queue", "status", server.url, *more]) == 0
        assert "\x1b" not in capsys.readouterr().out
