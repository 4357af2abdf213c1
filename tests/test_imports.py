"""What an import costs, counted in modules: nothing heavy is even looked for before it is needed."""

import json
import re
import subprocess
import sys

import pytest

import millrace as mr

HEAVY = ("torch", "pyarrow", "tokenizers", "redis", "matplotlib", "PIL", "simplejpeg")
WATCH = """
import json, sys
asked = set()
class Watch:
    # First in line, so it also sees modules that are not installed and imports under try.
    def find_spec(self, name, path=None, target=None):
        asked.add(name.split(".")[0])
sys.meta_path.insert(0, Watch())
"""


def asked_for(script: str, *args: object) -> set[str]:
    """The top-level modules that a script tries to import in a fresh interpreter."""
    code = WATCH + script + "\nprint(json.dumps(sorted(asked)))"
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def store_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("imports") / "store"
    columns = {"x": mr.Column("float32", (2,)), "b": mr.Column("bfloat16"), "name": mr.Column("string", per="record")}
    with mr.StoreWriter(path, columns=columns) as writer:
        writer.append({"x": [[1.0, 2.0]], "b": [3.0], "name": "one"})
    return path


def test_importing_millrace_looks_for_nothing_heavy_not_even_numpy():
    asked = asked_for("import millrace")
    assert "millrace" in asked
    assert asked.isdisjoint({*HEAVY, "pandas", "numpy", "msgspec", "xxhash", "psutil", "typer", "rich"})


def test_a_name_loads_only_what_it_needs():
    asked = asked_for("import millrace\nmillrace.ConfigError")
    assert asked.isdisjoint({*HEAVY, "pandas", "numpy"})
    assert "numpy" in asked_for("import millrace\nmillrace.Ragged")


def test_opening_and_reading_a_store_looks_for_nothing_heavy(store_path):
    script = """
import millrace as mr
store = mr.open_store(sys.argv[1], check=True)
assert [store.columns[name][0] is not None for name in store.columns] == [True] * 3
assert store.offsets.tolist() == [0, 1]
assert store.split("train").fingerprint
"""
    assert asked_for(script, store_path).isdisjoint({*HEAVY, "pandas"})


def test_writing_a_store_looks_for_nothing_heavy(tmp_path):
    script = """
import millrace as mr
with mr.StoreWriter(sys.argv[1], columns={"x": mr.Column("int8")}) as writer:
    writer.append({"x": [1, 2]})
"""
    assert asked_for(script, tmp_path / "store").isdisjoint({*HEAVY, "pandas"})


def test_a_store_in_memory_looks_for_nothing_heavy():
    script = "import millrace as mr\nmr.from_arrays({'x': [1, 2], 'name': ['a']}).fingerprint"
    assert asked_for(script).isdisjoint({*HEAVY, "pandas"})


FRAMEWORKS = {"lightning", "pytorch_lightning", "accelerate", "transformers", "torchdata", "jax", "tensorflow"}


def test_no_framework_is_looked_for_unless_its_adapter_is_used(store_path):
    script = """
import millrace as mr
store = mr.open_store(sys.argv[1])
batch, = mr.Feed(mr.Records(store), batch=1, epochs=1, device="numpy").by_epoch()
list(mr.Feed(mr.Records(store), batch=1, device="numpy").by_epoch(repeat=True))
"""
    assert asked_for(script, store_path).isdisjoint({*FRAMEWORKS, "torch"})
    script = """
import millrace as mr, millrace.torch
batch, = mr.Feed(mr.Records(mr.open_store(sys.argv[1])), batch=1, epochs=1).by_epoch()
batch.to("cpu")
"""
    own = asked_for("import torch")
    assert (asked_for(script, store_path) - own).isdisjoint(FRAMEWORKS)


@pytest.mark.parametrize(
    ("adapter", "missing"),
    [
        ("torch", "torch"),
        ("jax", "jax"),
        ("accelerate", "accelerate"),
        ("transformers", "transformers"),
        ("transformers", "accelerate"),
    ],
)
def test_an_adapter_names_its_extra_where_that_is_missing(adapter, missing):
    script = f"""
import sys
sys.modules[{missing!r}] = None
try:
    import millrace.{adapter}
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    assert re.fullmatch(rf"millrace\.{adapter} needs .*; pip install '\.\[{adapter}\]'\n", done.stdout)
