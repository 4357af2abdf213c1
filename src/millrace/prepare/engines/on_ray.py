"""Tasks on a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray

from millrace.prepare.engines.cluster import WAIT_S, Cluster, Site, perform
from millrace.prepare.engines.engine import RETRIES, Function, Outcome, died

OBJECT_BYTES = 128 << 20  # of shared memory for results, which are small; Ray would take a third of the machine
DEATHS = (
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
)


class Reports:
    """What tasks report, kept in an actor until the run asks for it."""

    def __init__(self) -> None:
        self._said: list[tuple[bytes, Mapping[str, int]]] = []

    def add(self, ticket: bytes, counts: Mapping[str, int]) -> None:
        self._said.append((ticket, counts))

    def take(self) -> list[tuple[bytes, Mapping[str, int]]]:
        said, self._said = self._said, []
        return said


def work(site: Site, function: Function, task: Any, reports: Any) -> Outcome:
    """Does a task in a worker of Ray."""
    ticket, last = bytes.fromhex(ray.get_runtime_context().get_task_id() or ""), list[Any]()

    def report(counts: Mapping[str, int]) -> None:
        last[:] = [reports.add.remote(ticket, counts)]

    outcome = perform(site, function, task, report)
    if last:
        ray.wait(last, timeout=5)  # else the last report could come after the result
    return outcome


class RayCluster(Cluster):
    product = "Ray"

    def _open(self) -> int:
        self._folder: str | None = None
        self._reports: Any = None
        self._is_mine = not ray.is_initialized()  # else the program that called us has connected, or started a cluster
        address = self._address or os.environ.get("RAY_ADDRESS")
        if self._is_mine and address:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise self._no_answer(error) from error
        elif self._is_mine:
            self._start()
        # Without a CPU of its own: it only keeps a few numbers.
        self._reports = ray.remote(num_cpus=0, max_restarts=-1)(Reports).remote()
        self._work = ray.remote(num_cpus=1, max_retries=RETRIES)(work)
        return int(ray.cluster_resources().get("CPU", 1))

    def _start(self) -> None:
        """Starts a cluster of this machine, which the kernel ends with this process."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
        # Not in TMPDIR: names of sockets in it must be short.
        self._folder = tempfile.mkdtemp(prefix=f"millrace-ray-{os.getpid()}-", dir="/tmp")
        ray.init(
            address="local", num_cpus=self._count, include_dashboard=False, log_to_driver=False,
            logging_level=logging.ERROR, object_store_memory=OBJECT_BYTES, _temp_dir=self._folder,
        )  # fmt: skip

    def _submit(self, function: Function, task: Any) -> Any:
        return self._work.remote(self._site, function, task, self._reports)

    def _replies(self, tasks: Sequence[Any]) -> Iterator[tuple[Any, Outcome]]:
        ready, _ = ray.wait(list(self._running), timeout=WAIT_S)
        by_ticket = {ref.task_id().binary(): ref for ref in self._running}
        said: list[tuple[bytes, Mapping[str, int]]] = []
        with contextlib.suppress(ray.exceptions.RayError):  # its machine is gone: nobody hears how far tasks are
            said = ray.get(self._reports.take.remote(), timeout=10)
        for ticket, counts in said:
            yield by_ticket.get(ticket), ("alive", counts)
        for ref in ready:
            try:
                outcome = ray.get(ref)
            except DEATHS as error:
                raise died(str(error).split(".")[0], tasks[self._running[ref]]) from None
            except ray.exceptions.RayError as error:
                raise self._unusable(error) from error
            yield ref, outcome

    def _close(self) -> None:
        if self._is_mine:
            ray.shutdown()  # Ray ends all processes that worked for us
        elif self._reports is not None:
            for ref in self._running:
                ray.cancel(ref, force=True)
            ray.kill(self._reports)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
