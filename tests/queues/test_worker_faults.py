"""Workers die, stop, come back, come late, or know the wrong things. The training sequence is that of a local feed."""

import os
import shutil
import signal
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import millrace as mr
from millrace.feed.remote.record import Record
from millrace.queues.open import open_queue
from millrace.queues.protocol import Offer
from millrace.view.spec import view_arrays

from . import transforms
from .conftest import LONG_S, OPTIONS, until

# As a module of the worker's command line: the same file, under the same name.
HERE = os.path.dirname(__file__)


@pytest.fixture
def named(monkeypatch):
    """The transforms under the name that a worker in this folder imports."""
    monkeypatch.syspath_prepend(HERE)
    import transforms as found

    return found


@pytest.fixture
def held(tmp_path, monkeypatch):
    """A folder whose file ``hold`` makes every ``slow`` wait."""
    folder = tmp_path / "hold"
    folder.mkdir()
    (folder / "hold").touch()
    monkeypatch.setenv("MILLRACE_TEST_FOLDER", str(folder))
    yield folder
    (folder / "hold").unlink(missing_ok=True)


def begun(folder, process):
    return (folder / f"began-{process.pid}").exists()


def start_slow(start_worker, url):
    # What a worker puts after the end of a run expires: sooner than tests give up.
    options = f"{OPTIONS}&ttl_s=10"
    return start_worker(url, "--transform", "transforms:slow", options=options, env={"PYTHONPATH": HERE})


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_q4_a_worker_that_ends_or_stops_with_a_batch_in_hand(
    server, train, start_worker, named, held, how, monkeypatch
):
    """Its lease ends, another worker makes the batch; continued, it writes what changes nothing."""
    first = start_slow(start_worker, server.url)
    client = server.client()
    until(lambda: client.zcard("w:exp1") == 1)
    trainer = train(server.url, "deadline_s=60&lease_s=1&alive_s=60&ttl_s=20", transform=named.slow)
    until(lambda: begun(held, first))
    first.send_signal(how)
    second = start_slow(start_worker, server.url)
    until(lambda: client.zcard("w:exp1") == 2)
    (held / "hold").unlink()
    trainer.take(3)
    assert trainer.here == 0
    assert begun(held, second)
    if how == signal.SIGSTOP:
        first.send_signal(signal.SIGCONT)
        trainer.take_from_workers(10)
        assert first.poll() is None
    trainer.close()
    assert "has ended" in second.communicate(timeout=LONG_S)[0]
    until(lambda: not client.keys("b:exp1:*"))  # nor one that the zombie puts after the end


def test_q5_duplicates_and_disorder_change_nothing(server, train, work):
    work(server.url, threads=3)
    trainer = train(server.url, depth=6)
    queue = open_queue(server.url)
    client, window = server.client(), trainer.feed.link._windows[0]
    for _ in range(10):
        trainer.take_from_workers(2)
        for ticket in [window.ticket(window.next + k) for k in (5, 0, 3)]:
            client.zadd("t:exp1", {ticket: 0})  # work that is done, or not wanted yet, once more
            client.rpush(f"n:exp1:{window.attempt}", ticket, ticket, "nonsense", "a:b:c", f"{window.attempt}:-16:16")
    queue.close()
    trainer.take(20)


def test_q5_payloads_of_other_runs_attempts_and_stores_are_refused(server, train, work, view):
    """Which lie under the keys of this one."""
    other = mr.Feed(mr.Subset(view, np.arange(100)), batch=16, device="numpy")
    line = other.line(0, None)
    work(server.url, run="exp2")
    client, queue, ticket = server.client(), open_queue(server.url), "cc-1:32:16"
    queue.put_array("exp2", *next(iter(view_arrays(other.view).items())))
    queue.offer("exp2", "cc", "/other/exp2", [Offer("cc-1", Record.of(other, line).write(), [ticket])])
    until(lambda: client.exists(f"b:exp2:{ticket}"))
    queue.close()
    work(server.url)
    trainer = train(server.url)
    window = trainer.feed.link._windows[0]
    for k in range(4, 12):
        client.set(f"b:exp1:{window.ticket(k)}", client.get(f"b:exp2:{ticket}"))
    trainer.take(16)
    assert trainer.feed.report().refused == trainer.here == 8
    trainer.take_from_workers(5)


def test_a_worker_that_finds_no_ids_of_a_subset_waits_for_them(server, work, view):
    """As after a flush, when tickets are there before the ids."""
    feed = mr.Feed(mr.Subset(view, np.arange(100)), batch=16, device="numpy")
    offer = Offer("cc-1", Record.of(feed, feed.line(0, None)).write(), ["cc-1:32:16"])
    worker, queue = work(server.url, run="exp2"), open_queue(server.url)
    queue.offer("exp2", "cc", "/other/exp2", [offer])
    until(lambda: queue.await_ready("exp2", "cc-1") == ["cc-1:32:16"])
    assert not server.client().exists("b:exp2:cc-1:32:16")  # left to the trainer
    queue.put_array("exp2", *next(iter(view_arrays(feed.view).items())))
    queue.offer("exp2", "cc", "/other/exp2", [offer])
    until(lambda: server.client().exists("b:exp2:cc-1:32:16"))
    assert worker.thread.is_alive()
    queue.close()


def test_q6_workers_stop_at_the_window_and_go_on_after_a_long_rest(server, train, work):
    work(server.url, threads=2)
    trainer = train(server.url, depth=5)
    client = server.client()
    for _ in range(2):
        until(
            lambda: (
                client.zcard("t:exp1") == client.zcard("l:exp1") == 0
                and len(trainer.feed.link._windows[0].arrived) == 5
            )
        )
        assert len(client.keys("b:exp1:*")) <= 5  # also those that were fetched
        server.client().flushall()  # as after an hour: all has expired
        trainer.take(7)
    assert trainer.here <= 4
    window = trainer.feed.link._windows[0]
    trainer.take_from_workers(100)
    assert window.news.qsize() <= 1  # what threads tell each other does not grow


def test_q11_a_worker_whose_clock_is_wrong(server, train, start_worker):
    """Leases end by the clock of the server."""
    faketime = shutil.which("faketime")
    if faketime is None:
        pytest.skip("faketime is not installed; `make servers` as root installs it")
    wrong = start_worker(server.url, before=[faketime, "-f", "+3h"], env={"FAKETIME_DONT_FAKE_MONOTONIC": "1"})
    right = start_worker(server.url)
    client = server.client()
    until(lambda: client.zcard("w:exp1") == 2)
    trainer = train(server.url)
    trainer.take(5)
    until(lambda: trainer.take(1) or all(b'"made": 0,' not in info for info in client.hvals("i:exp1")))
    assert trainer.here == 0
    trainer.close()
    for process in (wrong, right):
        assert "has ended" in process.communicate(timeout=LONG_S)[0]


def test_a_worker_started_before_its_run_waits_and_ends_with_it(server, train, work):
    worker = work(server.url)
    until(lambda: worker.said)
    assert worker.said[0].startswith("waiting for run exp1")
    for _ in range(2):
        trainer = train(server.url)
        trainer.take_from_workers(5)
        trainer.close()
        worker.thread.join(LONG_S)
        assert not worker.thread.is_alive()
        assert worker.error is None
        worker = work(server.url)  # it knows that the run ended, and waits for the next start


def test_a_line_that_ends_leaves_nothing_in_the_queue(server, train):
    """Not the tickets that nobody took either."""
    trainer, client = train(server.url), server.client()
    trainer.take(3)
    until(lambda: client.zcard("t:exp1") == trainer.feed.depth)
    trainer.close()
    assert client.keys("[tldhb]:exp1*") == []


def test_workers_stay_from_pass_to_pass(server, view, work, tmp_path):
    worker = work(server.url)
    loader = mr.Feed(
        view, batch=16, seed=3, device="numpy", queue=f"{server.url}?{OPTIONS}", run=tmp_path / "exp1"
    ).by_epoch()
    local = mr.Feed(view, batch=16, seed=3, device="numpy").by_epoch()
    until(lambda: worker.said)
    for _ in range(3):
        for batch, expected in zip(loader, local, strict=True):
            assert batch["x"].tobytes() == expected["x"].tobytes()
            assert batch.valid.tolist() == expected.valid.tolist()
        assert loader.feed.report().made_by_workers > 0
    assert worker.thread.is_alive()
    loader.feed.close()
    worker.thread.join(LONG_S)
    assert not worker.thread.is_alive()


@pytest.mark.parametrize(
    "options", [{}, {"world": 3, "rank": 1}, {"last": "drop", "epochs": 1}, {"epochs": 1, "batch": 50}]
)
def test_ranks_ends_and_padding_are_those_of_a_local_feed(server, train, work, options):
    work(server.url)
    trainer = train(server.url, **options)
    batches = len(trainer.feed) if "epochs" in options else 20
    trainer.take(batches)
    assert trainer.by_workers > 0


def mixed(view):
    return mr.Mixture([(view, 3), (mr.Subset(view, np.arange(20)), 1)], schedule=[(100, [1, 1])])


def packed(view):
    return mr.Packed(view.store, length=100)


def filled(view):
    """Short records, padded by a number that their stored type does not hold."""
    path = Path(view.store.path).parent / "short"
    with mr.StoreWriter(path, columns={"tokens": mr.Column("uint16")}) as writer:
        for k in range(100):
            writer.append({"tokens": np.arange(k % 7)})
    return mr.Records(mr.open_store(path), pad=6, fill={"tokens": -100})


@pytest.mark.parametrize("kind", [mixed, packed, filled])
def test_mixtures_packed_documents_and_padding_are_those_of_a_local_feed(server, train, work, view, kind):
    work(server.url)
    trainer = train(server.url, of=kind(view), batch=8)
    trainer.take(30)
    assert trainer.by_workers > 0


@pytest.mark.parametrize("compress", [0, 1])
def test_transforms_and_decodes_are_those_of_a_local_feed(server, view, work, tmp_path, compress):
    """With randomness, text and ragged columns, and of a subset."""
    own = {"transform": transforms.noise, "decode": transforms.decode_ragged}
    some = mr.Subset(view, np.arange(0, 200, 3))
    options = {"batch": 8, "seed": 5, "epochs": 2, "device": "numpy", **own}
    work(server.url, f"compress={compress}", **own)
    with mr.Feed(some, queue=f"{server.url}?{OPTIONS}", run=tmp_path / "exp1", **options) as feed:
        for batch, expected in zip(feed, mr.Feed(some, **options), strict=True):
            assert batch["name"] == expected["name"]
            for name in ("values", "offsets"):
                assert getattr(batch["x"], name).tobytes() == getattr(expected["x"], name).tobytes()
        assert feed.report().made_by_workers > 0


def test_an_error_of_a_transform_is_raised_in_its_turn(server, view, work, tmp_path):
    worker = work(server.url, transform=transforms.broken)
    with mr.Feed(view, batch=16, order=mr.Sequential(len(view)), device="numpy", transform=transforms.broken,
                 queue=f"{server.url}?{OPTIONS}", run=tmp_path / "exp1") as feed:  # fmt: skip
        batches = iter(feed)
        for _ in range(10):
            next(batches)
        with pytest.raises(mr.StageFailed, match="my bug") as caught:
            next(batches)
    assert caught.value.position == 160
    until(lambda: worker.said)
    assert any("left to the trainer" in text and "my bug" in text for text in worker.said)


def test_resume_with_another_batch_and_world_is_exact(server, view, work, train, tmp_path):
    work(server.url)
    trainer = train(server.url, batch=16)
    trainer.take(7)
    state = trainer.feed.state_dict()
    trainer.close()
    work(server.url)
    local = [mr.Feed(view, batch=10, seed=3, device="numpy", rank=rank, world=2) for rank in range(2)]
    through = [mr.Feed(view, batch=10, seed=3, device="numpy", rank=rank, world=2, run=tmp_path / "exp1",
                       queue=f"{server.url}?{OPTIONS}") for rank in range(2)]  # fmt: skip
    for feed in (*local, *through):
        feed.load_state_dict(state)
    iterators = [iter(feed) for feed in (*local, *through)]
    for _ in range(20):
        here0, here1, there0, there1 = [next(iterator)["x"].tobytes() for iterator in iterators]
        assert (here0, here1) == (there0, there1)
    assert sum(feed.report().made_by_workers for feed in through) > 0
    for feed in (*local, *through):
        feed.close()


def test_a_feed_that_is_dropped_leaves_no_thread(server, view, tmp_path):
    before = set(threading.enumerate())
    feed = mr.Feed(view, batch=16, device="numpy", queue=f"{server.url}?{OPTIONS}", run=tmp_path / "exp1")
    for _, _ in zip(range(3), feed, strict=False):
        pass
    del feed
    until(lambda: {*threading.enumerate()} <= before)


def test_a_slow_worker_delays_one_batch_and_is_named(server, train, start_worker, named, held, caplog, monkeypatch):
    """The loop waits for the deadline once, then makes late batches itself; and takes them again from workers when they come."""
    worker = start_slow(start_worker, server.url)
    until(lambda: server.client().zcard("w:exp1") == 1)
    monkeypatch.delenv("MILLRACE_TEST_FOLDER")  # the trainer itself is fast
    trainer = train(server.url, "deadline_s=0.5&lease_s=60&alive_s=60", transform=named.slow)
    patience = trainer.feed.link.patience
    waits = []
    real = type(patience).seconds.fget
    with mock.patch.object(type(patience), "seconds", property(lambda self: waits.append(real(self)) or waits[-1])):
        until(lambda: begun(held, worker) and trainer.feed.link.threads)
        trainer.take(40)
    assert waits.count(0.5) == 1
    assert trainer.here == 40
    until(lambda: trainer.feed.report().slow_workers)
    report = trainer.feed.report()
    assert 1 <= report.late <= 40
    assert f":{worker.pid}:" in report.slow_workers[0]
    assert [
        text for text in caplog.messages if f":{worker.pid}:" in text and "the loop makes late batches itself" in text
    ]
    (held / "hold").unlink()
    trainer.take_from_workers(5)


def test_a_worker_that_is_slow_but_never_late_is_not_waited_for_each_time(server, train, start_worker, named):
    """Each batch comes within the deadline, and takes far longer than making it here does."""
    worker = start_worker(
        server.url, "--transform", "transforms:later", options=f"{OPTIONS}&ttl_s=10",
        env={"PYTHONPATH": HERE, "MILLRACE_TEST_SLEEP_S": "0.1"},
    )  # fmt: skip
    until(lambda: server.client().zcard("w:exp1") == 1)
    trainer = train(server.url, "deadline_s=0.5&lease_s=60&alive_s=60", transform=named.later)
    until(lambda: trainer.take(1) or trainer.feed.report().slow_workers, "that the worker is named")
    assert f":{worker.pid}:" in trainer.feed.report().slow_workers[0]
    assert trainer.here > 0


def test_a_trainer_says_that_its_last_worker_has_gone(server, train, work, caplog):
    worker = work(server.url)
    trainer = train(server.url)
    trainer.take_from_workers(3)
    worker.is_over = True
    until(lambda: "run exp1 has no worker any more; batches are made here until one comes" in caplog.text)
    trainer.take(5)
