"""Tasks in processes of this machine, one at a time each; a worker that dies costs its task a retry, not the run.

Workers are spawned, hold no lock, and end when their parent does, also after kill -9: none goes on writing beside
the run that follows. An exception travels as text with its type, never as a pickle of the user's.
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from millrace.errors import ConfigError, MillraceError, SourceError, StoreError
from millrace.prepare import engines
from millrace.prepare.engines.spawning import quiet_start

Task = TypeVar("Task")
Moved = Callable[[int, Mapping[str, int]], None]
RETRIES = 2
EVERY_S = 1.0  # seconds between what a task says of itself
STALL_S = 1800.0  # seconds without progress after which a worker is taken for hung


class WorkerFailed(SourceError):
    """A worker died or raised on a task; ``source`` says which input it was on."""


class _Worker:
    def __init__(self, context: Any, function: Callable[[Any], Any]) -> None:
        self.pipe, theirs = context.Pipe()
        # The function goes along so that what it needs is imported before the first task comes.
        self.process = context.Process(target=_serve, args=(theirs, os.getpid(), function), daemon=True)
        with quiet_start():
            self.process.start()
        theirs.close()
        self.task: int | None = None
        self.silent_s = 0.0

    def stop(self) -> None:
        """Asks it to end; one that is at work ends at once, since its task can be done again."""
        self.pipe.close()
        if self.task is not None:
            self.process.kill()

    def wait(self) -> None:
        self.process.join(timeout=2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Workers:
    """Up to ``count`` processes that do tasks; they stay for the next ones, until ``close``.

    One that for ``stall_s`` seconds neither ends its task nor says that it is ``alive`` ends the run; 0 is for ever.
    """

    def __init__(self, count: int, stall_s: float = 0) -> None:
        if count < 1:
            raise ConfigError(f"workers={count}; expected 1 or more")
        self._stall_s = stall_s
        self._context = multiprocessing.get_context("spawn")
        self._count = count
        self._workers: list[_Worker] = []

    def limit(self, count: int) -> None:
        """No more than ``count`` from now on: a process that starts costs more than a small task."""
        self._count = max(1, min(self._count, count))

    def start(self, function: Callable[[Any], Any], num_tasks: int, *, apart: bool = False) -> bool:
        """Starts what ``run`` will need, without waiting for it; False where the tasks run in this process."""
        if num_tasks == 0 or (not apart and min(self._count, num_tasks) == 1):
            return False
        while len(self._workers) < min(self._count, num_tasks):
            self._workers.append(_Worker(self._context, function))
        return True

    def warm(self, function: Callable[[Any], Any], task: Any) -> None:
        """Has every worker that is started do this while nobody waits; what fails in it fails again in a task."""
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it has died: the next task finds out
                worker.pipe.send((function, task, False))

    def run(
        self,
        function: Callable[[Any], Any],
        tasks: Sequence[Any],
        *,
        apart: bool = False,
        moved: Moved | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """(number of the task, result) as they finish; ``moved`` is told how far one is, about once a second.

        With one worker everything happens in this process, and so does a single task, unless it must run ``apart``.
        ``meanwhile`` is called once, by a thread while the first tasks are being done; no result is given before it has ended.
        """
        moved = moved or (lambda number, counts: None)
        if not self.start(function, len(tasks), apart=apart):
            if meanwhile is not None:
                meanwhile()
            yield from _run_here(function, tasks, moved)
            return
        try:
            yield from self._run(function, tasks, moved, meanwhile)
        except BaseException:
            self.close()  # none goes on with what nobody waits for
            raise

    def _run(
        self, function: Callable[[Any], Any], tasks: Sequence[Any], moved: Moved, meanwhile: Callable[[], None] | None
    ) -> Iterator[tuple[int, Any]]:
        waiting = list(range(len(tasks)))[::-1]
        tries = [0] * len(tasks)
        left = len(tasks)
        held: list[tuple[int, Any]] = []  # until ``meanwhile`` has ended
        self._give(function, tasks, waiting)
        beside = None if meanwhile is None else _Beside(meanwhile)
        while left:
            for worker in self._ready(tasks):
                number = worker.task
                assert number is not None
                try:
                    outcome, result = worker.pipe.recv()
                except (EOFError, OSError):
                    self._replace(worker, function)
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
                held.append((number, result))
            self._give(function, tasks, waiting)
            if beside is None or beside.has_ended(wait=not left):
                yield from held
                held.clear()

    def _give(self, function: Callable[[Any], Any], tasks: Sequence[Any], waiting: list[int]) -> None:
        """To every worker that has none the next task."""
        for worker in self._workers:
            if worker.task is None and waiting:
                worker.task, worker.silent_s = waiting.pop(), 0.0
                with contextlib.suppress(OSError):  # it has died while idle: its pipe says so
                    worker.pipe.send((function, tasks[worker.task], True))

    def _ready(self, tasks: Sequence[Any]) -> list[_Worker]:
        """Workers that have something to say; one that has been silent for too long is an error."""
        busy = {worker.pipe: worker for worker in self._workers if worker.task is not None}
        step = self._stall_s / 20 or None
        began = time.monotonic()
        ready = [busy[pipe] for pipe in wait(list(busy), step) if isinstance(pipe, Connection)]
        # No more than was waited for: if all of us were suspended, they need time to speak again.
        passed = min(time.monotonic() - began, step or 0)
        for worker in busy.values():
            worker.silent_s = 0.0 if worker in ready else worker.silent_s + passed
            if self._stall_s and worker.silent_s >= self._stall_s:
                raise _stalled(tasks[worker.task or 0], self._stall_s)
        return ready

    def _replace(self, worker: _Worker, function: Callable[[Any], Any]) -> None:
        worker.process.join(timeout=5)
        worker.pipe.close()
        self._workers[self._workers.index(worker)] = _Worker(self._context, function)

    def stop(self) -> None:
        """Tells them that nothing more comes; they end while the caller goes on to ``close``."""
        for worker in self._workers:
            worker.stop()

    def close(self) -> None:
        self.stop()
        for worker in self._workers:
            worker.wait()
        self._workers = []


class _Beside(threading.Thread):
    """Does something while workers are at work; nobody waits for it where the run ends early."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__(name="millrace-beside", daemon=True)
        self._function = function
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks
            self._error = error

    def has_ended(self, *, wait: bool) -> bool:
        if wait:
            self.join()
        if self.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True


def _run_here(function: Callable[[Any], Any], tasks: Sequence[Any], moved: Moved) -> Iterator[tuple[int, Any]]:
    for number, task in enumerate(tasks):
        engines.on_alive = _Alive(partial(moved, number))
        try:
            result = function(task)
        finally:
            engines.on_alive = None
        yield number, result


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


def _serve(pipe: Connection, parent: int, function: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it ends us
    _end_with(parent)

    def say(counts: Mapping[str, int]) -> None:
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
        engines.on_alive = _Alive(say)
        try:
            reply: tuple[str, Any] = ("result", function(task))
        except MillraceError as error:
            reply = (
                "error",
                (type(error).__name__, str(error), {k: v for k, v in error._context.items() if _is_plain(v)}),
            )
        except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it
            text = "".join(traceback.format_exception(error))
            reply = ("error", ("", f"{type(error).__name__}: {error} (on {task})\n{text}", {}))
        try:
            pipe.send(reply)
        except OSError:
            return


class _Alive:
    """Tells how far a task is, once a second at most."""

    def __init__(self, say: Callable[[Mapping[str, int]], None]) -> None:
        self._say, self._said, self._counts = say, time.monotonic(), Counter[str]()

    def __call__(self, counts: Mapping[str, int]) -> None:
        self._counts.update(counts)
        if time.monotonic() - self._said >= EVERY_S:
            self._said = time.monotonic()
            self._say(dict(self._counts))


def _end_with(parent: int) -> None:
    """Ends this process when its parent does, in the middle of a task too."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            import ctypes

            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the kernel's word, whoever holds the GIL
    if hasattr(os, "getppid") and os.name == "posix" and os.getppid() != parent:
        os._exit(1)
    above: Any = multiprocessing.parent_process()

    def watch() -> None:
        above.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="millrace-parent").start()


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _error(described: tuple[str, str, dict[str, Any]]) -> Exception:
    """The worker's error again, as the class it was where that is one of ours."""
    from millrace import errors

    name, message, context = described
    kind = getattr(errors, name, None) if name else None
    if isinstance(kind, type) and issubclass(kind, MillraceError):
        return kind(message, **context)
    return StoreError(message) if name else RuntimeError(message)
