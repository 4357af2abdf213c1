"""A feed in JAX: batches are pytrees, jit traces once for all of them, and processes have their shares."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

import millrace as mr
import millrace.jax


def test_batches_go_through_jit_with_one_trace(feed_of):
    traces = []

    @jax.jit
    def double(batch):
        assert batch.positions is batch.samples is batch.valid is None  # they are those of any batch
        traces.append(1)
        return jax.tree.map(lambda column: column * 2, batch)

    for batch in feed_of(epochs=1, device="numpy"):
        doubled = double(batch)
        assert type(doubled) is mr.Batch
        assert doubled.samples is None
        assert np.array_equal(doubled["x"], batch["x"] * 2)
    assert len(traces) == 1


def test_marks_stay_outside_of_traces(feed_of, events):
    batch = next(iter(feed_of(device="numpy")))
    for other in (jax.device_put(batch), jax.tree.map(lambda column: column + 1, batch)):
        assert np.array_equal(other.samples, batch.samples)
        assert isinstance(other["x"], (jax.Array, np.ndarray))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(batch)[0]]
    assert paths == ["['x']", "['y']"]
    ragged = next(iter(mr.Feed(events, batch=4, device="numpy")))["hits"]
    assert float(jax.jit(lambda hits: hits.values.sum())(ragged)) == pytest.approx(float(ragged.values.sum()), rel=1e-5)


PROCESS = """
import json, sys
import jax, numpy as np
import millrace as mr
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
view = mr.Blocks(mr.from_arrays({"tokens": np.arange(11)}), length=1)
print(json.dumps([batch.samples.tolist() for batch in mr.Feed(view, batch=4, seed=1, epochs=1, device="numpy")]))
"""


def test_processes_of_jax_share_a_batch(free_port):
    address = f"127.0.0.1:{free_port}"
    command = [sys.executable, "-W", "ignore", "-c", PROCESS, address]
    processes = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    shares = [json.loads(process.communicate(timeout=100)[0].splitlines()[-1]) for process in processes]
    together = [samples for batches in zip(*shares, strict=True) for share in batches for samples in share]
    assert together == [*mr.Shuffled(10, 1).samples(np.arange(10)).tolist(), -1, -1]
