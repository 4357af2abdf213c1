"""What tests of feeds through a queue share: a server, workers, and a trainer that compares each batch with a local feed."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import millrace as mr
from millrace.feed.remote.worker import Functions, Lines, Worker
from millrace.queues.open import open_queue
from millrace.testing.servers import RedisServer

LONG_S = 60.0  # what tests wait for comes in milliseconds; on a busy machine it may take longer
OPTIONS = "deadline_s=60&lease_s=1&alive_s=60&timeout_s=20"


def until(condition, what="it"):
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.005)


def is_there(queue, run, worker):
    try:
        return worker.id in queue.status(run).workers
    except mr.QueueError:
        return False


def bytes_of(batch):
    values = []
    for value in (*batch.values(), batch.positions, batch.samples, batch.valid):
        values += [value.values, value.offsets] if isinstance(value, mr.Ragged) else [value]
    return [
        (value.dtype.str, value.shape, value.tolist() if value.dtype == object else value.tobytes()) for value in values
    ]


class Trainer:
    """A feed through a queue. Every batch it takes is compared with that of a local feed."""

    def __init__(self, view, folder, url, options=OPTIONS, **feed):
        feed = {"batch": 16, "seed": 3, "device": "numpy", **feed}
        self._local = iter(mr.Feed(view, **feed))
        self.feed = mr.Feed(view, queue=f"{url}?{options}", run=folder / "exp1", **feed)
        self._batches = iter(self.feed)
        self.num_taken = 0

    def take(self, count):
        for _ in range(count):
            assert bytes_of(next(self._batches)) == bytes_of(next(self._local)), f"batch {self.num_taken}"
            self.num_taken += 1

    @property
    def by_workers(self):
        report = self.feed.report()
        assert report.made_by_workers + report.made_here == self.num_taken
        return report.made_by_workers

    @property
    def here(self):
        return self.num_taken - self.by_workers

    def take_from_workers(self, count=10):
        """Takes batches until workers have made so many more. As a training step does, it leaves them time for one."""
        wanted = self.by_workers + count
        deadline = time.monotonic() + LONG_S
        while self.by_workers < wanted:
            for _ in range(50):
                if any(window.arrived for window in self.feed.link._windows):
                    break
                time.sleep(0.002)
            self.take(1)
            assert time.monotonic() < deadline, f"workers made {self.by_workers} of {self.num_taken} batches"

    def close(self):
        self.feed.close()
        self._local.close()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Where workers note which files they found right: never in the user's own cache."""
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def view(tmp_path_factory):
    path = tmp_path_factory.mktemp("queue") / "store"
    with mr.StoreWriter(path, columns={"tokens": mr.Column("uint16")}) as writer:
        writer.append({"tokens": np.random.default_rng(0).integers(0, 65536, 60_000, np.uint16)})
    return mr.Blocks(mr.open_store(path), length=256)


@pytest.fixture(scope="session")
def shared_server():
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(shared_server):
    """A server that no test harms, empty."""
    shared_server.client().flushall()
    return shared_server


@pytest.fixture
def start_server():
    """start_server(option, ...): a server of one test, which it may kill."""
    servers = []

    def start(*options, **more):
        servers.append(RedisServer(*options, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def train(view, tmp_path):
    """train(url, ...): a trainer, closed at the end."""
    trainers = []

    def start(url, options=OPTIONS, of=view, **feed):
        trainers.append(Trainer(of, tmp_path, url, options, **feed))
        return trainers[-1]

    yield start
    for trainer in trainers:
        trainer.close()


@pytest.fixture
def work():
    """work(url, ...): a worker in threads of this process; it ends at the end of the test."""
    workers = []

    def start(url, options=OPTIONS, run="exp1", threads=1, stores=(), **functions):
        queue = open_queue(f"{url}?{options}")
        said = []
        lines = Lines(queue, run, Functions(**functions), list(stores), threads=threads)
        worker = Worker(queue, run, lines.maker, threads=threads, say=said.append)
        worker.said, worker.error = said, None

        def serve():
            try:
                worker.serve()
            except mr.MillraceError as error:
                worker.error = error

        thread = threading.Thread(target=serve)
        thread.start()
        workers.append((worker, thread, queue))
        worker.thread = thread
        until(lambda: said or not thread.is_alive() or is_there(queue, run, worker), "that the worker is there")
        return worker

    yield start
    for worker, thread, queue in workers:
        worker.is_over = True
        thread.join()
        queue.close()


@pytest.fixture
def start_worker():
    """start_worker(url, ...): a worker as a process of its own, ended at the end."""
    processes = []

    def start(url, *arguments, options=OPTIONS, run="exp1", before=(), env=None):
        command = [*before, sys.executable, "-m", "millrace", "worker", f"{url}?{options}", "--run", run, *arguments]
        environment = {**os.environ, **(env or {})}
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        )
        return processes[-1]

    yield start
    for process in processes:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()
