"""Pools of workers begin, go from pass to pass and end. Nothing is left behind, whatever ends them."""

import contextlib
import copy
import gc
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import worker_functions as functions

import millrace as mr
from millrace.feed.ahead.processes import Processes
from millrace.testing import expect_no_leaks

from .conftest import feed_processes

MODULES = Path(__file__).parent / "modules"
HEAD = f"""
import os, resource, signal, sys, threading, time
sys.path.insert(0, {str(MODULES)!r})
import numpy as np
import millrace as mr
import worker_functions as functions

def feed_of(transform=functions.same, **options):
    view = mr.Blocks(mr.from_arrays({{"tokens": np.arange(401)}}), length=1)
    return mr.Feed(view, **{{"batch": 8, "device": "numpy", "transform": transform, "processes": True, "workers": 2, **options}})
"""


def script(text, *prefix):
    return subprocess.Popen(
        [*prefix, sys.executable, "-W", "error", "-c", HEAD + text],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def run(text, *prefix):
    with script(text, *prefix) as process:
        out, err = process.communicate(timeout=60)
    assert not members(process.pid), "processes are left"
    return process.returncode, out, err


def members(group):
    """The processes of a group that still run, after a while if there are any."""
    for _ in range(200):
        found = []
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass
        if not found:
            break
        psutil.wait_procs(found, timeout=0.1)
    return found


def feed_for(transform=functions.same, **options):
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(41)}), length=1)
    return mr.Feed(
        view, **{"batch": 8, "device": "numpy", "transform": transform, "processes": True, "workers": 2, **options}
    )


def exhausted(method):
    assert len(list(feed_for(epochs=1, processes=method))) == 5


def closed(method):
    feed = feed_for(processes=method)
    next(iter(feed))
    feed.close()
    feed.close()


def dropped(method):
    next(iter(feed_for(processes=method)))


def passes(method):
    loader = feed_for(processes=method).by_epoch()
    for _ in range(2):
        for _ in loader:
            pass


def failed(method):
    feed = feed_for(functions.raises, processes=method, order=mr.Sequential(40))
    with pytest.raises(mr.StageFailed):
        list(feed)


def interrupted(method):
    with contextlib.suppress(ZeroDivisionError), feed_for(functions.slow, processes=method) as feed:
        for _ in feed:
            raise ZeroDivisionError


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("use", [exhausted, closed, dropped, passes, failed, interrupted])
def test_nothing_is_left_behind(use, method):
    with expect_no_leaks(grace_s=10):
        use(method)
        gc.collect()


def test_workers_stay_from_pass_to_pass_and_evaluation_has_its_own(feed_of):
    feed = feed_of(functions.pids, workers=1)
    train, evaluation = feed.by_epoch(), feed.by_epoch(repeat=True)
    seen, others = set(), set()
    for _ in range(3):
        for number, batch in enumerate(train):
            seen |= set(batch.pid.tolist())
            if number == 2:
                others |= {int(pid) for other in evaluation for pid in other.pid}
    assert len(seen) == len(others) == 1
    assert seen != others
    assert len(feed_processes()) == 4  # two workers, each with its fork server
    feed.close()


def test_a_pass_left_early_does_not_disturb_the_next(feed_of):
    feed, whole = feed_of(functions.noisy, depth=5), feed_of(functions.noisy, processes=False)
    expected = [batch.x.tolist() for batch in itertools.islice(whole, 25)]
    loader = feed.by_epoch()
    for number, stop in enumerate((1, 3, 5, 2)):
        found = [batch.x.tolist() for batch in itertools.islice(loader, stop)]
        assert found == expected[5 * number :][:stop]


def test_a_feed_goes_to_another_process_without_its_workers(feed_of, contents):
    feed = feed_of(functions.noisy, epochs=1)
    iterator = iter(feed)
    next(iterator)
    other = copy.deepcopy(feed)  # by pickle's rules
    assert (other.processes, other.workers, other.transform) == (True, 2, functions.noisy)
    assert contents(other) == contents(feed_of(functions.noisy, epochs=1, processes=False))[1:]
    assert len(list(iterator)) == 4


def test_no_more_than_depth_batches_are_asked_for(feed_of, tmp_path):
    """Back-pressure: the workers rest when the loop does, whatever the loop asks them later."""
    feed = feed_of(functions.Counting(tmp_path), n=4000, workers=3, depth=5)
    for number, _ in enumerate(itertools.islice(feed, 30)):
        assert number + 1 <= len(list(tmp_path.iterdir())) <= number + 1 + 5


def test_a_loop_may_ask_for_thousands_ahead(feed_of, contents):
    """More tickets than a socket holds."""
    feed = feed_of(functions.noisy, n=4000, epochs=1, batch=2, workers=1, depth=1500)
    assert contents(feed) == contents(feed_of(functions.noisy, n=4000, epochs=1, batch=2, processes=False))


def test_close_from_another_thread_ends_a_loop_that_waits(feed_of, tmp_path):
    for _ in range(5):
        feed = feed_of(functions.slow, n=4000)
        iterator, ended = iter(feed), []

        def loop(iterator=iterator, ended=ended):
            try:
                for _ in iterator:
                    pass
            except mr.FeedError as error:
                ended.append(str(error))

        thread = threading.Thread(target=loop)
        thread.start()
        feed.close()
        thread.join()
        assert ended in ([], ["the feed was closed while a batch was awaited"])


def test_a_forked_child_leaves_the_workers_alone(feed_of):
    """And makes its own where it wants batches."""
    done = run(
        "feed = feed_of(functions.pids)\n"
        "loader = feed.by_epoch()\n"
        "for batch in loader: pass\n"
        "if os.fork() == 0:\n"
        "    own = {int(other.pid[0]) for other in loader}\n"
        "    feed.close()\n"
        "    os._exit(0 if int(batch.pid[0]) not in own else 1)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
        "for batch in loader: pass\n"
        "print('done')"
    )  # fmt: skip
    assert done == (0, "done\n", "")


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("moment", ["while it waits", "at the start"])
def test_ctrl_c_ends_everything(moment, method):
    """As a terminal sends it: to the whole group. One traceback, of the trainer."""
    text = (
        f"feed = feed_of(functions.stuck, processes={method!r})\n"
        "iterator = iter(feed)\n"
        "print('started', flush=True)\n"
        "next(iterator)"
    )
    with script(text) as process:
        assert process.stdout.readline() == "started\n"
        if moment == "while it waits":
            assert process.stdout.readline() == "stuck\n"
        os.killpg(process.pid, 2)
        _, err = process.communicate(timeout=60)
    assert not members(process.pid)
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_end_with_a_trainer_that_is_killed(method):
    """Also while a child that the trainer forked holds all its sockets open."""
    text = (
        f"feed = feed_of(functions.stuck, processes={method!r})\n"
        "iterator = iter(feed)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.setsid()\n"
        "    time.sleep(30)\n"
        "    os._exit(0)\n"
        "print(child, flush=True)\n"
        "next(iterator)"
    )
    with script(text) as process:
        child = int(process.stdout.readline())
        assert process.stdout.readline() == "stuck\n"
        process.kill()
        process.wait()
        try:
            assert not members(process.pid)
        finally:
            os.kill(child, 9)


def test_the_end_of_the_program_ends_the_workers():
    assert run("loader = feed_of().by_epoch()\nnext(iter(loader))\nprint('end')") == (0, "end\n", "")
    code, _, err = run("feed = feed_of()\nfor batch in feed: raise SystemExit(5)")
    assert (code, err) == (5, "")


def test_64_descriptors_are_enough_also_for_a_loop_that_keeps_its_batches():
    code, out, err = run(
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "feed = feed_of(functions.noisy, epochs=6, workers=8, depth=16)\n"
        "kept = list(feed)\n"
        "print(len(kept), len({batch.x.tobytes() for batch in kept}))"
    )
    assert (code, out, err) == (0, "300 300\n", "")
    code, _, err = run("resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\nnext(iter(feed_of(workers=70)))")
    assert code == 1
    assert "FeedError: 70 worker processes cannot be started ([Errno 24] Too many open files); lower workers=" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small /dev/shm")
def test_a_small_dev_shm_is_not_used():
    """Batches of 4 MB, six at a time, beside 8 MB of /dev/shm, in which no name appears."""
    text = (
        "import subprocess\n"
        "subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=8m', 'none', '/dev/shm'], check=True)\n"
        "feed = feed_of(functions.four_megabytes, epochs=1, batch=40)\n"
        "assert sum(batch.x.nbytes for batch in list(feed)) == 10 * 40 * ((4 << 20) // 40)\n"
        "iterator = iter(feed_of(functions.four_megabytes))\n"
        "next(iterator)\n"
        "assert os.listdir('/dev/shm') == []\n"
        "print('done')"
    )
    assert run(text, "unshare", "--mount") == (0, "done\n", "")


def test_what_a_worker_prints_is_seen_once():
    code, out, err = run("for batch in feed_of(functions.talks, epochs=1, batch=100): pass")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == sorted(f"hello from {k}" for k in (0, 100, 200, 300))


def test_a_transform_may_run_programs(feed_of, contents):
    feed = feed_of(functions.runs_a_program, epochs=1)
    assert contents(feed) == contents(feed_of(functions.same, epochs=1, processes=False))


def test_workers_are_not_forked_beside_threads():
    """A module that starts threads is loaded by each worker by itself."""
    code, out, err = run(
        "import threads_at_import\n"
        "assert threading.active_count() == 2\n"
        "feed = feed_of(threads_at_import.transform, epochs=1)\n"
        "print(len(list(feed)), feed.report().deaths)"
    )
    assert (code, out, err) == (0, "50 0\n", "")
    code, _, err = run(
        "import threads_at_import\nfor batch in feed_of(threads_at_import.transform, processes='forkserver'): pass"
    )
    assert code == 1
    assert "ConfigError: importing the transform starts threads" in err


def test_a_lock_that_a_thread_of_the_trainer_holds_does_no_harm():
    """The trainer itself is never forked: a lock held at that moment would never be released in the child."""
    code, out, err = run(
        "threading.Thread(target=lambda: functions.LOCK.acquire() and time.sleep(1000), daemon=True).start()\n"
        "while not functions.LOCK.locked(): pass\n"
        "print(len(list(feed_of(functions.locks, epochs=1))))"
    )
    assert (code, out, err) == (0, "50\n", "")


def test_a_signal_whose_handler_raises_ends_the_pass_and_the_next_one_begins_anew():
    code, out, err = run(
        "def fail(*_): raise ZeroDivisionError\n"
        "signal.signal(signal.SIGALRM, fail)\n"
        "import warnings; warnings.simplefilter('ignore', ResourceWarning)  # of a socket that is just made\n"
        "feed = feed_of(functions.noisy, epochs=400)\n"
        "expected = {}\n"
        "for batch in feed_of(functions.noisy, epochs=12, processes=False, batch=400):\n"
        "    expected |= {int(p): x.tobytes() for p, x in zip(batch.positions, batch.x)}\n"
        "loader, hits, count = feed.by_epoch(), 0, 0\n"
        "for _ in range(12):\n"
        "    try:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0.004 + 0.003 * (count % 7))\n"
        "        for batch in loader:\n"
        "            count += 1\n"
        "            for p, x in zip(batch.positions, batch.x): assert expected[int(p)] == x.tobytes()\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "    except ZeroDivisionError:\n"
        "        hits += 1\n"
        "feed.close()\n"
        "print('done')"
    )
    assert (code, out) == (0, "done\n"), err  # Python prints what a handler raises within a destructor


def test_a_line_that_cannot_begin_closes_its_pool(feed_of, monkeypatch):
    monkeypatch.setattr(Processes, "_give", lambda *_: 1 / 0)
    with expect_no_leaks(grace_s=10), pytest.raises(ZeroDivisionError):
        iter(feed_of(functions.same))
