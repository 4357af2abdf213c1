"""What workers cannot load is ConfigError with the remedy, at construction where it can be known."""

import functools
import resource
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import worker_functions as functions

import millrace as mr
from millrace.feed.batch import Batch
from millrace.feed.processes import worker
from millrace.feed.processes.packing import Layout, Packed

MODULES = Path(__file__).parent / "modules"
REMEDY = "move it to the top level of a module and give it by name"


def closure():
    def inner(batch, rng):
        return batch

    return inner


class Open:
    """An instance that cannot be pickled."""

    def __init__(self):
        self.file = sys.stdout

    def __call__(self, batch, rng):
        return batch


def by_hand():
    """A function of a module that nobody else can import."""
    module = types.ModuleType("made_by_hand")
    exec("def transform(batch, rng):\n    return batch", module.__dict__)
    sys.modules["made_by_hand"] = module
    return module.transform


@pytest.mark.parametrize("name", ["transform", "decode"])
@pytest.mark.parametrize(
    "function", [lambda a, b: a, closure(), Open(), by_hand()], ids=["lambda", "closure", "file", "module"]
)
def test_what_cannot_be_sent_is_refused_at_construction(function, name, feed_of):
    with pytest.raises(mr.ConfigError, match=f"^{name} .*; {REMEDY}"):
        feed_of(**{name: function})
    feed_of(**{name: function}, processes=False)  # threads take anything
    feed_of(**{name: function}, processes="auto")


ONCE = functions.Once("x", "kill")


@pytest.mark.parametrize("function", [functions.same, functools.partial(functions.total, times=3), ONCE, ONCE.__call__])
def test_what_pickle_can_send_is_taken(function, feed_of):
    assert feed_of(function).transform is function


@pytest.mark.parametrize("processes", [2, "fork", "", None, 0.5])
def test_a_wrong_option_is_refused(processes, feed_of):
    if processes in ("", None):
        processes = [processes]
    with pytest.raises(mr.ConfigError, match="expected True, False, 'auto', 'forkserver' or 'spawn'"):
        feed_of(processes=processes)


def test_without_memory_files_it_says_so(feed_of, monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(mr.ConfigError, match="processes= needs Linux"):
        feed_of()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_an_import_that_fails_in_the_worker_is_named(method, feed_of):
    import not_in_workers

    with pytest.raises(
        mr.ConfigError, match="cannot load the feed: ImportError: this machine has no such library; give a transform"
    ):
        next(iter(feed_of(not_in_workers.transform, processes=method)))


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_that_end_before_they_begin_are_not_started_for_ever(method, feed_of):
    import ends_at_import

    with pytest.raises(mr.FeedError, match="end before they begin to work, with exit code 9"):
        next(iter(feed_of(ends_at_import.transform, processes=method)))


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_that_are_killed_before_they_begin_are_started_again(method, feed_of, tmp_path, monkeypatch):
    """Somebody may do that; what ends by itself would always end."""
    import ends_at_import

    monkeypatch.setenv("ENDS_AT_IMPORT", str(tmp_path))
    feed = feed_of(ends_at_import.transform, processes=method, epochs=1)
    assert len(list(feed)) == 5
    assert len(list(tmp_path.iterdir())) >= 4
    assert feed.report().deaths == 0  # they had not worked


@pytest.mark.parametrize(
    ("transform", "what"),
    [
        (functions.masked, "MaskedArray"),
        (functions.structured, r"an array of \[\('a', '<i4'\)\]"),
        (functions.sparse, "a tensor of sparse_coo"),
        (functions.nested, "list of objects"),
        (functions.sets, "ndarray of objects"),
    ],
)
def test_columns_that_cannot_be_sent_are_refused(transform, what, feed_of):
    with pytest.raises(mr.ConfigError, match=f"column 'x' is {what}; processes send arrays and tensors"):
        list(feed_of(transform, epochs=1))


def test_a_file_size_limit_that_leaves_no_shared_memory_is_named(feed_of):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(
            mr.FeedError, match=r"shared memory .* \(File too large\); raise the file size limit \(ulimit -f\)"
        ):
            next(iter(feed_of(functions.sparse)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, for each of these
def test_a_tensor_is_sent_only_where_its_numbers_are_all_of_it():
    import torch

    marks, plain = {"positions": np.arange(4), "samples": np.arange(4), "valid": np.ones(4, bool)}, torch.ones(4, 2)
    forms = {
        "of sparse_csr": plain.to_sparse_csr(), "without data": plain.to("meta"),
        "of quint8": torch.quantize_per_tensor(plain, 0.1, 0, torch.quint8),
    }  # fmt: skip
    for form, tensor in forms.items():
        with pytest.raises(mr.ConfigError, match=f"column 'x' is a tensor {form}; processes send"):
            Packed(Batch({"x": tensor}, **marks))
    sent = Packed(Batch({"x": (plain * 1j).conj(), "y": torch._neg_view(plain)}, **marks))
    memory = np.zeros(sent.num_bytes, np.uint8)
    sent.write(memory)
    arrived = Layout(sent.text).batch(memory)
    assert (arrived["x"] == -1j).all()
    assert (arrived["y"] == -1).all()


SCRIPT = """
import sys
import numpy as np
import millrace as mr

def transform(batch, rng):
    return {"x": batch.x * 2}

view = mr.Blocks(mr.from_arrays({"tokens": np.arange(41)}), length=1)
feed = mr.Feed(view, batch=8, epochs=1, device="numpy", transform=transform, processes=METHOD, workers=1)
"""
LOOP = "for batch in feed: print(batch.x.sum())\n"


def run(arguments, text=None):
    return subprocess.run([sys.executable, *arguments], input=text, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_script_may_hold_the_transform_if_it_trains_under_main(method, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("METHOD", repr(method)) + "if __name__ == '__main__':\n    " + LOOP)
    done = run([path])
    assert (done.returncode, done.stderr) == (0, "")
    assert sum(map(int, done.stdout.split())) == 2 * sum(range(40))


def test_a_script_without_main_is_told_so(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("METHOD", "True") + LOOP)
    done = run([path])
    assert done.returncode == 1
    assert "put the lines that start it under: if __name__ == '__main__':" in done.stderr


def test_a_transform_of_an_interactive_session_is_refused_at_construction():
    done = run(["-"], SCRIPT.replace("METHOD", "True") + LOOP)
    assert done.returncode == 1
    assert "is of a notebook or an interactive session, which workers cannot import" in done.stderr


def test_a_view_without_a_spec_is_refused(feed_of):
    class Own(mr.Blocks):
        def spec(self):
            raise NotImplementedError("no spec")

    view = Own(mr.from_arrays({"tokens": np.arange(9)}), length=1)
    with pytest.raises(mr.ConfigError, match=r"the view Own has no spec .*leave processes= out"):
        mr.Feed(view, batch=4, processes=True, order=mr.Sequential(8))


def test_a_worker_starts_no_workers(monkeypatch, feed_of):
    monkeypatch.setattr(worker, "is_worker", True)
    for processes in (True, "auto"):
        with pytest.raises(mr.ConfigError, match="a worker process imported this script"):
            iter(feed_of(functions.same, processes=processes))
