"""Who may speak to a queue, and what may come from it: passwords, TLS, permissions, foreign runs, hostile payloads."""

import json
import random
import shutil
import subprocess

import numpy as np
import pytest

import millrace as mr
from millrace.feed.remote.functions import function_id
from millrace.queues.address import check_exposure, read_address
from millrace.queues.open import open_queue

from . import transforms
from .conftest import OPTIONS, until

SECRET = "correct-horse-battery"
ACL = ("reset", "on", f">{SECRET}", "~?:exp1", "~?:exp1:*", "+@all", "-@dangerous", "-@admin", "+info")


@pytest.fixture
def password(monkeypatch):
    monkeypatch.setenv("MILLRACE_REDIS_PASSWORD", SECRET)


def test_q8_malformed_payloads_are_refused_counted_and_replaced(server, train, work):
    work(server.url)
    trainer = train(server.url)
    client, window = server.client(), trainer.feed.link._windows[0]
    bad = [b"", b"x", b"\x80\x05cos\nsystem\n.", random.Random(1).randbytes(1000), b"MILLRACE" + bytes(5000)]
    for k, data in enumerate(bad):
        client.set(f"b:exp1:{window.ticket(6 + 2 * k)}", data)
    trainer.take(30)
    assert trainer.feed.report().refused == trainer.here == len(bad)
    trainer.take_from_workers(5)


def test_q9_passwords(start_server, train, work, monkeypatch, tmp_path):
    server = start_server("--requirepass", SECRET)
    for value, says in (("", "wants a password"), ("wrong-secret", "refuses the user name or password")):
        monkeypatch.setenv("REDIS_PASSWORD", value)
        with pytest.raises(mr.ConfigError, match=says) as caught:
            train(server.url)
        assert "wrong-secret" not in str(caught.value)
    (tmp_path / "password").write_text(SECRET + "\n")
    monkeypatch.setenv("MILLRACE_REDIS_PASSWORD_FILE", str(tmp_path / "password"))
    work(server.url)
    trainer = train(server.url)
    trainer.take_from_workers(5)
    assert (
        SECRET
        not in repr(trainer.feed) + repr(trainer.feed.link.queue) + (tmp_path / "exp1" / "feed.jsonl").read_text()
    )


def test_q9_a_password_in_the_url_is_refused_and_not_repeated(view, tmp_path):
    for url in (f"redis://:{SECRET}@host/0", f"redis://user:{SECRET}@host/0", f"redis://user:{SECRET}@[/0"):
        with pytest.raises(mr.ConfigError) as caught:
            mr.Feed(view, batch=4, queue=url, run=tmp_path / "exp1")
        assert SECRET not in str(caught.value)
        assert SECRET not in repr(caught.getrepr(style="native").reprcrash)


def test_q9_permissions(start_server, train, work, password):
    """Those of the guide are enough; without one of them the message names it."""
    server = start_server()
    client = server.client()
    client.execute_command("ACL", "SETUSER", "trainer", *ACL)
    url = server.url.replace("redis://", "redis://trainer@")
    work(url)
    train(url).take_from_workers(5)
    client.execute_command("ACL", "SETUSER", "trainer", "-info")
    with pytest.raises(mr.ConfigError, match="info"):
        open_queue(url).check(0)
    client.execute_command("ACL", "SETUSER", "trainer", "resetkeys", "~?:other")
    with pytest.raises(mr.ConfigError, match="lacks a permission"):
        open_queue(url).offer("exp1", "a0", "/f", [])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "other"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext",
             "subjectAltName=IP:127.0.0.1", "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"],
            check=True, capture_output=True,
        )  # fmt: skip
    return folder


@pytest.mark.skipif(
    shutil.which("redis-server") is None or shutil.which("openssl") is None,
    reason="needs Debian's redis-server, which has TLS, and openssl; `make servers` as root installs them",
)
def test_q9_tls(start_server, train, work, certificates, caplog):
    pem = str(certificates / "server.pem")
    tls = {"cert-file": pem, "key-file": str(certificates / "server.key"), "ca-cert-file": pem}
    server = start_server(tls=tls)
    assert server.url.startswith("rediss://")
    options = f"ca={pem}&{OPTIONS}"
    work(server.url, options)
    trainer = train(server.url, options)
    trainer.take_from_workers(5)
    with pytest.raises(mr.ConfigError, match=r"certificate .* is not trusted; give .ca=FILE"):
        train(server.url, f"ca={certificates / 'other.pem'}")
    plain = train(server.url.replace("rediss", "redis"), "timeout_s=1")
    plain.take(3)
    assert plain.here == 3
    assert "rediss://" in caplog.text


def test_q9_other_machines_need_tls_and_a_password():
    for url, password, says in (
        ("redis://10.0.0.5/0", SECRET, "rediss://"), ("rediss://trainer.example/0", None, "no password"),
        ("redis://trainer/0", None, "insecure=1"),
    ):  # fmt: skip
        with pytest.raises(mr.ConfigError, match=says) as caught:
            check_exposure(read_address(url), password)
        assert SECRET not in str(caught.value)
    for url in ("redis://127.0.0.1/0", "redis://localhost/0", "redis://[::1]:7000/0", "redis://10.0.0.5/0?insecure=1"):
        check_exposure(read_address(url), None)
    check_exposure(read_address("rediss://trainer.example/0"), SECRET)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://host/0", "redis://host"), ("redis:///0", "redis://host"), ("redis://host/x", "database 'x'"), ("exp1", "redis://host"),
        ("redis://host/0?deadline=3", "did you mean 'deadline_s'"), ("redis://host/0?lease_s=0", "seconds above 0"),
        ("redis://host/0?lease_s=soon", "seconds above 0"), ("redis://host/0?insecure=yes", "0 or 1"),
        ("rediss://host/0?ca=/no/file", "there is no file /no/file"),
    ],
)  # fmt: skip
def test_urls_that_mean_nothing_are_refused(url, says):
    with pytest.raises(mr.ConfigError, match=says):
        read_address(url)


def test_q10_two_trainings_share_a_server_and_one_name_is_refused(server, view, train, work, tmp_path):
    work(server.url)
    work(server.url, run="exp2")
    first = train(server.url)
    options = {"batch": 8, "seed": 9, "device": "numpy", "epochs": 1}
    with mr.Feed(view, queue=f"{server.url}?{OPTIONS}", run=tmp_path / "exp2", **options) as second:
        for batch, expected in zip(second, mr.Feed(view, **options), strict=True):
            assert batch["x"].tobytes() == expected["x"].tobytes()
            first.take(1)
        assert second.report().made_by_workers > 0
    assert first.by_workers > 0
    other = mr.Feed(view, batch=8, queue=f"{server.url}?{OPTIONS}", run=tmp_path / "elsewhere" / "exp1", device="numpy")
    with pytest.raises(mr.ConfigError, match=f"belongs to a training in {tmp_path}/exp1"):
        iter(other)


def test_a_worker_with_another_transform_is_refused(server, view, work, tmp_path):
    def serve(**functions):
        worker = work(server.url, **functions)
        until(lambda: not worker.thread.is_alive())
        return str(worker.error)

    with mr.Feed(
        view, batch=4, device="numpy", transform=transforms.slow, queue=f"{server.url}?{OPTIONS}", run=tmp_path / "exp1"
    ) as feed:
        batches = iter(feed)
        assert "give --transform module:function" in serve()
        assert "is not what the trainer runs" in serve(transform=transforms.broken)
        assert "this run has no decode" in serve(transform=transforms.slow, decode=transforms.decode_ragged)
        next(batches)


def test_the_hash_of_a_function_covers_its_name_its_source_and_its_options(tmp_path, monkeypatch):
    from functools import partial

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text("def f(batch, rng, k=1): return batch\ndef g(batch, rng): return batch\n")
    import mine

    ids = {
        function_id("transform", each) for each in (None, mine.f, mine.g, partial(mine.f, k=2), partial(mine.f, k=3))
    }
    assert len(ids) == 5
    before = function_id("transform", mine.f)
    assert function_id("transform", mine.f) == before
    (tmp_path / "mine.py").write_text("K = 2\ndef f(batch, rng): return batch\n")
    assert function_id("transform", mine.f) != before
    for wrong in (lambda batch, rng: batch, partial(mine.f, k=np.ones(2)), len):
        with pytest.raises(mr.ConfigError, match="top level of a module"):
            function_id("transform", wrong)


def test_a_worker_opens_the_store_of_the_run_or_a_copy_and_no_other(server, view, train, work, tmp_path):
    shutil.copytree(view.stores[0].path, tmp_path / "copy")
    with mr.StoreWriter(tmp_path / "wrong", columns={"tokens": mr.Column("uint16")}) as writer:
        writer.append({"tokens": np.arange(1000, dtype=np.uint16)})
    trainer = train(server.url)
    wrong = work(server.url, stores=[tmp_path / "wrong"])
    until(lambda: not wrong.thread.is_alive())
    assert "give --store PATH" in str(wrong.error)
    work(server.url, stores=[tmp_path / "copy"])
    trainer.take_from_workers(5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"run": None}, "queue= needs run="), ({"run": "a b"}, "its name 'a b'"), ({"processes": True}, "exclude each other"),
        ({"transform": lambda batch, rng: batch}, "top level of a module"),
    ],
)  # fmt: skip
def test_feeds_that_workers_cannot_serve_are_refused(view, tmp_path, options, says):
    with pytest.raises(mr.ConfigError, match=says):
        mr.Feed(view, batch=4, device="numpy", **{"queue": "redis://127.0.0.1/0", "run": tmp_path / "exp1", **options})


def test_stores_in_memory_and_views_of_others_are_refused(view, tmp_path):
    class Own(mr.Blocks):
        pass

    here = mr.Blocks(mr.from_arrays({"tokens": np.arange(100, dtype=np.uint16)}), length=4)
    for other, says in (
        (here, "in memory"),
        (Own(view.store, length=8), "Own"),
        (mr.Subset(Own(view.store, length=8), [1]), "Own"),
    ):
        with pytest.raises(mr.ConfigError, match=says):
            mr.Feed(other, batch=4, queue="redis://127.0.0.1/0", run=tmp_path / "exp1")


def test_records_that_lie_are_refused(server, work):
    """A record names data, never code, and is checked before it is used."""
    queue = open_queue(server.url)
    for k, record in enumerate((b"", b"{}", b"[]", json.dumps({"version": 9}).encode(), b"\x80\x04.")):
        run = f"lie{k}"
        queue._run("OFFER", run, "a0", "/f", 60_000, 60_000, "a0-1", record, 0, "a0-1:0:4")
        worker = work(server.url, run=run)
        until(lambda worker=worker: not worker.thread.is_alive())
        assert isinstance(worker.error, mr.ConfigError)
    queue.close()
