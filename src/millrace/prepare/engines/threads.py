"""Tasks in threads of this process, for work that releases the GIL and runs no code of the user's."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

from millrace.prepare.engines import listening
from millrace.prepare.engines.engine import Engine, Function, Outcome


class Threads(Engine):
    """Up to ``count`` threads. They start at once, where a process imports everything again."""

    def _begin(self, function: Function, num_tasks: int, apart: bool) -> bool:
        return self._count > 1 and num_tasks > 1

    def _outcomes(self, function: Function, tasks: Sequence[Any]) -> Generator[tuple[int, Outcome]]:
        replies: SimpleQueue[tuple[int, Mapping[str, int] | Future[Any]]] = SimpleQueue()

        def reply(number: int, said: Mapping[str, int] | Future[Any]) -> None:
            replies.put((number, said))

        def work(number: int) -> Any:
            with listening(partial(reply, number)):
                return function(tasks[number])

        pool = ThreadPoolExecutor(self._count, thread_name_prefix="millrace-prepare")
        try:
            for number in range(len(tasks)):
                pool.submit(work, number).add_done_callback(partial(reply, number))
            left = len(tasks)
            while left:
                number, said = replies.get()
                left -= isinstance(said, Future)
                yield number, ("result", said.result()) if isinstance(said, Future) else ("alive", said)
        finally:
            pool.shutdown(cancel_futures=True)
