"""The core's programs and ring against the numpy twin: any store, view and order, any line, held and dropped batches."""

import gc
import itertools
import signal
import threading
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.feed import compose as native
from millrace.feed.ahead.core_ring import CoreRing
from millrace.feed.make.plan import PlanMake
from millrace.feed.make.program import Program, ProgramMake
from millrace.native import core
from millrace.store.columns import ColumnArray
from millrace.store.memory import array_store

pytestmark = pytest.mark.needs_core

COLUMNS = {
    "dense": mr.Column("float32", (3,)),
    "token": mr.Column("uint16"),
    "half": mr.Column("float16", (2,)),
    "brain": mr.Column("bfloat16"),
    "pixel": mr.Column("uint8", axis="image"),
    "label": mr.Column("int32", per="record"),
}


def make_store(lengths, per_shard, seed):
    """Records of these (rows, image rows) over shards of so many records."""
    from millrace.store.layout import Layout

    rng, layout, shards = np.random.default_rng(seed), Layout(COLUMNS), []
    for first in range(0, len(lengths), per_shard):
        part = lengths[first : first + per_shard]
        offsets = {"rows": np.cumsum([0, *(r for r, _ in part)]), "image": np.cumsum([0, *(i for _, i in part)])}
        files = []
        for file in layout.files:
            if file.column is None:
                files.append(offsets[file.axis].astype(np.int64))
                continue
            column = COLUMNS[file.column]
            count = len(part) if column.axis is None else int(offsets[column.axis][-1])
            files.append(rng.integers(0, 200, (count, *column.shape)).astype(file.dtype))
        shards.append((f"memory-{first}", files))
    return array_store(layout, shards, kind="records")


@st.composite
def leaf_views(draw, store):
    kind = draw(st.sampled_from(["blocks", "windows", "records", "padded"]))
    if kind == "blocks":
        return mr.Blocks(store, length=draw(st.integers(1, 5)), stride=draw(st.integers(1, 7)), column="token")
    if kind == "windows":
        column = draw(st.sampled_from(["dense", "half", "brain"]))
        target = draw(st.sampled_from([None, [0]] if column == "brain" else [None, [1], [1, 0], [0, 1]]))
        sizes = {name: draw(st.integers(1, 4)) for name in ("lookback", "horizon", "stride")}
        return mr.Windows(store, **sizes, lead=draw(st.integers(0, 2)), column=column, target=target)
    columns = draw(st.lists(st.sampled_from(list(COLUMNS)), min_size=1, unique=True))
    pad = draw(st.integers(1, 6)) if kind == "padded" else None
    rows = [] if pad is None else [name for name in columns if name != "label"]
    fill = (
        {name: draw(st.integers(0, 9)) for name in draw(st.lists(st.sampled_from(rows), unique=True))} if rows else None
    )
    return mr.Records(store, columns=columns, pad=pad, mask=pad is not None and draw(st.booleans()), fill=fill or None)


@st.composite
def views(draw):
    store = make_store(
        draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), min_size=1, max_size=9)),
        draw(st.integers(1, 4)),
        draw(st.integers(0, 99)),
    )
    view = draw(leaf_views(store))
    for wrap in draw(st.lists(st.sampled_from(["subset", "concat"]), max_size=3)):
        if wrap == "concat":
            view = mr.Concat([view] * draw(st.integers(1, 3)))
        elif len(view):
            view = mr.Subset(view, draw(st.lists(st.integers(0, len(view) - 1), min_size=1, max_size=40)))
    return view


@st.composite
def orders(draw, n):
    seed = draw(st.integers(0, (1 << 64) - 1))
    kind = draw(st.sampled_from(["shuffled", "sequential", "blocks"]))
    if kind == "blocks":
        return mr.BlockShuffled(n, block=draw(st.integers(1, 9)), window=draw(st.integers(1, 5)), seed=seed)
    return mr.Sequential(n) if kind == "sequential" else mr.Shuffled(n, seed)


def equal(one, other):
    assert list(one) == list(other)
    for name in ("positions", "samples", "valid"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
        assert getattr(one, name).dtype == getattr(other, name).dtype
    for name, value in one.items():
        found = other[name]
        if isinstance(value, mr.Ragged):
            assert np.array_equal(value.offsets, found.offsets)
            value, found = value.values, found.values
        assert (value.dtype, value.shape) == (found.dtype, found.shape)
        assert value.tobytes() == found.tobytes()


@given(data=st.data())
def test_programs_give_the_batches_of_the_twin(data):
    view = data.draw(views().filter(len))
    order = data.draw(orders(len(view)))
    batch = data.draw(st.integers(1, 20))
    world = data.draw(st.integers(1, min(batch, 3)))
    feed = mr.Feed(
        view, batch=batch, order=order, device="numpy", rank=data.draw(st.integers(0, world - 1)), world=world
    )
    start = data.draw(st.integers(0, 4 * len(view)))
    line = feed.line(start, data.draw(st.none() | st.integers(start + 1, start + 3 * len(view) + batch)))
    program = Program.of(line)
    assert program is not None
    count = line.num_batches
    numbers = data.draw(st.lists(st.integers(0, 6 if count is None else count - 1), min_size=1, max_size=4))
    by_core, by_numpy = ProgramMake(program, slots=2), PlanMake(line, slots=2)
    with mock.patch("millrace.gather.core_gather.core", None):
        for number in numbers:
            equal(by_core.make(number), by_numpy.make(number))
    ahead = CoreRing(program, count=count, depth=data.draw(st.integers(1, 3)), workers=data.draw(st.integers(0, 2)))
    for number in range(6 if count is None else min(count, 6)):
        equal(ahead.take(number), by_numpy.make(number))
    ahead.close()


@given(n=st.integers(1, (1 << 63) - 1), data=st.data())
def test_orders_of_any_size_are_those_of_python(n, data):
    """Through a view that has as many samples, of which none is read."""
    order = data.draw(orders(n))
    start = data.draw(st.integers(0, (1 << 63) - 1 - 64))
    places, size = np.arange(64), 64
    column = core.Column(np.array([0, 1]), 8)
    column.give(0, np.zeros(1))
    gather = core.Gather((column,), (("x", 0, 0, 0, 0, 0, 1, 1, 1, 8, None),))
    steps = (("stride", 0, n, 0, 1),)
    program = core.Program(
        order.plan(), steps, (gather,), (start, -1, size, 0, size), (0, 512, 1024), (1280,), 2048, None
    )
    memory = np.zeros(2048, np.uint8)
    assert program.fill(0, memory) == 2048
    assert memory[512:1024].view(np.int64).tolist() == order.samples(start + places).tolist()


# Views that Python alone knows.


class Own(mr.Windows):
    """A view of one's own that is another view but for its spans."""

    def spans(self, samples, axis=None):
        found = super().spans(len(self) - 1 - self._checked(samples), axis)
        return mr.Spans(found.starts, found.stops)


def test_what_a_subclass_changes_is_asked_in_python():
    store = mr.from_arrays({"values": np.arange(40.0)})
    own, plain = (kind(store, lookback=2, horizon=1) for kind in (Own, mr.Windows))
    feed = mr.Feed(own, batch=4, order=mr.Sequential(len(own)), device="numpy")
    assert own.plan() is None
    assert next(iter(feed)).x.ravel().tolist() == plain[[37, 36, 35, 34]]["x"].ravel().tolist()
    assert feed.report().way == "numpy"

    class Backwards(mr.Sequential):
        def samples(self, positions):
            return self.n - 1 - super().samples(positions)

    feed = mr.Feed(plain, batch=2, order=Backwards(len(plain)), device="numpy")
    assert next(iter(feed)).samples.tolist() == [37, 36]


def test_text_and_columns_that_numpy_alone_reads_are_delivered():
    store = mr.from_arrays({"hits": np.arange(8.0)[::2], "name": ["a", "b"]}, [0, 3, 4], per={"name": "record"})
    batch = next(iter(mr.Feed(mr.Records(store), batch=2, order=mr.Sequential(2), device="numpy")))
    assert batch.name.tolist() == ["a", "b"]
    assert batch.hits.values.tolist() == [0, 2, 4, 6]
    view = mr.Records(store, columns=["hits"])
    feed = mr.Feed(view, batch=2, order=mr.Sequential(2), device="numpy", epochs=2)
    assert [batch.hits.values.tolist() for batch in feed] == [[0, 2, 4, 6]] * 2
    assert feed.report().way == "numpy"
    doubled = mr.Feed(view, batch=1, epochs=2, device="numpy", transform=lambda batch, rng: {"x": batch.hits.pad() * 2})
    assert sorted(batch.x.max() for batch in doubled) == [8, 8, 12, 12]


# The ring.


@pytest.fixture
def always_ahead(monkeypatch):
    monkeypatch.setattr(native, "IN_LINE_BYTES", 0)


def small_feed(**options):
    view = mr.Windows(mr.from_arrays({"values": np.arange(300.0)}), lookback=4, horizon=1)
    return mr.Feed(view, batch=8, device="numpy", **options)


A_THOUSAND_FEEDS = """
import gc
import numpy as np
import millrace as mr
from millrace.feed import compose
from millrace.testing import expect_no_leaks

compose.IN_LINE_BYTES = 0
view = mr.Windows(mr.from_arrays({"values": np.arange(300.0)}), lookback=4, horizon=1)

def anonymous_bytes():
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous:"))

def feeds(count):
    for number in range(count):
        feed = mr.Feed(view, batch=8, device="numpy", workers=2, seed=number)
        iterator = iter(feed)
        next(iterator)
        if number % 2:
            feed.close()
        del iterator, feed

feeds(100)
memory = anonymous_bytes()
with expect_no_leaks():
    feeds(1000)
print(anonymous_bytes() - memory)
"""


def test_a_thousand_feeds_leave_nothing(run):
    code, out, err = run(A_THOUSAND_FEEDS)  # in a process of its own, whose memory nothing else changes
    assert code == 0, err
    assert int(out) < 4 << 20  # ten rings' worth of slots would be more


def test_more_shards_than_may_be_mapped_are_read_instead(always_ahead, tmp_path):
    with mr.StoreWriter(tmp_path / "store", columns={"tokens": mr.Column("uint16")}, shard_bytes=64) as writer:
        for k in range(50):
            writer.append({"tokens": np.full(32, k, np.uint16)})
    expected = [
        b.x.copy()
        for b in mr.Feed(mr.Blocks(mr.open_store(tmp_path / "store"), length=4), batch=16, epochs=2, device="numpy")
    ]
    store = mr.open_store(tmp_path / "store")
    store._shards._max_maps = 20
    for transform in (None, lambda batch, rng: {"x": batch.x}):
        feed = mr.Feed(mr.Blocks(store, length=4), batch=16, epochs=2, device="numpy", transform=transform)
        found = [batch.x.copy() for batch in feed]
        assert len(found) == len(expected)
        assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
        assert transform is not None or feed.report().way == "numpy"
        assert len(store._shards._maps) + store._shards._num_lent <= 20


def test_the_maps_of_a_feed_go_with_it(always_ahead, tmp_path):
    with mr.StoreWriter(tmp_path / "store", columns={"tokens": mr.Column("uint16")}) as writer:
        writer.append({"tokens": np.arange(100, dtype=np.uint16)})
    store = mr.open_store(tmp_path / "store")
    iterator = iter(mr.Feed(mr.Blocks(store, length=4), batch=4, device="numpy"))
    next(iterator)
    assert store._shards._num_lent == 1
    assert store._shards._maps == {}
    del iterator
    gc.collect()
    assert store._shards._num_lent == 0


def test_a_foreign_file_is_read_through_a_map_of_the_feeds_own(always_ahead, tmp_path):
    tokens = np.arange(5000, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    store = mr.open_store(tmp_path / "tokens.bin")
    column = store.columns["tokens"]
    assert column.random(0).ctypes.data != column.whole(0).ctypes.data
    assert np.array_equal(column.random(0), tokens)
    batch = next(iter(mr.Feed(mr.Blocks(store, length=8), batch=4, device="numpy", seed=2)))
    assert np.array_equal(batch.x[:, 0], batch.samples * 8)


def test_the_report_counts(always_ahead):
    feed = small_feed(epochs=3, workers=1)
    assert feed.report() is None
    batches = sum(1 for _ in feed)
    report = feed.report()
    assert (report.way, report.workers, report.batches, report.samples) == ("ring", 1, batches, 3 * len(feed.view))
    assert 0 <= report.get_s <= report.seconds
    assert report.num_bytes >= batches * 8 * 5 * 8
    assert 0 <= report.depth_seen <= 4
    assert report.made_in_line <= batches
    assert f"{batches:,} batches" in str(report)
    assert report.as_dict()["is_cold"] is False


def test_arrays_go_to_other_frameworks_without_a_copy(always_ahead):
    import torch

    for batch in itertools.islice(small_feed(), 20):
        tensor = torch.from_dlpack(batch.x)
        assert tensor.data_ptr() == batch.x.ctypes.data
        kept = tensor.clone()
        del batch
        assert torch.equal(tensor, kept)


def test_the_shards_of_a_batch_are_found_together_and_once():
    """Before any row is copied: to begin again after each would take the square of their number."""
    count = 500
    column = core.Column(np.arange(count + 1), 8)
    gather = core.Gather((column,), (("x", 0, 0, 0, 0, 0, 1, 1, 1, 8, None),))
    memory, asked = np.zeros(3 * 4096 + 4096, np.uint8), []

    def find_shard(part, number, shard):
        asked.append(shard)
        assert not memory.any()
        column.give(shard, np.full(1, shard + 1.0))

    program = core.Program(
        ("sequential", count), (("stride", 0, count, 1, 1),), (gather,), (0, -1, count, 0, count), (0, 4096, 8192),
        (12288,), 16384, find_shard,
    )  # fmt: skip
    assert program.fill(0, memory) == 16384
    assert asked == list(range(count))
    assert memory[12288:16288].view(np.float64).tolist() == list(range(1, count + 1))


@pytest.mark.parametrize("left", [0, 3, 8, 29])
def test_the_line_ends_at_the_same_batch_on_every_way(left):
    line = small_feed().line((1 << 63) - 1 - left, None)
    program = Program.of(line)
    ring = CoreRing(program, count=None, depth=2, workers=1)
    by_core, by_numpy = ProgramMake(program, slots=2), PlanMake(line, slots=2)
    for number in range(left // 8):
        equal(by_core.make(number), by_numpy.make(number))
        equal(ring.take(number), by_numpy.make(number))
    for make in (by_core.make, by_numpy.make, ring.take):
        with pytest.raises(mr.ConfigError, match=f"batch {left // 8} passes position"):
            make(left // 8)
    ring.close()


def test_padding_beyond_memory_is_refused():
    store = mr.from_arrays({"hits": np.arange(6.0)}, [0, 2, 6])
    with pytest.raises(mr.ConfigError, match="more than any memory"):
        mr.Feed(mr.Records(store, pad=1 << 62), batch=4, device="numpy")


@pytest.mark.parametrize("batch", [8, 1000])
@pytest.mark.parametrize("number", [1, 3, 40])
def test_ctrl_c_while_a_shard_is_found_ends_the_loop_at_once(batch, number, always_ahead, tmp_path, monkeypatch):
    """Also where the loop's thread only asks for rows ahead, or makes a batch before its turn."""
    with mr.StoreWriter(tmp_path / "store", columns={"v": mr.Column("float32", (4,))}, shard_bytes=4000) as writer:
        for k in range(8000):
            writer.append({"v": np.full((3, 4), k, np.float32)})
    real, sent = ColumnArray.random, []

    def random(column, k):
        if threading.current_thread() is threading.main_thread():
            sent.append(k)
            if len(sent) == number:
                signal.raise_signal(signal.SIGINT)
        return real(column, k)

    monkeypatch.setattr(ColumnArray, "random", random)
    view = mr.Records(mr.open_store(tmp_path / "store"), columns=["v"])
    feed, is_interrupted = mr.Feed(view, batch=batch, device="numpy", workers=1, epochs=1), False
    try:
        for _ in feed:
            assert len(sent) < number
    except KeyboardInterrupt:
        is_interrupted = True
    assert is_interrupted == (len(sent) >= number)
