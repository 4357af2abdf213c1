"""The commands and the trainer: ``millrace worker``, ``millrace queue``, and ``data.queue`` of a configuration."""

import functools
import http.server
import json
import os
import threading

import pytest

import millrace as mr
from millrace.cli import run as millrace
from millrace.train.config import parse_config
from millrace.train.trainer import train as run_training

from .conftest import LONG_S, OPTIONS, until


@pytest.fixture
def settings(view):
    data = {"store": view.stores[0].path, "length": 32}
    model = {"layers": 1, "heads": 1, "width": 8, "vocabulary": 65536}
    return {"data": data, "model": model, "train": {"max_steps": 6, "batch": 4, "log_every": 1, "tensorboard": False}}


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def test_a_training_through_a_queue_has_the_losses_of_one_without(server, settings, start_worker, tmp_path):
    run_training(parse_config(settings), tmp_path / "alone")
    worker = start_worker(server.url)
    client = server.client()
    until(lambda: client.zcard("w:exp1"))
    settings["data"]["queue"] = f"{server.url}?{OPTIONS}"
    run_training(parse_config(settings), tmp_path / "exp1")
    assert losses(tmp_path / "exp1") == losses(tmp_path / "alone")
    assert len(losses(tmp_path / "exp1")) == 6
    said, _ = worker.communicate(timeout=LONG_S)
    assert worker.returncode == 0
    assert "run exp1 has ended; made" in said
    assert "made 0 batches" not in said
    # Continued without the queue, or with one: it changes no sample.
    settings["train"]["max_steps"] = 8
    del settings["data"]["queue"]
    for name in ("alone", "exp1"):
        run_training(parse_config(settings), tmp_path / name)
    assert losses(tmp_path / "exp1") == losses(tmp_path / "alone")


def test_workers_open_a_store_at_its_url(server, train, work, view, tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=os.path.dirname(view.stores[0].path))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *arguments: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{web.server_address[1]}/{os.path.basename(view.stores[0].path)}"
        worker = work(server.url)
        train(server.url, of=mr.Blocks(mr.open_store(url), length=256)).take_from_workers(5)
        assert worker.error is None
        web.shutdown()


def test_status_and_drain(server, train, work, capsys):
    assert millrace(["queue", "status", server.url]) == 0
    assert capsys.readouterr().out == "no run is here\n"
    worker = work(server.url)
    trainer = train(server.url)
    trainer.take_from_workers(5)
    until(lambda: millrace(["queue", "status", server.url, "--json"]) == 0
          and json.loads(capsys.readouterr().out)[0]["workers"][worker.id]["made"] >= 5)  # fmt: skip
    assert millrace(["queue", "status", server.url]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("exp1: live, ")
    assert worker.id in shown
    assert "batches/s" in shown
    assert millrace(["queue", "drain", server.url, "--run", "exp1"]) == 0
    assert "keys of exp1" in capsys.readouterr().out
    trainer.take_from_workers(5)
    trainer.close()
    worker.thread.join(LONG_S)
    assert millrace(["queue", "drain", server.url, "--run", "exp1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "exp1"
    assert server.client().keys("*") == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["worker", "redis://127.0.0.1:1/0", "--run", "a/b c"], "its name 'b c'"),
        (["worker", "nonsense", "--run", "exp1"], "redis://host"),
        (["worker", "redis://:secret@h/0", "--run", "exp1"], "holds a password"),
        (["worker", "redis://127.0.0.1:1/0", "--run", "exp1", "--transform", "no.such:thing"], "cannot be loaded"),
        (["worker", "redis://127.0.0.1:1/0", "--run", "exp1", "--store", "/no/store"], "/no/store"),
        (["queue", "status", "redis://127.0.0.1:1/0"], "does not answer"),
    ],
)
def test_mistakes_are_one_line(arguments, says, capsys):
    assert millrace(arguments) == 1
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.count("\n") == 1
    assert "secret" not in shown


def test_the_report_says_who_made_the_batches(server, train, work):
    trainer = train(server.url)
    trainer.take(3)
    work(server.url)
    trainer.take_from_workers(4)
    report = trainer.feed.report()
    assert report.way == "queue"
    assert f"workers made {report.made_by_workers} batches, this process made {report.made_here}" in str(report)
    assert report.as_dict()["made_here"] >= 3
    assert mr.Feed(trainer.feed.view, batch=2).report() is None
