"""However a loop ends, the process ends by itself, with its exit code, quietly, and no thread is left.

Each script runs in an interpreter of its own; a hang is a failure by timeout.
"""

import os
import signal
import threading

import numpy as np
import pytest

import millrace as mr
from millrace.feed.ahead import threads
from millrace.feed.processes import watch

pytestmark = [pytest.mark.own_process, pytest.mark.one_way]  # most are of transforms, which have threads of their own
LIVE = """
feed = feed_of({transform})
for batch in feed:
    if batch.positions[0] == 20:
        assert threads()
        break
assert threads_left() == []
sys.exit(7)
"""


@pytest.mark.parametrize("transform", ["quick", "slow", "fail"])
def test_break(run, transform):
    assert run(LIVE.format(transform=transform)) == (7, "", "")


def test_an_exception_in_the_loop(run):
    code, out, err = run("""
feed = feed_of(slow)
try:
    for batch in feed:
        raise ValueError("mine")
finally:
    print(threads_left())
""")
    assert (code, out) == (1, "[]\n")
    assert err.count("Traceback") == 1
    assert err.endswith("ValueError: mine\n")


def test_an_exception_in_the_transform(run):
    code, out, err = run("""
feed = feed_of(fail)
try:
    for batch in feed:
        print(batch.positions[0], end=" ")
finally:
    print(threads_left())
""")
    assert (code, out) == (1, "0 4 8 12 16 20 24 28 32 36 []\n")
    assert err.count("Traceback") == 2  # the cause and StageFailed, not one per thread
    assert "KeyError: 'my bug'" in err
    assert "StageFailed: the transform raised at position 40" in err


def test_with_closes_whatever_happens(run):
    code, out, err = run("""
try:
    with feed_of(slow) as feed:
        kept = iter(feed)
        next(kept)
        raise SystemExit(9)
finally:
    print(threads_left())
""")
    assert (code, out, err) == (9, "[]\n", "")


def test_garbage_collection_ends_the_threads(run):
    script = """
feed = feed_of(slow)
iterator = iter(feed)
next(iterator)
cycle = [iterator, feed]
cycle.append(cycle)
assert len(threads()) == 3
del iterator, cycle, feed
gc.collect()
assert threads_left() == []
sys.exit(4)
"""
    assert run(script) == (4, "", "")


def test_ctrl_c_while_a_transform_works(run):
    """It ends as Python ends on Ctrl-C, with one traceback."""
    code, out, err = run(
        """
def work(batch, rng):
    if batch.positions[0] == 0:
        until_awaited(feed)
        os.write(1, b"working\\n")
    time.sleep(0.3)
    return batch

feed = feed_of(work, depth=1)
try:
    for batch in feed:
        time.sleep(0.2)
finally:
    print(threads_left())
""",
        interrupt_at="working",
    )
    assert code == -signal.SIGINT
    assert out == "[]\n"
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_while_a_transform_never_returns(run):
    """Twelve threads that cannot be ended must not keep the program, nor one after the other delay its end."""
    code, out, err = run(
        """
def wait_and_stick(batch, rng):
    until_awaited(feed)
    stuck(batch, rng)

feed = feed_of(wait_and_stick, workers=12, depth=12)
try:
    for batch in feed:
        pass
except KeyboardInterrupt:
    sys.exit(130)
""",
        interrupt_at="stuck",
    )
    assert (code, err) == (130, "")
    assert set(out.split()) <= {"stuck"}


def test_no_more_than_a_second_is_given_to_transforms_that_work_on(monkeypatch):
    """So Ctrl-C ends the program in that time, whatever the threads are doing."""
    waits = []
    monkeypatch.setattr(threads, "join", lambda some, timeout_s: waits.append((len(some), timeout_s)))
    ahead = threads.Threads(Numbers(), feed_of().line(0, None), workers=3, depth=3)
    ahead.close()
    [(count, timeout_s)] = waits
    assert count == 3
    assert timeout_s < 1


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="only Linux says what a thread does")
def test_threads_that_sleep_for_ever_are_an_error(monkeypatch):
    """As worker processes that do: nobody knows whether the batch ever comes, and the loop would only wait."""
    monkeypatch.setattr(threads, "POLL_S", 0.05)
    monkeypatch.setattr(watch, "HANG_S", 1.0)
    awake = threading.Event()

    def sleeps(batch, rng):
        if batch.positions[0] >= 8:
            awake.wait()
        return batch

    feed = feed_of(sleeps, workers=2)
    iterator = iter(feed)
    try:
        next(iterator)
        with pytest.raises(mr.StageFailed, match=r"used a core for 1 s, in the batch at position 8;") as caught:
            next(iterator)
    finally:
        awake.set()
    assert (caught.value.position, feed.position) == (8, 8)


def feed_of(transform=None, **options):
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(401)}), length=1)
    return mr.Feed(view, batch=8, device="numpy", transform=transform, order=mr.Sequential(400), **options)


class Numbers:
    make = staticmethod(lambda number: number)


def test_ctrl_c_that_is_caught_leaves_a_feed_to_go_on_with(run):
    code, out, err = run(
        """
feed, hang = None, True

def work(batch, rng):
    if hang and batch.positions[0] == 8:
        while feed.position < 8:
            time.sleep(0.01)
        print("now", flush=True)
        while hang:
            time.sleep(0.01)
    return batch

feed = feed_of(work, workers=1)
try:
    for batch in feed:
        pass
except KeyboardInterrupt:
    hang = False
    print(feed.state_dict()["position"], next(iter(feed)).positions.tolist())
""",
        interrupt_at="now",
    )
    assert (code, err) == (0, "")
    assert out == "8 [8, 9, 10, 11]\n"


def test_threads_that_cannot_all_be_started_are_not_left(run):
    code, out, err = run("""
start, count = threading.Thread.start, 0

def start_two(thread):
    global count
    count += 1
    if count == 3:
        raise RuntimeError("can't start new thread")
    start(thread)

threading.Thread.start = start_two
feed = feed_of(quick)
try:
    iter(feed)
except RuntimeError as error:
    print(error, threads(), next(iter(feed)).positions.tolist())
""")
    assert (code, out, err) == (0, "can't start new thread [] [0, 1, 2, 3]\n", "")


@pytest.mark.parametrize("transform", ["None", "quick", "slow", "stuck"])
@pytest.mark.parametrize("code", [0, 5])
def test_the_interpreter_ends_with_a_live_iterator(run, transform, code):
    script = f"""
feed = feed_of({transform})
iterator = iter(feed)
if {transform} is not stuck:
    next(iterator)
sys.exit({code})
"""
    found, _, err = run(script)
    assert (found, err) == (code, "")


def test_the_interpreter_ends_by_an_error_with_a_live_iterator(run):
    code, _, err = run("iterator = iter(feed_of(slow))\nnext(iterator)\n1 / 0\n")
    assert code == 1
    assert err.count("Traceback") == 1


def test_close_from_another_thread_ends_a_waiting_loop(run):
    code, out, err = run("""
def close():
    until_awaited(feed)
    feed.close()

feed = feed_of(stuck, workers=1)
threading.Thread(target=close).start()
try:
    for batch in feed:
        pass
except mr.FeedError as error:
    print(error)
""")
    assert (code, err) == (0, "")
    assert "the feed was closed while a batch was awaited" in out


def test_an_interpreter_that_ends_with_a_feed_a_store_and_a_writer_open_says_nothing(run, tmp_path):
    """Modules that somebody holds are emptied, the last imported first: what an early one holds ends among empty ones."""
    code, out, err = run(f"""
import builtins
with mr.StoreWriter({str(tmp_path / "a")!r}, columns={{"tokens": mr.Column("uint16")}}) as writer:
    writer.append({{"tokens": np.arange(100, dtype=np.uint16)}})
store = mr.open_store({str(tmp_path / "a")!r}, safe_read=True)
store.columns["tokens"][:5]
own = mr.StoreWriter({str(tmp_path / "b")!r}, columns={{"tokens": mr.Column("uint16")}})
own.append({{"tokens": np.arange(100, dtype=np.uint16)}})
batches = iter(mr.Feed(mr.Blocks(store, length=4), batch=2, device="numpy"))
next(batches)
builtins.modules = list(sys.modules.values())
threading.kept = [batches, own, store]
print("end")
""")
    assert (code, out, err) == (0, "end\n", "")


def test_at_the_very_end_of_the_interpreter_nothing_is_closed_with_modules_that_are_gone():
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(100)}), length=4)
    batches = iter(mr.Feed(view, batch=2, device="numpy"))
    batches.__del__(lambda: True)
    assert not batches.is_closed
    batches.__del__(lambda: False)
    assert batches.is_closed


def test_a_close_that_ctrl_c_interrupts_is_finished_by_the_next(run):
    code, out, err = run("""
def interrupt(frame, event, argument):
    if frame.f_code.co_name == "_finish":
        raise KeyboardInterrupt

iterator = iter(feed_of(quick))
next(iterator)
sys.settrace(interrupt)
try:
    iterator.close()
except KeyboardInterrupt:
    print(len(threads()))
sys.settrace(None)
iterator.close()
print(threads())
""")
    assert (code, out, err) == (0, "3\n[]\n", "")
