"""What a preparation asks of the place where its tasks run.

Tasks are pure and may run twice, even at the same time: whatever a task writes gets its name by one last rename.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from millrace.errors import ConfigError
from millrace.prepare.engines import listening

Function = Callable[[Any], Any]  # at the top level of a module: engines pass it to other processes
Moved = Callable[[int, Mapping[str, int]], None]


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
                yield from self._run(function, tasks, moved, meanwhile)
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
    def _run(
        self, function: Function, tasks: Sequence[Any], moved: Moved, meanwhile: Callable[[], None] | None
    ) -> Iterator[tuple[int, Any]]:
        """As ``run``, outside of this thread."""

    def close(self) -> None:
        """Ends all that was started, tasks too; may be called twice."""
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
