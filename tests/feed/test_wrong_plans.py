"""Plans, programs and arrays that are wrong: an error each, whatever is wrong with them, and never a crash."""

import numpy as np
import pytest

import millrace as mr
from millrace.native import core

pytestmark = pytest.mark.needs_core


def pieces(records, rows, *each):
    return np.array(records), ((np.array(rows), tuple(map(np.array, each))),)


PIECES = pieces([0, 1, 2], [0, 2], [0, 2], [0, 2])
WRONG_PIECES = [
    pieces([0, 1, 2], [0, 2], [0, 2]), pieces([0, 1, 2], [0], [0, 2], [0, 2]), pieces([0, 1, 3], [0, 2], [0, 2], [0, 2]),
    pieces([1, 2, 3], [0, 2], [0, 2], [0, 2]), pieces([0, 2, 1], [0, 2], [0, 2, 2], [0]), pieces([0], []), pieces([], []),
    pieces([0, -(1 << 63), 2], [0, 2], [0, 2], [0, 2]), (np.array([0, 2]), ()), (np.array([0, 2]), (None,)),
    (np.array([0, 2]),), None,
]  # fmt: skip
WRONG_OFFSETS = [
    pieces([0, 1, 2], [0, 2], [0, 9], [0, 2]), pieces([0, 1, 2], [0, -9], [0, 2], [0, 2]),
    pieces([0, 2], [0], [0, 1 << 61, -5]), pieces([0, 1, 2], [0, 1 << 62], [0, 2], [0, (1 << 63) - 1]),
]  # fmt: skip
# The last ones are ranks that the offsets do not have.
WRONG_RANKS = [
    ([0], 1, 1), ([0, 1, 2], 1, 1), ([0, 2], 0, 1), ([0, 2], 1, 0), ([0, -1], 1, 1), ([0, 9], 1, 3), ([5, 9], 1, 1),
    ([-5, 9], 1, 1), ([0, (1 << 63) - 1], 1, 3), ([-(1 << 63), 2], 1, 3),
]  # fmt: skip


@pytest.mark.parametrize(
    "steps",
    [
        (),
        (("take", np.array([0, 99]), 1), ("stride", 0, 2, 1, 1)),
        (("take", np.array([0, -1]), 1), ("stride", 0, 2, 1, 1)),
        (("take", np.array([0, 1]), 0),),
        (("take", np.array([0, 1]), 5),),
        (("concat", np.array([1, 2]), np.array([1])), ("stride", 0, 2, 1, 1)),
        (("concat", np.array([1, 2]), np.array([1, 7])), ("stride", 0, 2, 1, 1)),
        (("concat", np.array([], np.int64), np.array([], np.int64)),),
        (("stride", 1, 2, 1, 1),),
        (("stride", 0, 2, 9, 1),),
        (("stride", 0, 2, 1 << 62, 1),),
        (("stride", 0, 2, 1, 0),),
        (("locate", 0, np.array([1, 2]), np.array([0]), 1, 1),),
        (("locate", 0, np.array([1, 2]), np.array([0, -1]), 1, 1),),
        (("locate", 0, np.array([1, 2]), np.array([0, 1 << 62]), 1, 1),),
        (("offsets", 0, (np.array([0, 1, 7]),)),),
        (("offsets", 0, (np.array([0, 1, 0]),)),),
        (("offsets", 0, ()),),
        (("offsets", 0, (np.array([0, 1]),)),),
        (("offsets", 0, (np.array([0, 1, 2]),) * 2),),  # more axes than the fields have
        (("offsets", 0, (np.array([0, 1, 2]),) * 17),),
        (("offsets", 0, (np.array([0, 1 << 61, 1]),)),),
        (("locate", 0, np.array([2, -(1 << 63), 3]), np.array([4, 4, 4]), 1, 1),),
        (("unknown", 0),),
        *((("pieces", 0, wrong),) for wrong in WRONG_PIECES + WRONG_OFFSETS),
        *((("ranked", 0, np.array([0, 2]), wrong, 1, 1),) for wrong in WRONG_PIECES),
        (("pieces", 0, (*PIECES[:1], PIECES[1] * 2)),),  # more axes than the fields have
        (("ranked", 0, np.array([0, 2]), (*PIECES[:1], PIECES[1] * 2), 1, 1),),
        *((("ranked", 0, np.array(ranks), PIECES, stride, rows),) for ranks, stride, rows in WRONG_RANKS),
    ],
)
def test_plans_that_are_wrong_are_errors(steps):
    column = core.Column(np.array([0, 4]), 8)
    column.give(0, np.zeros(4))
    gather = core.Gather((column,), (("x", 0, 0, 0, 0, 0, 1, 1, 1, 8, None),))

    def run():
        made = core.Program(("sequential", 2), steps, (gather,), (0, -1, 2, 0, 2), (0, 256, 512), (768,), 1024, None)
        made.fill(0, np.zeros(1024, np.uint8))

    with pytest.raises((mr.MillraceError, ValueError, TypeError)):
        run()


@pytest.mark.parametrize(
    "changed",
    [
        {"order": ("unknown", 2)},
        {"order": ("shuffled", 0, 1)},
        {"order": ("block_shuffled", 2, 1, 0, 1)},
        {"line": (0, -1, 2, 0, 3)},
        {"line": (-1, -1, 2, 0, 2)},
        {"line": (0, -1, 0, 0, 0)},
        {"marks": (0, 256, 1023)},
        {"marks": (1, 256, 512)},
        {"places": (1016,)},
        {"places": ()},
        {"places": (-8,)},
        {"places": ((1 << 63) - 8,)},
        {"marks": ((1 << 63) - 8, 256, 512)},
        {"marks": (0, 256, (1 << 63) - 8)},
        {"fixed": -1024},
        {"fixed": 1000},
    ],
)
def test_programs_that_are_wrong_are_errors(changed):
    column = core.Column(np.array([0, 4]), 8)
    gather = core.Gather((column,), (("x", 0, 0, 0, 0, 0, 1, 1, 1, 8, None),))
    given_ = {
        "order": ("sequential", 2),
        "line": (0, -1, 2, 0, 2),
        "marks": (0, 256, 512),
        "places": (768,),
        "fixed": 1024,
    }
    order, line, marks, places, fixed = (given_ | changed).values()
    with pytest.raises((mr.MillraceError, ValueError, TypeError)):
        core.Program(order, (("stride", 0, 2, 1, 1),), (gather,), line, marks, places, fixed, None)


def fill(field, steps, *, num_bytes=4096, rows=100_000):
    column = core.Column(np.array([0, rows]), 8)
    column.give(0, np.zeros(rows))
    gather = core.Gather((column,), (field,))
    line, marks = (0, -1, 2, 0, 2), (0, 256, 512)
    core.Program(("sequential", 2), steps, (gather,), line, marks, (768,), num_bytes, None).fill(
        0, np.zeros(num_bytes, np.uint8)
    )


@pytest.mark.parametrize("length", [1 << 59, 1 << 60, 1 << 61, (1 << 63) - 1])
@pytest.mark.parametrize("kind", [0, 2])
def test_fields_of_more_bytes_than_there_are_numbers_for_are_errors(kind, length):
    field = ("x", 0, kind, 0, 0, 0, length, 1, 1, 8, None)
    with pytest.raises(ValueError, match="do not fit"):
        fill(field, (("stride", 0, 2, 1, 50_000),))
    gather = core.Gather((core.Column(np.array([0, 10]), 8),), (field,))
    axes = ((np.zeros(8, np.int64), np.full(8, 5), None),)
    with pytest.raises(ValueError, match="do not fit"):
        gather.fill(axes, None, 0, 8, (np.zeros(0),), (None,), 1)


@pytest.mark.parametrize(
    ("kind", "bits"), [(2, b""), (2, b"1234"), (2, bytes(64)), (1, bytes(8)), (3, bytes(8)), (2, "12345678")]
)
def test_a_fill_that_is_no_number_of_the_field_is_an_error(kind, bits):
    with pytest.raises((ValueError, TypeError)):
        core.Gather((core.Column(np.array([0, 10]), 8),), (("x", 0, kind, 0, 0, 0, 3, 1, 1, 8, None, bits),))


@pytest.mark.parametrize("end", [1 << 61, (1 << 61) + 100_000, (1 << 63) - 1])
def test_ragged_samples_of_more_bytes_than_there_are_numbers_for_are_errors(end):
    ragged = ("x", 0, 1, 0, 0, 0, 0, 1, 1, 8, None)
    with pytest.raises(mr.ConfigError, match="its view is wrong"):
        fill(ragged, (("offsets", 0, (np.array([0, 100_000, end]),)),))
    gather = core.Gather((core.Column(np.array([0, 10]), 8),), (ragged,))
    axes = ((np.array([0, 0]), np.array([5, 1 << 62]), None),)
    with pytest.raises(ValueError, match="do not fit"):
        gather.fill(axes, None, 0, 2, (np.zeros(0),), (np.array([0, 5, end]),), 1)


def test_a_batch_of_more_bytes_than_there_are_numbers_for_is_an_error():
    """Every sample is right; four of the whole column are too much."""
    column = core.Column(np.array([0, 1 << 59]), 8)
    gather = core.Gather((column,), (("x", 0, 1, 0, 0, 0, 0, 1, 1, 8, None),))
    steps = (("stride", 0, 4, 0, 1 << 59),)

    def find_shard(*place):
        raise mr.FeedError("it is nowhere")

    program = core.Program(
        ("sequential", 4), steps, (gather,), (0, -1, 4, 0, 4), (0, 256, 512), (768,), 1024, find_shard
    )
    with pytest.raises(mr.ConfigError, match="than memory can"):
        program.fill(0, np.zeros(1024, np.uint8))


def test_rows_of_more_bytes_than_there_are_numbers_for_are_errors():
    column = core.Column(np.array([0, 10]), 0)
    with pytest.raises(ValueError, match="can be gathered"):
        core.Gather((column,), (("x", 0, 0, 0, 6, 0, 2, 1 << 62, 1, 4, None),))
    wide = core.Column(np.array([0]), 1 << 62)
    with pytest.raises(ValueError, match="larger than memory"):
        core.Gather((wide,), (("x", 0, 0, 0, 2, 0, 1, 1 << 62, 1, 1, None),))
    with pytest.raises(ValueError, match="values below n"):
        core.permute(np.array([5], np.uint64), 2**64 - 1, np.zeros(8, np.uint32), False)


def test_indices_that_are_changed_after_they_were_checked_change_nothing():
    """Those that say where memory lies are copied."""
    starts, ends, nexts = np.array([0, 4]), np.array([2]), np.array([1])
    column = core.Column(starts, 8)
    column.give(0, np.arange(4.0))
    gather = core.Gather((column,), (("x", 0, 0, 0, 0, 0, 1, 1, 1, 8, None),))
    steps = (("concat", ends, nexts), ("stride", 0, 2, 1, 1))
    program = core.Program(("sequential", 2), steps, (gather,), (0, -1, 2, 0, 2), (0, 256, 512), (768,), 1024, None)
    starts[0], ends[0], nexts[0] = -(1 << 40), 1 << 40, 1 << 40
    memory = np.zeros(1024, np.uint8)
    assert program.fill(0, memory) == 1024
    assert memory[768:784].view(np.float64).tolist() == [0, 1]


@pytest.mark.parametrize("changed", [1 << 40, -(1 << 40)])
def test_records_that_are_located_in_changed_arrays_are_errors(changed):
    column = core.Column(np.array([0, 4]), 8)
    column.give(0, np.arange(4.0))
    gather = core.Gather((column,), (("x", 0, 0, 0, 0, 0, 1, 1, 1, 8, None),))
    ends, firsts = np.array([1, 2]), np.array([0, 1])
    steps = (("locate", 0, ends, firsts, 1, 1),)
    program = core.Program(("sequential", 2), steps, (gather,), (0, -1, 2, 0, 2), (0, 256, 512), (768,), 1024, None)
    ends[:], firsts[:] = -1, changed
    with pytest.raises(mr.ConfigError):
        program.fill(0, np.zeros(1024, np.uint8))


def test_a_store_in_memory_has_offsets_of_its_own():
    offsets = np.array([0, 100_000, 200_000])
    store = mr.from_arrays({"hits": np.arange(200_000.0)}, offsets)
    feed = mr.Feed(mr.Records(store), batch=2, order=mr.Sequential(2), device="numpy")
    iterator = iter(feed)
    offsets[2] = 1 << 61
    assert next(iterator).hits.values.tolist() == list(range(200_000))
    feed.close()


def test_a_row_of_a_record_has_no_axis():
    column = core.Column(np.array([0, 4]), 8)
    with pytest.raises(ValueError, match="can be gathered"):
        core.Gather((column,), (("label", 0, 3, 15, 0, 0, 1, 1, 1, 8, None),))
