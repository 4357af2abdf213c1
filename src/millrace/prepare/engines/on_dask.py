"""Tasks on a Dask cluster."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import dask
import distributed

from millrace.prepare.engines.cluster import WAIT_S, Cluster, Site, perform
from millrace.prepare.engines.engine import RETRIES, Function, Outcome, died
from millrace.prepare.engines.spawning import quiet_start

CONNECT_S = 20
_one_task = threading.Lock()  # of a worker: our caches of tokenizers and tables serve one thread


def work(site: Site, function: Function, task: Any, topic: str, ticket: str) -> Outcome:
    """Does a task in a worker of Dask."""
    worker = distributed.get_worker()

    def report(counts: Mapping[str, int]) -> None:
        worker.log_event(topic, (ticket, dict(counts)))

    with _one_task:
        return perform(site, function, task, report)


class Call(NamedTuple):
    """A call of ``work`` that ``pickle.loads`` makes.

    So a worker needs none of our modules to begin. One that it lacks is then an error of the task; had Dask to load the
    arguments, it would end that worker.
    """

    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return work, self.arguments


class QuietNanny(distributed.Nanny):  # type: ignore[misc]
    """Starts a worker, also in place of one that died, without running the user's script again."""

    async def instantiate(self) -> Any:
        with quiet_start():
            return await super().instantiate()


class DaskCluster(Cluster):
    product = "Dask"

    def _open(self) -> int:
        self._client: Any = None
        self._cluster: Any = None
        self._futures: dict[str, Any] = {}
        address = self._address or os.environ.get("DASK_SCHEDULER_ADDRESS")
        if not address:
            self._start()
        try:
            self._client = distributed.Client(
                address or self._cluster, timeout=CONNECT_S, set_as_default=False, name="millrace"
            )
        except (OSError, TimeoutError, ValueError) as error:
            raise self._no_answer(error) from error
        self._said: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._topic = f"millrace-{uuid.uuid4().hex}"
        self._client.subscribe_topic(self._topic, lambda event: self._said.put(tuple(event[1])))
        return len(self._client.scheduler_info(n_workers=-1)["workers"])

    def _start(self) -> None:
        """Starts a cluster of this machine: other machines cannot reach it, and it ends with this process."""
        self._folder = tempfile.TemporaryDirectory(prefix="millrace-dask-")
        # The thread that starts workers begins inside, and so neither it nor they see Ctrl-C.
        own = {"distributed.scheduler.allowed-failures": RETRIES, "temporary-directory": self._folder.name}
        with quiet_start(), dask.config.set(own):
            # Without a limit of memory: Dask counts pages of mapped files, and would end workers for them.
            self._cluster = distributed.LocalCluster(
                n_workers=self._count, threads_per_worker=1, worker_class=QuietNanny, memory_limit=0, host="127.0.0.1",
                dashboard_address="127.0.0.1:0", worker_dashboard_address=None, scheduler_kwargs={"dashboard": False},
                silence_logs="CRITICAL",
            )  # fmt: skip

    def _submit(self, function: Function, task: Any) -> Any:
        ticket = f"millrace-{uuid.uuid4().hex}"
        call = pickle.dumps(Call((self._site, function, task, self._topic, ticket)))
        future = self._client.submit(pickle.loads, call, key=ticket, pure=False)
        self._futures[ticket] = future
        future.add_done_callback(lambda done: self._said.put((done.key, None)))
        return ticket

    def _replies(self, tasks: Sequence[Any]) -> Iterator[tuple[Any, Outcome]]:
        try:
            ticket, counts = self._said.get(timeout=WAIT_S)
        except Empty:
            return
        if counts is not None:
            yield ticket, ("alive", counts)
        elif ticket in self._running and (outcome := self._result(ticket, tasks[self._running[ticket]])):
            yield ticket, outcome

    def _result(self, ticket: str, task: Any) -> Outcome | None:
        """What a task came to; None where its worker was lost just then: Dask does it again."""
        try:
            outcome: Outcome = self._futures[ticket].result(timeout=CONNECT_S)
        except distributed.KilledWorker as error:
            raise died(f"Dask lost {error.last_worker.address}", task) from None
        except TimeoutError:
            self._said.put((ticket, None))
            return None
        except Exception as error:  # a worker could not load the task
            raise self._unusable(error) from error
        del self._futures[ticket]
        return outcome

    def _close(self) -> None:
        if self._client is not None:
            self._client.cancel(list(self._futures.values()), force=True)
            self._client.close()
        if self._cluster is not None:
            self._cluster.close()
            self._folder.cleanup()
