"""What every engine promises. Another engine joins by one more entry in ``ENGINES``, and in the lists of what it can do."""

import contextlib
import importlib
import os
import threading
import time
import traceback
from pathlib import Path

import pytest

import millrace as mr
from millrace.prepare.engines import local, on_dask, on_ray, threads
from millrace.prepare.engines.engine import WorkerFailed
from millrace.testing import expect_no_leaks

ENGINES = {
    "one process": lambda: local.Workers(1),
    "processes": lambda: local.Workers(2),
    "one thread": lambda: threads.Threads(1),
    "threads": lambda: threads.Threads(2),
}
# A cluster is started once for all tests. Its processes come and go, so that nobody can tell what an engine leaves.
CLUSTERS = {
    "Ray": lambda request: (request.getfixturevalue("ray_address"), on_ray.RayCluster(2))[1],
    "Dask": lambda request: on_dask.DaskCluster(2, request.getfixturevalue("dask_address")),
}
PARALLEL = ["processes", "threads", *CLUSTERS]  # these do two tasks at once
APART = ["one process", "processes", *CLUSTERS]  # these can put tasks into other processes


@pytest.fixture(scope="module")
def tasks():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent / "scripts")
        yield importlib.import_module("engine_tasks")


@pytest.fixture(scope="module", params=[*ENGINES, *CLUSTERS])
def place(request, tasks):
    """Where tasks run. Of the whole module: so engines without a cluster come first, and none is there yet."""
    return request.param


@pytest.fixture
def engine(place, request):
    is_ours = place in ENGINES
    with expect_no_leaks(grace_s=20) if is_ours else contextlib.nullcontext():
        engine = ENGINES[place]() if is_ours else CLUSTERS[place](request)
        yield engine
        engine.close()
        engine.close()  # a second time does no harm


parallel = pytest.mark.parametrize("place", PARALLEL, indirect=True)
apart = pytest.mark.parametrize("place", APART, indirect=True)


def test_every_task_gives_one_result_with_its_number(engine, tasks):
    for given in ([], [5], list(range(50))):
        found = list(engine.run(tasks.double, given))
        assert sorted(found) == [(number, 2 * task) for number, task in enumerate(given)]


@parallel
def test_results_come_as_tasks_finish(engine, tasks, tmp_path):
    path = tmp_path / "go"
    run = engine.run(tasks.wait_for, [str(path), "", "", ""])
    first = [next(run) for _ in range(3)]
    path.touch()
    assert (sorted(first), list(run)) == ([(1, ""), (2, ""), (3, "")], [(0, str(path))])


def test_an_error_of_ours_arrives_as_its_class_with_its_attributes(engine, tasks):
    with pytest.raises(mr.StoreCorrupt, match="task 3 is damaged") as caught:
        list(engine.run(tasks.refuse, range(8)))
    error = caught.value
    assert (error.path, error.column, error.expected, error.found) == ("some/path", "values", 7, 8)


def test_any_other_error_carries_its_traceback(engine, tasks):
    with pytest.raises(Exception, match="no such word") as caught:
        list(engine.run(tasks.stumble, range(8)))
    text = "".join(traceback.format_exception(caught.value))
    assert "LookupError" in text
    assert 'raise LookupError("no such word")' in text


def test_an_engine_runs_on_after_an_error_and_after_a_run_that_nobody_finished(engine, tasks):
    with pytest.raises(mr.StoreCorrupt):
        list(engine.run(tasks.refuse, range(8)))
    run = engine.run(tasks.double, range(8))
    next(run)
    run.close()
    assert dict(engine.run(tasks.double, [7, 8])) == {0: 14, 1: 16}


def test_a_task_reports_how_far_it_is_to_the_thread_that_runs_it(engine, tasks, monkeypatch):
    monkeypatch.setattr("millrace.prepare.engines.EVERY_S", 0.0)
    moved = []

    def move(number, counts):
        moved.append((number, counts["read"], threading.get_ident()))

    assert dict(engine.run(tasks.count, [3, 4], moved=move)) == {0: 3, 1: 4}
    me = threading.get_ident()
    assert sorted(moved) == [(0, k, me) for k in (1, 2, 3)] + [(1, k, me) for k in (1, 2, 3, 4)]


@parallel
def test_tasks_run_and_results_wait_while_the_parent_does_something_else(engine, tasks, tmp_path):
    paths, given, has_ended = [str(tmp_path / f"{k}.mark") for k in range(8)], [], []

    def meanwhile():
        deadline = time.monotonic() + 60
        while not all(map(os.path.exists, paths)):  # more than one for each worker
            assert time.monotonic() < deadline, "the tasks wait for this to end"
            time.sleep(0.01)
        assert not given
        has_ended.append(True)

    for number, result in engine.run(tasks.mark, paths, meanwhile=meanwhile):
        assert has_ended == [True]
        given.append((number, result))
    assert sorted(given) == list(enumerate(paths))


def test_what_the_parent_raises_meanwhile_ends_the_run(engine, tasks):
    def meanwhile():
        raise LookupError("another tokenizer")

    with pytest.raises(LookupError, match="another tokenizer"):
        list(engine.run(tasks.double, range(4), meanwhile=meanwhile))


def test_hints_change_no_result(engine, tasks):
    engine.start(tasks.double, 3)
    engine.warm(tasks.stumble, 3)  # which fails, and nobody hears of it
    assert dict(engine.run(tasks.double, range(5))) == {k: 2 * k for k in range(5)}
    engine.stop()


@pytest.mark.parametrize("kind", [local.Workers, threads.Threads, on_ray.RayCluster, on_dask.DaskCluster])
def test_no_worker_at_all_is_refused(kind):
    with pytest.raises(mr.ConfigError, match="workers=0; expected 1 or more"):
        kind(0)


@apart
def test_a_task_that_asks_for_it_runs_in_another_process(engine, tasks):
    (found,) = engine.run(tasks.process_id, [0], apart=True)
    assert found[1] != os.getpid()
    assert not engine.start(tasks.process_id, 1)  # a single one that does not ask runs here


@apart
def test_a_worker_killed_once_costs_a_retry_and_no_more(engine, tasks, tmp_path):
    paths = ["", "", str(tmp_path / "died"), ""]
    assert sorted(engine.run(tasks.die_once, paths, apart=True)) == list(enumerate(paths))


@apart
def test_a_task_that_always_kills_its_worker_is_named(engine, tasks):
    how = "exit code 3|The worker died unexpectedly.*|Dask lost .*"
    # Dask also blames the task that stood next in line at the worker that died.
    with pytest.raises(WorkerFailed, match=rf"a worker died \(({how})\) 3 times on [34]; look at that input"):
        list(engine.run(tasks.die, range(5), apart=True))


def test_a_run_of_processes_that_fails_does_not_wait_for_what_is_done_meanwhile(tasks):
    may_end, engine = threading.Event(), local.Workers(2)
    try:
        with pytest.raises(mr.StoreCorrupt):
            list(engine.run(tasks.refuse, range(4), meanwhile=may_end.wait))
        assert not may_end.is_set()
    finally:
        may_end.set()
        engine.close()


@pytest.mark.parametrize("place", CLUSTERS, indirect=True)
def test_a_module_that_workers_of_a_cluster_do_not_have_is_named(engine, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def double(task):\n    return 2 * task\n")
    monkeypatch.syspath_prepend(tmp_path)
    named = (
        r"cluster cannot do the tasks: .*No module named 'only_here'.*; install millrace \S+ there, as here, and all"
    )
    with pytest.raises(mr.ConfigError, match=named):
        list(engine.run(importlib.import_module("only_here").double, [1, 2]))
