"""The server of a queue fails in every way. Training goes on with the same batches, and faster again when it is back."""

import logging

import pytest

import millrace as mr
from millrace.feed.remote import link
from millrace.queues.open import open_queue
from millrace.testing.servers import Proxy, free_port

from .conftest import until

QUICK = "deadline_s=0.2&lease_s=1&alive_s=60&timeout_s=0.3"


@pytest.mark.parametrize("persists", [False, True])
def test_q1_a_server_that_is_killed_and_restarted(start_server, train, work, persists):
    server = start_server(*(["--appendonly", "yes", "--appendfsync", "always"] if persists else []))
    work(server.url)
    trainer = train(server.url)
    trainer.take_from_workers()
    server.kill()
    until(lambda: not trainer.feed.link.is_up, "that the trainer noticed")
    trainer.take(10)  # a few had come before
    assert trainer.here >= 10 - trainer.feed.depth
    server.start()
    trainer.take_from_workers()


def test_q1_no_server_when_training_starts(start_server, train, work, caplog):
    server = start_server()
    server.kill()
    trainer = train(server.url)
    trainer.take(5)
    assert trainer.here == 5
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "does not answer" in caplog.text
    work(server.url)
    server.start()
    trainer.take_from_workers()


def test_q2_a_server_that_lost_everything(server, train, work):
    work(server.url)
    trainer = train(server.url)
    for _ in range(3):
        trainer.take_from_workers(5)
        server.client().flushall()
    trainer.take_from_workers(5)


def test_q2_after_a_flush_the_run_is_published_again_without_a_batch_taken(server, train):
    trainer = train(server.url)
    client = server.client()
    server.client().flushall()
    until(lambda: client.zcard("t:exp1") == trainer.feed.depth and client.hlen("d:exp1") == 1)


def test_q2_payloads_that_were_evicted_are_made_again(server, train, work):
    work(server.url)
    trainer = train(server.url)
    client = server.client()
    for _ in range(10):
        trainer.take_from_workers(1)
        for key in client.keys("b:exp1:*"):
            client.delete(key)
    trainer.take(5)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_q2_a_server_that_evicts_is_refused(start_server, train, policy):
    server = start_server("--maxmemory", "100mb", "--maxmemory-policy", policy)
    with pytest.raises(mr.ConfigError, match=f"maxmemory-policy {policy}.*CONFIG SET maxmemory-policy noeviction"):
        train(server.url)


@pytest.mark.parametrize("after", [10_000, 20_000])
def test_q3_a_connection_that_is_cut_within_a_payload(server, train, work, after):
    work(server.url)  # only the trainer is behind the proxy
    with Proxy(server.port) as proxy:
        trainer = train(proxy.url, QUICK)
        trainer.take_from_workers(5)
        proxy.cut_after = after
        trainer.take(5)
        until(lambda: trainer.take(1) or proxy.num_cuts > 2)
        proxy.cut_after = -1
        trainer.take_from_workers(5)
        trainer.close()


def test_q3_a_half_open_connection(server, train, work):
    work(server.url)
    with Proxy(server.port) as proxy:
        trainer = train(proxy.url, QUICK)
        trainer.take_from_workers(5)
        proxy.is_silent = True
        trainer.take(5)
        until(lambda: not trainer.feed.link.is_up)
        trainer.take(10)
        assert trainer.here >= 5
        proxy.is_silent = False
        trainer.take_from_workers(5)
        trainer.close()


def test_q3_a_worker_behind_a_slow_and_broken_link(server, train, work):
    with Proxy(server.port) as proxy:
        proxy.delay_s = 0.002
        work(proxy.url, "lease_s=1&timeout_s=0.3")
        trainer = train(server.url, "deadline_s=0.2&alive_s=60")
        trainer.take_from_workers(5)
        proxy.cut_after = 20  # of what the server answers the worker
        trainer.take(5)
        until(lambda: proxy.num_cuts > 2)
        proxy.cut_after = -1
        trainer.take_from_workers(5)
        trainer.close()


def test_q7_a_server_without_memory_left(start_server, train, work):
    """Whose limit comes after the start, when others have filled it."""
    server = start_server("--maxmemory", "100mb", "--maxmemory-policy", "noeviction")
    client = server.client()
    worker = work(server.url)
    trainer = train(server.url, "deadline_s=0.2&alive_s=60")
    trainer.take_from_workers(5)
    client.config_set("maxmemory", "1mb")  # less than the server itself takes
    trainer.take(3)
    until(lambda: trainer.take(1) or worker.said or trainer.feed.link.threads == 0)
    trainer.take(10)
    told = [text for text in worker.said if not text.startswith("waiting for run")]
    assert all("maxmemory" in text for text in told)
    assert len(told) <= 2
    client.config_set("maxmemory", "100mb")
    trainer.take_from_workers(5)


def test_q7_a_server_with_too_little_memory_for_a_window_is_refused(start_server, train):
    server = start_server("--maxmemory", "2mb")
    with pytest.raises(mr.ConfigError, match="raise maxmemory"):
        train(server.url, depth=64, batch=64)


def test_q7_what_others_keep_on_a_server_is_no_room_for_a_window(start_server):
    server = start_server("--maxmemory", "100mb")
    queue = open_queue(server.url)
    queue.check(60 << 20)
    client = server.client()
    for k in range(50):
        client.set(f"of others {k}", bytes(1 << 20))
    queue.check(20 << 20)
    with pytest.raises(mr.ConfigError, match=r"bytes free of its maxmemory 104,857,600.* takes 62,914,560"):
        queue.check(60 << 20)
    queue.close()


def test_an_old_server_is_refused(server):
    queue = open_queue(server.url)
    queue._client.info = lambda: {"redis_version": "6.0.16", "maxmemory": 0, "used_memory": 0}
    with pytest.raises(mr.ConfigError, match=r"Redis 6\.0\.16; expected 6\.2"):
        queue.check(0)
    queue.close()


def test_a_port_where_nobody_listens_is_said_once_and_nothing_grows(train, caplog, monkeypatch):
    monkeypatch.setattr(link, "MOST_UNWANTED", 5)
    trainer = train(f"redis://127.0.0.1:{free_port()}/0")
    trainer.take(20)
    assert trainer.here == 20
    assert len(caplog.records) == 1
    assert len(trainer.feed.link._windows[0].unwanted) <= 6
