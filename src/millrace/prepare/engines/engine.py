"""What a preparation asks of the place where its tasks run.

Tasks are pure and may run twice, even at the same time: whatever a task writes gets its name by one last rename.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError, SourceError, describe_error, rebuild_error
from millrace.prepare.engines import listening

Function = Callable[[Any], Any]  # at the top level of a module: engines pass it to other processes
Moved = Callable[[int, Mapping[str, int]], None]
Outcome = tuple[str, Any]  # "alive" and counts, "result" and what the task returned, or "error" and its description
RETRIES = 2  # of a task whose worker died
STALL_S = 1800.0  # seconds without progress after which a worker counts as hung


class WorkerFailed(SourceError):
    """A worker died or hung on a task; ``source`` names its input."""


class Engine(ABC):
    """Runs up to ``count`` tasks at once and gives their results as they finish.

    ``start``, ``warm`` and ``stop`` are hints that save time; each may do nothing.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"workers={count}; expected 1 or more")
        self._count = count

    def run(
        self,
        function: Function,
        tasks: Sequence[Any],
        *,
        apart: bool = False,
        moved: Moved | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Generator[tuple[int, Any]]:
        """Yields (number of the task, result) as tasks finish. The first error ends the run.

        A ``MillraceError`` arrives as the class it was, with its attributes; any other error with its traceback.
        ``apart`` asks for another process, which code of the user's may crash.
        ``moved(number, counts)`` is called here with what a running task reports by ``alive``.
        ``meanwhile`` is called once while the first tasks run. No result is given before it has ended.
        """
        moved = moved or (lambda number, counts: None)
        if self._begin(function, len(tasks), apart):
            try:
                yield from self._run(self._outcomes(function, tasks), moved, meanwhile)
            except BaseException:
                self.close()  # nobody waits for the other tasks
                raise
            return
        if meanwhile is not None:
            meanwhile()
        for number, task in enumerate(tasks):
            with listening(partial(moved, number)):
                result = function(task)
            yield number, result

    @abstractmethod
    def _begin(self, function: Function, num_tasks: int, apart: bool) -> bool:
        """Starts what so many tasks need, without waiting; False where they will run in this thread."""

    @abstractmethod
    def _outcomes(self, function: Function, tasks: Sequence[Any]) -> Generator[tuple[int, Outcome]]:
        """Runs the tasks outside of this thread. Yields what they say with their numbers, until all have a result."""

    def _run(
        self, outcomes: Generator[tuple[int, Outcome]], moved: Moved, meanwhile: Callable[[], None] | None
    ) -> Iterator[tuple[int, Any]]:
        beside = None if meanwhile is None else _beside(meanwhile)
        results: list[tuple[int, Any]] = []  # that wait for the end of ``meanwhile``
        with contextlib.closing(outcomes):
            for number, (what, value) in outcomes:
                if what == "error":
                    raise rebuild_error(value)
                elif what == "alive":
                    moved(number, value)
                else:
                    results.append((number, value))
                if beside is None or beside.done():
                    if beside is not None:
                        beside.result()
                    yield from results
                    results.clear()
        if beside is not None:
            beside.result()
        yield from results

    def close(self) -> None:
        """Ends all that was started, tasks too; may be called twice."""
        return

    def settle_in(self, attempts: Path, functions: Mapping[str, str]) -> None:
        """Says where the run may make a folder for attempts, and the functions of the user's that tasks call, by option.

        For engines whose tasks may outlive the run: once the next run has removed the folder, they can harm nothing.
        """
        return

    def start(self, function: Function, num_tasks: int, *, apart: bool = False) -> bool:
        """As ``_begin``, before the tasks are known."""
        return False

    def warm(self, function: Function, task: Any) -> None:
        """Lets every worker that was started do this before its first task; errors in it are ignored."""
        return

    def stop(self) -> None:
        """Lets workers end in the background: no further tasks come before ``close``."""
        return


def attempt(function: Function, task: Any, report: Callable[[Mapping[str, int]], None]) -> Outcome:
    """Does a task in a worker. An error travels as text with its class, never as a pickle of the user's."""
    try:
        with listening(report):
            return "result", function(task)
    except BaseException as error:  # noqa: BLE001 - raised where the results are asked for
        described = describe_error(error)
        if not described["kind"]:
            described["message"] += f" (on {task})"
        return "error", described


def died(how: str, task: Any) -> WorkerFailed:
    """The error for a task that no worker survives."""
    return WorkerFailed(
        f"a worker died ({how}) {RETRIES + 1} times on {task}; look at that input, or use fewer workers",
        source=str(task),
    )


def stalled(task: Any, stall_s: float) -> WorkerFailed:
    return WorkerFailed(
        f"a worker made no progress for {stall_s:g} s on {task}; look at that input and at your own function, then run again, "
        "with a larger --stall if it only is slow",
        source=str(task),
    )


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
