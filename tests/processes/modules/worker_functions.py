"""What the tests run in worker processes: a module that these can import."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

import millrace as mr


def noisy(batch, rng):
    return {"x": batch.x + rng.normal(*batch.x.shape[1:]), "i": rng.integers(0, 1000, 2), "y": batch.y}


def decode(record, rng):
    """Rows of any number, a stacked column, text, and what the generator draws."""
    count = int(record["x"][0]) % 4
    return {
        "rows": mr.Ragged.one(np.arange(count) + rng.integers(0, 100)), "u": np.float64(rng.uniform()),
        "g": rng.generator().normal(size=3), "name": f"sample {record['x'][0]}",
    }  # fmt: skip


def shifted(batch, rng):
    """On top of ``decode``: the transform's own numbers."""
    return {**batch, "v": rng.uniform(), "u": batch.u + 1}


def same(batch, rng):
    return batch


def pids(batch, rng):
    return {"pid": np.full(batch.num_samples, os.getpid())}


def slow(batch, rng):
    time.sleep(0.02)
    return batch


def growing(batch, rng):
    """Batches of more and more rows: a slot of the first size holds none of the others."""
    lengths = batch.positions + 1
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return {"rows": mr.Ragged(np.arange(offsets[-1]), offsets)}


def columns(batch, rng):
    """Every kind of column that may be sent, but tensors: of numpy's kinds all but V, which may hold objects."""
    n = batch.num_samples
    return {
        "f": np.asfortranarray(rng.uniform(2, 3)), "big": batch.x.astype(">i4"), "flag": batch.x[:, 0] % 2 == 0,
        "half": batch.x.astype(np.float16), "time": batch.x[:, 0].astype("datetime64[s]"), "none": np.zeros((n, 0)),
        "unsigned": batch.x.astype(np.uint8), "complex": batch.x * 1j, "span": batch.x[:, 0].astype("timedelta64[s]"),
        "text": np.array([f"é{k}" for k in range(n)]), "bytes": np.array([b"ab"] * n), "step": batch.x[::1, ::-1],
        "objects": np.array([["a", None]] * n, object), "list": [1.5, "a", None, True] * (n // 4), "pair": tuple(range(n)),
        "ragged": mr.Ragged(np.arange(n), np.arange(n + 1)),
        "words": mr.Ragged(np.array([f"é{k}" for k in range(n)], object), np.arange(n + 1)),
    }  # fmt: skip


def masked(batch, rng):
    return {"x": np.ma.masked_array(batch.x, batch.x > 3)}


def structured(batch, rng):
    return {"x": np.zeros(batch.num_samples, [("a", "i4")])}


def nested(batch, rng):
    return {"x": [[1], [2, 3]] * (batch.num_samples // 2)}


def sets(batch, rng):
    return {"x": np.array([{1}] * batch.num_samples)}


def sparse(batch, rng):
    import torch

    return {"x": torch.ones(8, 2).to_sparse()}


class Disagreeable(Exception):
    """Cannot be pickled, and says too much."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}", threading.Lock())

    def __str__(self):
        return "é\U0001f600\x00" * 50_000


def raises(batch, rng):
    if batch.positions[0] == 16:
        raise Disagreeable(1, 2)
    return batch


def decode_raises(record, rng):
    if record["x"][0] == 13:
        raise KeyError("no such key")
    return record


def divides(given, rng):
    return 1 / 0


def is_thirteen(batch):
    return 13 in batch.x


def exits(batch, rng):
    if is_thirteen(batch):
        sys.exit(7)
    return batch


def decode_dies(record, rng):
    if record["x"][0] == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return record


def segfaults(batch, rng):
    if is_thirteen(batch):
        ctypes.string_at(0)
    return batch


def eats_memory(batch, rng):
    """What is killed when memory runs out depends on the machine; a limit of its own gives the same exception."""
    import resource

    if is_thirteen(batch):
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        np.ones(1 << 28)
    return batch


def once(path):
    """Whether this is the first time, in any process."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def parent_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rsplit(")", 1)[-1].split()[1])
    except OSError:
        return -1


class Once:
    """Does something in the batch that holds sample 13, the first time that it is made."""

    def __init__(self, path, what):
        self.path, self.what = str(path), what

    def __call__(self, batch, rng):
        if is_thirteen(batch) and once(self.path):
            getattr(self, self.what)()
        return batch

    def stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def stop_server(self):
        os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_all(self):
        """Every worker, and itself last: the others have no batch then."""
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid() and parent_of(name) == os.getppid():
                os.kill(int(name), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_server(self):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(100)

    def leave_a_child(self):
        """A child that holds this worker's socket open after its death."""
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def fork(self):
        """Both go on: the child must not answer."""
        os.fork()

    def threads(self):
        threading.Thread(target=time.sleep, args=(1000,)).start()
        sys.exit(3)

    def hang(self):
        time.sleep(1000)


def talks(batch, rng):
    sys.stdout.write(f"hello from {batch.positions[0]}\n")  # in one piece: workers print side by side
    return batch


def runs_a_program(batch, rng):
    subprocess.run(["true"], check=True)
    return batch


def takes_long(batch, rng):
    """Holds the GIL as Python code does."""
    end = time.perf_counter() + 0.05
    while time.perf_counter() < end:
        pass
    return batch


def total(record, rng, times):
    return {"total": times * record["hits"].sum()}


class Counting:
    """Leaves a file for each batch that is begun."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __call__(self, batch, rng):
        open(f"{self.folder}/{batch.positions[0]}", "w").close()
        return batch


def stuck(batch, rng):
    if batch.positions[0] == 0:
        os.write(1, b"stuck\n")
    time.sleep(1000)


def four_megabytes(batch, rng):
    return {"x": np.ones((batch.num_samples, (4 << 20) // batch.num_samples), np.uint8)}


LOCK = threading.Lock()


def locks(batch, rng):
    with LOCK:
        return batch
