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
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from millrace.errors import ConfigError, MillraceError, SourceError, StoreError

Task = TypeVar("Task")
RETRIES = 2


class WorkerFailed(SourceError):
    """A worker died or raised on a task; ``source`` says which input it was on."""


def run(
    function: Callable[[Any], Any], tasks: Sequence[Any], workers: int, *, apart: bool = False
) -> Iterator[tuple[int, Any]]:
    """(number of the task, result) as they finish.

    With one worker everything happens in this process, and so does a single task unless it must run ``apart``.
    """
    if workers < 1:
        raise ConfigError(f"workers={workers}; expected 1 or more")
    if workers == 1 or not tasks or (len(tasks) == 1 and not apart):
        for number, task in enumerate(tasks):
            yield number, function(task)
        return
    pool = _Pool(function, min(workers, len(tasks)))
    try:
        yield from pool.run(tasks)
    finally:
        pool.close()


class LocalPool:
    """Workers that stay for several runs of tasks: starting them costs as much as a small run.

    ``threads`` are for work that leaves the GIL alone and runs no code of the user's; processes for any other.
    """

    def __init__(self, function: Callable[[Any], Any], workers: int, *, threads: bool = False) -> None:
        if workers < 1:
            raise ConfigError(f"workers={workers}; expected 1 or more")
        self._function, self._workers = function, workers
        self._pool = _Pool(function, workers) if workers > 1 and not threads else None

    def run(self, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """(number of the task, result) as they finish."""
        if self._pool is not None:
            yield from self._pool.run(tasks)
            return
        if self._workers > 1 and len(tasks) > 1:
            yield from self._in_threads(tasks)
            return
        for number, task in enumerate(tasks):
            yield number, self._function(task)

    def _in_threads(self, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="millrace-prepare")
        try:
            waiting = {pool.submit(self._function, task): number for number, task in enumerate(tasks)}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._pool is not None:
            self._pool.close()


class _Worker:
    def __init__(self, context: Any, function: Callable[[Any], Any]) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function, os.getpid()), daemon=True)
        with _quiet_start():
            self.process.start()
        theirs.close()
        self.task: int | None = None

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


class _Pool:
    def __init__(self, function: Callable[[Any], Any], count: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._function = function
        self._workers: list[_Worker] = []
        try:
            for _ in range(count):
                self._workers.append(_Worker(self._context, function))
        except BaseException:
            self.close()
            raise

    def run(self, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        waiting = list(range(len(tasks)))[::-1]
        tries = [0] * len(tasks)
        left = len(tasks)
        while left:
            for worker in self._workers:
                if worker.task is None and waiting:
                    worker.task = waiting.pop()
                    with contextlib.suppress(OSError):  # it has died while idle: its pipe says so below
                        worker.pipe.send(tasks[worker.task])
            for worker in self._ready():
                number = worker.task
                assert number is not None
                try:
                    outcome, result = worker.pipe.recv()
                except (EOFError, OSError):
                    self._replace(worker)
                    tries[number] += 1
                    if tries[number] > RETRIES:
                        raise _died(worker, tasks[number]) from None
                    waiting.append(number)
                    continue
                worker.task = None
                if outcome == "error":
                    raise _error(result)
                left -= 1
                yield number, result

    def _ready(self) -> list[_Worker]:
        busy = {worker.pipe: worker for worker in self._workers if worker.task is not None}
        return [busy[pipe] for pipe in wait(list(busy)) if isinstance(pipe, Connection)]

    def _replace(self, worker: _Worker) -> None:
        worker.process.join(timeout=5)
        worker.pipe.close()
        self._workers[self._workers.index(worker)] = _Worker(self._context, self._function)

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.wait()


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """A worker that is starting neither runs the user's script again, nor prints a traceback at Ctrl-C.

    Spawn imports the main module anew, which fails in a script without a guard, in a notebook and from standard
    input; our tasks never live there.
    """
    main = sys.modules.get("__main__")
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        with _without_interrupt():
            yield
    finally:
        if main is not None:
            sys.modules["__main__"] = main


@contextlib.contextmanager
def _without_interrupt() -> Iterator[None]:
    """Ctrl-C waits for the end of the block; a process started within never sees it."""
    resource_tracker.ensure_running()  # started within, it would unblock the signal
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    arrived: list[int] = []
    # Blocked for the worker, which inherits that; held back here too, since any thread may be given the signal.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        if blocked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGINT, before)
        if arrived:
            signal.raise_signal(signal.SIGINT)


def _died(worker: _Worker, task: Any) -> WorkerFailed:
    code = worker.process.exitcode
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    hint = "; it may have run out of memory" if code == -signal.SIGKILL else ""
    return WorkerFailed(
        f"a worker died ({how}{hint}) {RETRIES + 1} times on {task}; look at that input, or use fewer workers",
        source=str(task),
    )


def _serve(pipe: Connection, function: Callable[[Any], Any], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it ends us
    _end_with(parent)
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
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
