"""Tasks on a cluster of Ray or Dask, which schedules them and tries again those whose worker died.

With an ``address``, the cluster is somebody else's: it is used and left as it is. Without one, a cluster of this
machine is started, and ends with us.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from millrace.distribution import __version__
from millrace.errors import ConfigError
from millrace.native import num_cores
from millrace.prepare.engines.engine import Engine, Function, Outcome, attempt, stalled
from millrace.prepare.functions import loaded_digest, source_digest
from millrace.store import platform

WAIT_S = 1.0  # between two looks at what tasks report, where nothing finishes


class Site(NamedTuple):
    """What a worker must share with this run: code, and a file system."""

    version: str
    folder: str  # in which the user started the run, and where modules may lie
    functions: dict[str, tuple[str, str | None]]  # of the user's, by option: the name, and the hash of its file
    attempts: str | None  # the folder in which attempts are made; the next run removes it

    def enter(self) -> None:
        """Refuses, in a worker, to do tasks of a run that is not at home there."""
        if self.version != __version__:
            raise ConfigError(
                f"worker {socket.gethostname()} has millrace {__version__}, this run {self.version}; "
                "install the same version on all machines"
            )
        if self.attempts is not None and not os.path.isdir(self.attempts):
            raise ConfigError(
                f"worker {socket.gethostname()} does not see {self.attempts}; --out must lie on a file system that all "
                "machines share"
            )
        if self.folder not in sys.path and os.path.isdir(self.folder):
            sys.path.append(self.folder)
        for option, (name, expected) in self.functions.items():
            if (loaded := loaded_digest(name, option)) != expected:
                raise ConfigError(
                    f"{option} {name!r}: worker {socket.gethostname()} has loaded another file of that name "
                    f"(hash {loaded}, here {expected}); restart the workers of the cluster, or copy the file there"
                )


def perform(site: Site, function: Function, task: Any, report: Callable[[Mapping[str, int]], None]) -> Outcome:
    """Does a task in a worker of a cluster."""

    def work(task: Any) -> Any:
        site.enter()
        with platform.attempts_in(site.attempts):
            return function(task)

    return attempt(work, task, report)


class Cluster(Engine):
    """Up to ``count`` tasks at once; None: as many as the cluster has CPUs now.

    The run fails when a task is silent for ``stall_s`` seconds: no result, no ``alive``, no free worker. 0 waits for ever.
    """

    product: str  # in messages

    def __init__(self, count: int | None = None, address: str | None = None, stall_s: float = 0) -> None:
        super().__init__(num_cores() if count is None else count)
        self._takes_all = count is None
        self._address, self._stall_s = address, stall_s
        self._is_open = False
        self._running: dict[Any, int] = {}  # what the cluster knows a task by -> its number
        self._site = Site(__version__, os.getcwd(), {}, None)

    def settle_in(self, attempts: Path, functions: Mapping[str, str]) -> None:
        mine = attempts / uuid.uuid4().hex
        platform.make_dir(mine)
        own = {f"--{option}": (name, source_digest(name, f"--{option}")) for option, name in functions.items()}
        self._site = self._site._replace(attempts=str(mine), functions=own)

    def _begin(self, function: Function, num_tasks: int, apart: bool) -> bool:
        if num_tasks and not self._is_open:
            self._is_open = True  # what an error leaves half open is closed too
            num_cpus = self._open()
            if self._takes_all:
                self._count = max(1, num_cpus)
        return num_tasks > 0

    def _outcomes(self, function: Function, tasks: Sequence[Any]) -> Generator[tuple[int, Outcome]]:
        waiting = list(range(len(tasks)))[::-1]
        silent_s: dict[int, float] = {}
        self._running.clear()
        while waiting or self._running:
            while waiting and len(self._running) < self._count:
                number = waiting.pop()
                self._running[self._submit(function, tasks[number])] = number
                silent_s[number] = 0.0
            began, heard = time.monotonic(), set()
            for ticket, outcome in self._replies(tasks):
                if (number := self._running.get(ticket, -1)) >= 0:  # else it is late: of a task that has ended
                    heard.add(number)
                    if outcome[0] != "alive":
                        del self._running[ticket]
                    yield number, outcome
            # No more than we waited for: if this machine was suspended, tasks need time to report again.
            passed = min(time.monotonic() - began, 2 * WAIT_S)
            for number in self._running.values():
                silent_s[number] = 0.0 if number in heard else silent_s[number] + passed
                if self._stall_s and silent_s[number] >= self._stall_s:
                    raise stalled(tasks[number], self._stall_s)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._close()
        self._running.clear()

    def _no_answer(self, error: Exception) -> ConfigError:
        said = str(error).strip().splitlines() or [type(error).__name__]
        return ConfigError(
            f"--address {self._address}: no {self.product} cluster answers ({said[0][:200]}); check the address, and that "
            "the cluster runs"
        )

    def _unusable(self, error: BaseException) -> ConfigError:
        """The error for a worker that could not even begin a task."""
        said = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return ConfigError(
            f"a worker of the {self.product} cluster cannot do the tasks: {said[-1][:300]}; install millrace "
            f"{self._site.version} there, as here, and all modules of yours"
        )

    @abstractmethod
    def _open(self) -> int:
        """Connects to the cluster, or starts one; returns the number of tasks that it can do at once."""

    @abstractmethod
    def _submit(self, function: Function, task: Any) -> Any:
        """Gives a task to the cluster; returns what it is known by."""

    @abstractmethod
    def _replies(self, tasks: Sequence[Any]) -> Iterator[tuple[Any, Outcome]]:
        """What tasks have said, once some have, or after ``WAIT_S``. Raises for workers that could not do theirs."""

    @abstractmethod
    def _close(self) -> None:
        """Cancels what runs, and ends or leaves the cluster."""
