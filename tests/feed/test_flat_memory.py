"""Anonymous memory does not grow with batches, epochs or the number of samples.

Measured by the kernel in an interpreter of its own; pages of files do not count.
"""

import json
import os
import subprocess
import sys

import pytest

HEAD = """
import ctypes, gc, itertools, json, os, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: one huge page is a tenth of all that is measured
import numpy as np
import millrace as mr
from millrace.feed import compose as native

native.IN_LINE_BYTES = int(os.environ.get("MILLRACE_TEST_IN_LINE_BYTES", native.IN_LINE_BYTES))

def anonymous():
    for number in range(100_000):  # CPython's table of interned strings outgrows itself now and then: always before
        sys.intern(f"string {number}")
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous:"))

def measure(feed, *counts):
    found, done, iterator = [], 0, iter(feed)
    for count in counts:
        for batch in itertools.islice(iterator, count - done):
            pass
        done = count
        found.append(anonymous())
    return found
"""

pytestmark = [
    pytest.mark.own_process,
    pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="only Linux tells anonymous pages"),
]


# What is freed goes back to the kernel at once, else the allocator's own habits are measured (1 MB of 27).
HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "32768",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}


def run(script, *args):
    """What the script printed, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script, *map(str, args)],
        capture_output=True, text=True, timeout=100, check=False, env=os.environ | HEAP,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


VIEWS = {
    "dense": 'mr.Blocks(mr.from_arrays({"tokens": np.arange(1_000_000)}), length=8, stride=3)',
    "ragged": 'mr.Records(mr.from_arrays({"hits": np.arange(9000.0)}, np.arange(0, 9001, 3)))',
}


@pytest.mark.parametrize(("view", "last"), [("dense", 100_000), ("ragged", 15_000)])
def test_memory_is_flat_from_the_thousandth_batch_on(view, last):
    """Tens of plans and, with 3,000 samples, hundreds of epochs."""
    script = f'print(json.dumps(measure(mr.Feed({VIEWS[view]}, batch=16, device="numpy"), 1_000, 5_000, {last})))'
    first, *later = run(script)
    assert later == pytest.approx([first] * 2, rel=0.02)


def test_memory_is_flat_with_threads():
    script = f"""
def noisy(batch, rng):
    return {{"x": batch.x + rng.uniform(8)}}

feed = mr.Feed({VIEWS["dense"]}, batch=32, device="numpy", transform=noisy, workers=2, depth=6)
print(json.dumps(measure(feed, 1_000, 5_000, 15_000)))
feed.close()
"""
    first, *later = run(script)
    assert later == pytest.approx([first] * 2, rel=0.02)


def test_memory_is_flat_over_passes_and_restores():
    script = f"""
feed = mr.Feed({VIEWS["ragged"]}, batch=64, device="numpy")
found = []
for number in range(1, 201):
    for batch in feed.by_epoch():
        pass
    feed.load_state_dict(json.loads(json.dumps(feed.state_dict())))
    if number in (20, 200):
        found.append(anonymous())
print(json.dumps(found))
"""
    first, last = run(script)
    assert last == pytest.approx(first, rel=0.02)


SPARSE = """
store = mr.open_store(sys.argv[1], dtype="uint8")
feed = mr.Feed(mr.Blocks(store, length=16, stride=1), batch=8, device="numpy", seed=5)
found = measure(feed, 40)  # few: a fault on a hole of a file takes milliseconds on some machines
explained = feed.explain(10**6)
assert feed.steps_of(explained.samples, int(explained.epochs[0])).tolist() == [10**6] * 8
print(json.dumps([len(feed.view), *found, anonymous()]))
"""


def test_memory_does_not_depend_on_the_number_of_samples(tmp_path):
    """Ten thousand samples against ten thousand million, in a file that has no blocks on disk."""
    found = {}
    for rows in (10**4 + 16, 10**10 + 16):
        path = tmp_path / f"{rows}.bin"
        path.touch()
        os.truncate(path, rows)
        samples, *memory = run(SPARSE, path)
        assert samples == rows - 16
        found[rows] = memory
    small, large = found.values()
    assert large == pytest.approx(small, rel=0.02)
