"""Tasks in processes of this machine. A worker that dies costs its task a retry, not the run.

Workers are spawned, hold no lock, and end when their parent does, also after kill -9: none goes on writing beside
the run that follows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from millrace.prepare.engines.engine import RETRIES, Engine, Function, Outcome, attempt, died, stalled
from millrace.prepare.engines.spawning import quiet_start


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

    def _outcomes(self, function: Function, tasks: Sequence[Any]) -> Generator[tuple[int, Outcome]]:
        waiting = list(range(len(tasks)))[::-1]
        tries = [0] * len(tasks)
        left = len(tasks)
        while left:
            self._give(function, tasks, waiting)
            for worker in self._ready(tasks):
                number = worker.task
                assert number is not None
                try:
                    outcome: Outcome = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.process.join(timeout=5)
                    worker.pipe.close()
                    self._workers[self._workers.index(worker)] = _Worker(self._context, function)
                    tries[number] += 1
                    if tries[number] > RETRIES:
                        raise died(_how(worker), tasks[number]) from None
                    waiting.append(number)
                    continue
                if outcome[0] != "alive":
                    worker.task = None
                    left -= 1
                    self._give(function, tasks, waiting)  # before the caller looks at this one
                yield number, outcome

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
                raise stalled(tasks[worker.task or 0], self._stall_s)
        return ready

    def stop(self) -> None:
        for worker in self._workers:
            worker.stop()

    def close(self) -> None:
        self.stop()
        for worker in self._workers:
            worker.wait()
        self._workers = []


def _how(worker: _Worker) -> str:
    """How a worker died."""
    code = worker.process.exitcode
    if code is None or code >= 0:
        return f"exit code {code}"
    hint = "; it may have run out of memory" if code == -signal.SIGKILL else ""
    return f"signal {signal.Signals(-code).name}{hint}"


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
            pipe.send(attempt(function, task, report))
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
