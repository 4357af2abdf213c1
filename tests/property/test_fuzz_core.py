"""Whatever the C core is given, it answers or raises: random arguments in a process of its own, and what they found."""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.native import core

pytestmark = pytest.mark.needs_core
SCRIPT = Path(__file__).parent / "fuzz_core.py"
CALLS = int(os.environ.get("MILLRACE_FUZZ", "4000"))  # `make sanitize` makes more


@pytest.mark.parametrize("seed", [1, 2])
def test_random_arguments_end_in_no_signal(seed, tmp_path):
    arguments = [sys.executable, "-X", "faulthandler", str(SCRIPT), str(seed), str(CALLS), str(tmp_path / "last")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    under_way = (tmp_path / "last").read_text() if (tmp_path / "last").exists() else "before the first call"
    assert done.returncode == 0, f"{under_way}: {done.stderr[-5000:]}"
    answered = json.loads(done.stdout)
    assert min(answered.values()) > CALLS // 2000, answered  # of each kind some calls are right


def test_every_function_type_and_method_is_called():
    import importlib.util

    spec = importlib.util.spec_from_file_location("fuzz_core", SCRIPT)
    fuzz_core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz_core)
    source = SCRIPT.read_text()
    for name, methods in fuzz_core.known_names():
        assert f"core.{name}" in source
        for method in methods:
            assert f".{method.split('.')[1]}" in source, method


# What was found.


@pytest.mark.parametrize("width", [1 << 40, 1 << 59, 1 << 60, 1 << 61, (1 << 63) - 1])
@pytest.mark.parametrize("size", [0, 12])
def test_rows_of_any_width_are_refused(width, size):
    """width * 8 was 0, by which was divided."""
    with pytest.raises(ValueError, match="rows of the width"):
        core.measure_rows(np.zeros(size), width, np.array([0]), np.array([0]), np.zeros(0))


def as_program(places):
    column = core.Column(np.array([0, 4]), 8)
    column.give(0, np.full(4, 1 << 40))
    fields = (("a", 0, 1, 0, 0, 0, 0, 1, 1, 8, None), ("b", 0, 2, 0, 0, 0, 2, 1, 1, 8, None))
    gather, steps = core.Gather((column,), fields), (("offsets", 0, (np.array([0, 2, 4]),)),)
    return core.Program(("sequential", 2), steps, (gather,), (0, -1, 2, 0, 2), (0, 256, 512), places, 1280, print)


def test_fields_that_share_bytes_of_a_slot_are_refused():
    """The padded field was written over the offsets of the ragged one, which then said where to write."""
    as_program((768, 1024))
    for places in ((768, 768), (768, 776), (768, 784), (792, 768), (0, 1024), (768, 512), (264, 1024)):
        with pytest.raises(ValueError, match="do not fit in the slot"):
            as_program(places)


@pytest.mark.skipif(sys.maxsize < 1 << 40, reason="4 GiB of addresses")
def test_a_text_of_four_gigabytes_is_as_valid_as_its_characters():
    """What was left of it was counted in 32 bits, and nothing seemed to be left. The zeros take no memory."""
    with mmap.mmap(-1, (1 << 32) + 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as text:
        text[:2] = "é".encode()
        assert core.is_utf8(text, 0, 1 << 32)


def askew(array):
    """The same numbers at an address that is no multiple of their size."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    memory[1:] = np.frombuffer(array.tobytes(), np.uint8)
    return memory[1:].view(array.dtype)


def test_numbers_that_lie_askew_are_refused_by_the_core():
    plan, positions = ("shuffled", 9, 3), np.arange(9)
    for given, out in ((askew(positions), np.zeros(9, "i8")), (positions, askew(np.zeros(9, "i8")))):
        with pytest.raises(ValueError, match=r"multiple of it|int64 samples"):
            core.samples(plan, given, out)
    with pytest.raises(ValueError, match="permute"):
        core.permute(askew(np.arange(9, dtype="u8")), 9, np.arange(24, dtype="u4"), False)
    with pytest.raises(ValueError, match="multiple of it"):
        core.scale_rows(askew(np.arange(6.0)), np.zeros(3), np.ones(3), np.zeros(6, "f4"))


def test_numbers_that_lie_askew_are_copied_for_the_core():
    offsets, values, ids = (askew(array) for array in (np.array([0, 2, 5]), np.arange(5.0), np.array([1, 0])))
    view = mr.Subset(mr.Records(mr.from_arrays({"hits": values}, offsets)), ids)
    assert view[0]["hits"].tolist() == [2.0, 3.0, 4.0]
    assert [batch.hits[0].tolist() for batch in mr.Feed(view, batch=1, epochs=1, order=mr.Sequential(2), device="numpy")] == [
        [2.0, 3.0, 4.0], [0.0, 1.0],
    ]  # fmt: skip
    assert (
        mr.Shuffled(9, seed=3).samples(askew(np.arange(9))).tolist()
        == mr.Shuffled(9, seed=3).samples(np.arange(9)).tolist()
    )


def test_outputs_over_the_places_that_say_where_to_write_are_refused():
    column = core.Column(np.array([0, 4]), 8)
    column.give(0, np.full(4, 1 << 40))
    gather = core.Gather((column,), (("a", 0, 1, 0, 0, 0, 0, 1, 1, 8, None),))
    places = np.array([0, 2, 4, 0, 0])
    with pytest.raises(ValueError, match="outputs that overlap"):
        gather.fill(((np.array([0, 2]), np.array([2, 4]), None),), None, 0, 2, (places[1:],), (places[:3],), 1)


def test_a_slot_smaller_than_was_asked_for_is_refused():
    """It was asked for again, without end."""
    ring = core.Ring(as_program((768, 1024)), lambda slot, num_bytes: np.zeros(8, np.uint8), -1, 1, 2, 0)
    with pytest.raises(ValueError, match="a slot has 8 bytes, expected 1920"):
        ring.get()


def test_a_step_without_a_name_is_refused():
    parts, line = (core.Gather((), ()),), (0, -1, 1, 0, 1)
    for name in (0, None, b"take", 1.5):
        with pytest.raises(TypeError, match="begins with its name"):
            core.Program(("sequential", 2), ((name, 0, 0),), parts, line, (0, 256, 512), (), 768, print)
