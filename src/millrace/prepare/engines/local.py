"""Tasks in processes of this machine. A worker that dies costs its task a retry, not the run.

Workers are spawned, hold no lock, and end when their parent does, also after kill -9: none goes on writing beside
the run that follows. An error travels as text with its class, never as a pickle of the user's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import Any

from millrace import errors
from millrace.errors import MillraceError, SourceError, StoreError
from millrace.prepare.engines import listening
from millrace.prepare.engines.engine import Engine, Function, Moved
from millrace.prepare.engines.spawning import quiet_start

RETRIES = 2
PLAIN = (str, int, float, type(None))  # attributes of an error that come back from a worker
STALL_S = 1800.0  # seconds without progress after which a worker counts as hung


class WorkerFailed(SourceError):
    """A worker died or hung on a task; ``source`` names its input."""


class _Worker:
    """A process with the pipe to it, and the number of the task it does."""

    def __init__(self, context: Any, function: Function) -> None:
        self.pipe, theirs = context.Pipe()
        # The function goes along so that its modules are imported before the first task comes.
        self.process = context.Process(target=_serve, args=(theirs, os.getpid(), function), daemon=True)
        with quiet_start():
            self.process.start()
        theirs.close()
        self.task: int | None = None
        self.silent_s = 0.0

    def stop(self) -> None:
        """Asks it to end. One with a task is killed, since the task can be done again."""
        self.pipe.close()
        if self.task is not None:
            self.process.kill()

    def wait(self) -> None:
        self.process.join(timeout=2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Workers(Engine):
    """Up to ``count`` processes. They stay for the next run, until ``close``.

    The run fails when a worker is silent for ``stall_s`` seconds: no result, no ``alive``. 0 waits for ever.
    With one worker, tasks run in this process, and so does a single task, unless they must run ``apart``.
    """

    def __init__(self, count: int, stall_s: float = 0) -> None:
        super().__init__(count)
        self._stall_s = stall_s
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []

    def start(self, function: Function, num_tasks: int, *, apart: bool = False) -> bool:
        """As ``Engine.start``; later runs get no more workers either: to start one costs more than a small task."""
        self._count = max(1, min(self._count, num_tasks))
        return self._begin(function, num_tasks, apart)

    def _begin(self, function: Function, num_tasks: int, apart: bool) -> bool:
        if num_tasks == 0 or (not apart and min(self._count, num_tasks) == 1):
            return False
        while len(self._workers) < min(self._count, num_tasks):
            self._workers.append(_Worker(self._context, function))
        return True

    def warm(self, function: Function, task: Any) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it has died: the next task finds out
                worker.pipe.send((function, task, False))

    def _run(
        self, function: Function, tasks: Sequence[Any], moved: Moved, meanwhile: Callable[[], None] | None
    ) -> Iterator[tuple[int, Any]]:
        waiting = list(range(len(tasks)))[::-1]
        tries = [0] * len(tasks)
        left = len(tasks)
        results: list[tuple[int, Any]] = []  # that wait for the end of ``meanwhile``
        self._give(function, tasks, waiting)
        beside = None if meanwhile is None else _beside(meanwhile)
        while left:
            for worker in self._ready(tasks):
                number = worker.task
                assert number is not None
                try:
                    outcome, result = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.process.join(timeout=5)
                    worker.pipe.close()
                    self._workers[self._workers.index(worker)] = _Worker(self._context, function)
                    tries[number] += 1
                    if tries[number] > RETRIES:
                        raise _died(worker, tasks[number]) from None
                    waiting.append(number)
                    continue
                if outcome == "alive":
                    moved(number, result)
                    continue
                worker.task = None
                if outcome == "error":
                    raise _error(result)
                left -= 1
                results.append((number, result))
            self._give(function, tasks, waiting)
            if beside is None or beside.done() or not left:
                if beside is not None:
                    beside.result()
                yield from results
                results.clear()

    def _give(self, function: Function, tasks: Sequence[Any], waiting: list[int]) -> None:
        """Gives the next task to every worker that has none."""
        for worker in self._workers:
            if worker.task is None and waiting:
                worker.task, worker.silent_s = waiting.pop(), 0.0
                with contextlib.suppress(OSError):  # it died while idle: its pipe will say so
                    worker.pipe.send((function, tasks[worker.task], True))

    def _ready(self, tasks: Sequence[Any]) -> list[_Worker]:
        """Workers with a message; one that was silent for too long is an error."""
        busy = {worker.pipe: worker for worker in self._workers if worker.task is not None}
        step = self._stall_s / 20 or None
        began = time.monotonic()
        ready = [busy[pipe] for pipe in wait(list(busy), step) if isinstance(pipe, Connection)]
        # No more than we waited for: if the whole machine was suspended, workers need time to report again.
        passed = min(time.monotonic() - began, step or 0)
        for worker in busy.values():
            worker.silent_s = 0.0 if worker in ready else worker.silent_s + passed
            if self._stall_s and worker.silent_s >= self._stall_s:
                raise _stalled(tasks[worker.task or 0], self._stall_s)
        return ready

    def stop(self) -> None:
        for worker in self._workers:
            worker.stop()

    def close(self) -> None:
        self.stop()
        for worker in self._workers:
            worker.wait()
        self._workers = []


def _beside(function: Callable[[], None]) -> Future[None]:
    """Calls a function in a thread while workers work; a run that ends early does not wait for it."""
    future: Future[None] = Future()

    def work() -> None:
        try:
            function()
            future.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks
            future.set_exception(error)

    threading.Thread(target=work, name="millrace-beside", daemon=True).start()
    return future


def _died(worker: _Worker, task: Any) -> WorkerFailed:
    code = worker.process.exitcode
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    hint = "; it may have run out of memory" if code == -signal.SIGKILL else ""
    return WorkerFailed(
        f"a worker died ({how}{hint}) {RETRIES + 1} times on {task}; look at that input, or use fewer workers",
        source=str(task),
    )


def _stalled(task: Any, stall_s: float) -> WorkerFailed:
    return WorkerFailed(
        f"a worker made no progress for {stall_s:g} s on {task}; look at that input and at your own function, then run again, "
        "with a larger --stall if it only is slow",
        source=str(task),
    )


def _serve(pipe: Connection, parent: int, function: Function) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and ends us
    _end_with(parent)

    def report(counts: Mapping[str, int]) -> None:
        with contextlib.suppress(OSError):  # the parent has gone, and we with it
            pipe.send(("alive", counts))

    while True:
        try:
            function, task, is_asked = pipe.recv()
        except (EOFError, OSError):
            return
        if not is_asked:
            with contextlib.suppress(Exception):
                function(task)
            continue
        try:
            with listening(report):
                reply: tuple[str, Any] = ("result", function(task))
        except MillraceError as error:
            context = {name: value for name, value in error._context.items() if isinstance(value, PLAIN)}
            reply = ("error", (type(error).__name__, str(error), context))
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            text = "".join(traceback.format_exception(error))
            reply = ("error", ("", f"{type(error).__name__}: {error} (on {task})\n{text}", {}))
        try:
            pipe.send(reply)
        except OSError:
            return


def _end_with(parent: int) -> None:
    """Ends this process when its parent does, in the middle of a task too."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            import ctypes

            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the kernel does it, whoever holds the GIL
    if hasattr(os, "getppid") and os.name == "posix" and os.getppid() != parent:
        os._exit(1)
    above: Any = multiprocessing.parent_process()

    def watch() -> None:
        above.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="millrace-parent").start()


def _error(described: tuple[str, str, dict[str, Any]]) -> Exception:
    """The worker's error again; one of ours as the class it was."""
    name, message, context = described
    kind = getattr(errors, name, None) if name else None
    if isinstance(kind, type) and issubclass(kind, MillraceError):
        return kind(message, **context)
    return StoreError(message) if name else RuntimeError(message)
