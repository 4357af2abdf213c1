"""Every kind of view, in every order, is the same through a queue: a worker rebuilds it from its spec."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.feed.processes.packing import Layout
from millrace.feed.remote.payload import unpack
from millrace.feed.remote.record import Record, ticket_of
from millrace.feed.remote.worker import Functions, Lines, Worker
from millrace.queues.address import read_address
from millrace.queues.memory import MemoryQueue, Server
from millrace.queues.protocol import Offer
from millrace.testing import tiny_records, tiny_series, tiny_text
from millrace.testing.strategies import datasets
from millrace.view.spec import view_arrays

from .conftest import bytes_of

RUN, ATTEMPT = "exp1", "a0-1"


def every_third(count):
    return np.arange(count) % 3 == 1


@pytest.fixture(scope="module")
def stores(memory_folder):
    folder = memory_folder / "views"
    return tiny_text(folder / "text"), tiny_series(folder / "series"), tiny_records(folder / "records")


def blocks(text, series, records):
    return mr.Blocks(text.split("train"), length=7, stride=3)


def windows(text, series, records):
    return mr.Windows(series.split("train"), lookback=6, horizon=2, target=["close"])


def ragged(text, series, records):
    return mr.Records(records.split("train"))


def padded(text, series, records):
    return mr.Records(records, columns=["hits", "label", "class"], pad=4)


def packed(text, series, records):
    return mr.Packed(text.split("train"), length=30)


def masked(text, series, records):
    view = windows(text, series, records)
    return mr.Subset(view, every_third(len(view)))


def sparsely_masked(text, series, records):
    view = blocks(text, series, records)
    return mr.Subset(view, np.arange(len(view)) == 5)


def numbered(text, series, records):
    view = ragged(text, series, records)
    return mr.Subset(view, np.arange(len(view))[::-2])


def masked_twice(text, series, records):
    view = masked(text, series, records)
    return mr.Subset(view, ~every_third(len(view)))


def concatenated(text, series, records):
    views = [blocks(text, series, records), mr.Blocks(text.split("val"), length=7)]
    return mr.Concat([mr.Subset(view, ~every_third(len(view))) for view in views])


def chosen_by_value(text, series, records):
    return mr.Records(records.where("label > 0"))


def masked_of_chosen(text, series, records):
    view = chosen_by_value(text, series, records)
    return mr.Subset(view, ~every_third(len(view)))


def split_at_random(text, series, records):
    return mr.random_split(mr.Records(records), [0.7, 0.3], seed=3)[0]


def folded(text, series, records):
    return mr.k_fold(mr.Records(records), 3, 1)[0]


def sorted_by_label(text, series, records):
    return mr.sorted_by(mr.Records(records), "label")


def mixed(text, series, records):
    first, second = blocks(text, series, records), mr.Blocks(text.split("val"), length=7)
    return mr.Mixture([(mr.Subset(first, every_third(len(first))), 3), (second, 1)], schedule=[(40, [1, 1])])


def balanced(text, series, records):
    return mr.balanced(mr.Records(records), "label")


VIEWS = [
    blocks, windows, ragged, padded, packed, masked, sparsely_masked, numbered, masked_twice, concatenated, chosen_by_value,
    masked_of_chosen, split_at_random, folded, sorted_by_label, mixed, balanced,
]  # fmt: skip


def in_turn(count):
    return mr.Sequential(count)


def shuffled(count):
    return mr.Shuffled(count, 5)


def in_blocks(count):
    return mr.BlockShuffled(count, block=4, window=3, seed=1)


def check_worker(queue, feed, batches):
    """What a worker puts into a queue for the first batches of a feed is what the feed makes itself."""
    iterator = iter(feed)
    line = iterator.line
    record = Record.of(feed, line)
    for key, ids in view_arrays(feed.view).items():
        queue.put_array(RUN, key, ids)
    tickets = [ticket_of(line, ATTEMPT, batch) for batch in range(batches)]
    queue.offer(RUN, ATTEMPT.partition("-")[0], "/runs/exp1", [Offer(ATTEMPT, record.write(), tickets)])
    said = []
    worker = Worker(queue, RUN, Lines(queue, RUN, Functions(), [], threads=1).maker, say=said.append)
    stamp = record.stamp(RUN, ATTEMPT, line)
    for ticket, expected in zip(tickets, iterator, strict=False):
        worker._do(ticket)
        first, count = map(int, ticket.split(":")[1:])
        payload = queue.get(RUN, ticket, lambda size: np.empty(size, np.uint8))
        assert payload is not None, said
        text, area = unpack(payload, stamp.prefix(first, count), lambda size: np.empty(size, np.uint8))
        batch = Layout(text).batch(area)
        assert list(batch) == list(expected)
        assert bytes_of(batch) == bytes_of(expected)
    feed.close()


@pytest.mark.parametrize(
    ("make", "order"),
    [
        *((view, None) for view in VIEWS),
        *((view, order) for order in (in_turn, shuffled, in_blocks) for view in (padded, masked)),
    ],
    ids=lambda value: getattr(value, "__name__", "default"),
)
def test_a_worker_makes_the_batches_of_every_view_in_every_order(stores, make, order):
    view = make(*stores)
    feed = mr.Feed(view, batch=5, order=order and order(len(view)), seed=3, device="numpy", rank=1, world=2)
    check_worker(MemoryQueue(Server(), read_address("memory://here")), feed, 6)


@pytest.mark.parametrize("make", [masked, numbered, mixed], ids=lambda make: make.__name__)
def test_the_samples_of_a_subset_reach_workers_through_a_server(stores, make, server, work, train):
    worker = work(server.url)
    train(server.url, of=make(*stores), batch=5).take_from_workers(3)
    assert worker.error is None


@settings(max_examples=15)
@given(contents=datasets(), data=st.data())
def test_records_of_all_columns_pass_through_a_queue(memory_folder, contents, data):
    path = Path(tempfile.mkdtemp(dir=memory_folder)) / "store"
    with mr.StoreWriter(path, columns=contents.columns, shard_bytes=contents.shard_bytes) as writer:
        for record in contents.records:
            writer.append(record)
    view = mr.Records(mr.open_store(path))
    if data.draw(st.booleans()):
        view = mr.Subset(
            view, np.array(data.draw(st.lists(st.booleans(), min_size=len(view), max_size=len(view))), bool)
        )
    if len(view):
        feed = mr.Feed(view, batch=data.draw(st.integers(1, 4)), device="numpy")
        check_worker(MemoryQueue(Server(), read_address("memory://here")), feed, 3)
