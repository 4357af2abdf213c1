"""Tasks in threads of this process, for work that leaves the GIL alone and runs no code of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from millrace.errors import ConfigError


class Threads:
    """Up to ``count`` threads that do tasks: they cost nothing to start, where a process imports everything again."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"workers={count}; expected 1 or more")
        self._count = count

    def run(
        self, function: Callable[[Any], Any], tasks: Sequence[Any], *, apart: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """(number of the task, result) as they finish; an error ends those that have not begun.

        ``apart`` is for engines that have another place to run in.
        """
        if self._count == 1 or len(tasks) < 2:
            yield from ((number, function(task)) for number, task in enumerate(tasks))
            return
        pool = ThreadPoolExecutor(self._count, thread_name_prefix="millrace-prepare")
        try:
            waiting = {pool.submit(function, task): number for number, task in enumerate(tasks)}
            for done in as_completed(waiting):
                yield waiting.pop(done), done.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Nothing stays behind: threads end with their tasks."""
