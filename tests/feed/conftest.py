"""Runs a script with a feed in an interpreter of its own: how it ends is what is tested."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

HEAD = """
import gc, os, sys, threading, time
import numpy as np
import millrace as mr
from millrace.feed import compose as native

native.IN_LINE_BYTES = int(os.environ.get("MILLRACE_TEST_IN_LINE_BYTES", native.IN_LINE_BYTES))

view = mr.Blocks(mr.from_arrays({"tokens": np.arange(1001)}), length=1)

def quick(batch, rng):
    return batch

def slow(batch, rng):
    time.sleep(0.05)
    return batch

def stuck(batch, rng):
    os.write(1, b"stuck\\n")
    time.sleep(1000)

def fail(batch, rng):
    if batch.positions[0] >= 40:
        raise KeyError("my bug")
    return batch

def feed_of(transform, **options):
    return mr.Feed(view, batch=4, device="numpy", transform=transform, **{"workers": 3, "depth": 5, **options})

def until_awaited(feed):
    # Before that the main thread is still starting threads, which Python itself does not do safely under a signal.
    while feed.live is None or not feed.live._takers:
        time.sleep(0.01)
    time.sleep(0.1)  # from there to the wait

def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("millrace-")]

def threads_left():
    # A closed feed does not wait long for its threads: each ends with the batch that it is making.
    deadline = time.monotonic() + 30
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return threads()
"""


def start(script):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", HEAD + script],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def run_script(script, interrupt_at=None):
    """Exit code, what it printed, and its stderr; with ``interrupt_at`` Ctrl-C is sent once that line was printed."""
    with start(script) as process:
        try:
            if interrupt_at is not None:
                assert process.stdout.readline() == interrupt_at + "\n"
                process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=40)
        finally:  # with whatever it forked
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


@pytest.fixture(autouse=True, scope="module")
def every_way(way):
    """All tests here run with batches made in line and by threads."""


@pytest.fixture(scope="session")
def run():
    return run_script
