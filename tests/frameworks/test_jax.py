"""A feed in JAX: batches are pytrees, jit traces once for all of them, and processes have their shares.

JAX runs in processes of its own: where it is imported, every fork of later tests would be warned of.
"""

import json
import subprocess
import sys

import numpy as np

import millrace as mr
from millrace.testing.servers import free_port

PYTREES = """
import jax, numpy as np
import millrace as mr, millrace.jax

view = mr.Blocks(mr.from_arrays({"tokens": np.arange(11)}), length=1)
events = mr.Records(mr.from_arrays({"hits": np.arange(50.0), "label": np.arange(10)}, offsets=np.arange(0, 51, 5)))
traces = []

@jax.jit
def double(batch):
    assert batch.positions is batch.samples is batch.valid is None  # they are those of any batch
    traces.append(1)
    return jax.tree.map(lambda column: column * 2, batch)

for batch in mr.Feed(view, batch=3, seed=1, epochs=1, device="numpy"):
    doubled = double(batch)
    assert type(doubled) is mr.Batch
    assert doubled.samples is None
    assert np.array_equal(doubled["x"], batch["x"] * 2)
assert len(traces) == 1

for other in (jax.device_put(batch), jax.tree.map(lambda column: column + 1, batch)):  # outside of traces they stay
    assert np.array_equal(other.samples, batch.samples)
    assert np.array_equal(other.valid, batch.valid)
paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(batch)[0]]
assert paths == ["['x']", "['y']"], paths

hits = next(iter(mr.Feed(events, batch=4, device="numpy")))["hits"]
total = jax.jit(lambda hits: hits.values.sum())(hits)
assert abs(float(total) - hits.values.sum()) < 1e-3
assert isinstance(jax.tree.map(lambda array: array, hits), mr.Ragged)
print("done")
"""


def test_batches_and_ragged_columns_are_pytrees():
    done = subprocess.run([sys.executable, "-c", PYTREES], capture_output=True, text=True, timeout=100)
    assert done.stdout.endswith("done\n"), done.stderr


WITHOUT_IMPORT = """
import inspect, sys
import jax, numpy as np
import millrace as mr

batch = next(iter(mr.Feed(mr.Blocks(mr.from_arrays({"tokens": np.arange(11)}), length=1), batch=3, device="numpy")))
dict(inspect.getmembers(batch))
for call in (jax.jit(lambda batch: batch["x"]), jax.device_put, jax.grad(lambda batch: batch["x"].sum())):
    try:
        call(batch)
    except mr.ConfigError as error:
        assert "import millrace.jax" in str(error), error
    else:
        sys.exit(f"{call} took it")
print("done")
"""


def test_jax_names_the_import_that_it_needs_for_a_batch():
    done = subprocess.run([sys.executable, "-c", WITHOUT_IMPORT], capture_output=True, text=True, timeout=100)
    assert done.stdout.endswith("done\n"), done.stderr


PROCESS = """
import json, sys
import jax, numpy as np
import millrace as mr
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
view = mr.Blocks(mr.from_arrays({"tokens": np.arange(11)}), length=1)
print(json.dumps([batch.samples.tolist() for batch in mr.Feed(view, batch=4, seed=1, epochs=1, device="numpy")]))
"""


def test_processes_of_jax_share_a_batch():
    command = [sys.executable, "-W", "ignore", "-c", PROCESS, f"127.0.0.1:{free_port()}"]
    processes = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    shares = [json.loads(process.communicate(timeout=100)[0].splitlines()[-1]) for process in processes]
    together = [sample for batches in zip(*shares, strict=True) for share in batches for sample in share]
    assert together == [*mr.Shuffled(10, 1).samples(np.arange(10)).tolist(), -1, -1]
