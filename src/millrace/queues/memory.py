"""A queue in the memory of this process: the same contract as on Redis, for tests and for threads.

``Server`` is what Redis is: shared by all that know its name. Its clock can be moved, and ``flush`` empties it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from millrace.queues.address import Address
from millrace.queues.protocol import Held, Lease, Offer, Seen, Status, taken

WAIT_S = 0.5  # of await_ready and lease


class _Run:
    def __init__(self) -> None:
        self.folder, self.folder_at = "", float("-inf")
        self.links: dict[str, float] = {}  # when each was last seen
        self.records: dict[str, bytes] = {}
        self.waiting: dict[str, float] = {}  # since when
        self.leased: dict[str, tuple[float, str, float]] = {}  # until when, by whom, offered when
        self.payloads: dict[str, bytes] = {}
        self.finished: dict[str, deque[str]] = {}
        self.arrays: dict[str, bytes] = {}
        self.workers: dict[str, tuple[float, dict[str, Any]]] = {}
        self.is_ended = False


class Server:
    """What queues of one name share."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.changed = clock, threading.Condition()
        self.runs: dict[str, _Run] = {}

    def flush(self) -> None:
        with self.changed:
            self.runs.clear()


_servers: dict[str, Server] = {}


def server(name: str) -> Server:
    return _servers.setdefault(name, Server())


class MemoryQueue:
    """A queue on a ``Server``."""

    def __init__(self, server: Server, address: Address) -> None:
        self._server, self.name, self._alive_s = server, str(address), address.seconds["alive_s"]
        self.deadline_s, self.lease_s = address.seconds["deadline_s"], address.seconds["lease_s"]
        self.compress = address.compress
        self._ticks = itertools.count()  # tickets offered together keep their order

    def _run(self, run: str) -> _Run:
        return self._server.runs.setdefault(run, _Run())

    def _is_fresh(self, at: float) -> bool:
        return self._server.clock() - at < self._alive_s

    def check(self, num_bytes: int) -> None:
        pass

    def offer(self, run: str, link: str, folder: str, offers: Sequence[Offer]) -> Seen:
        with self._server.changed:
            own, now, ready = self._run(run), self._server.clock(), []
            if own.folder != folder and self._is_fresh(own.folder_at):
                raise taken(run, own.folder)
            own.folder, own.folder_at, own.links[link], own.is_ended = folder, now, now, False
            for offer in offers:
                own.records.setdefault(offer.attempt, offer.record)
                for ticket in offer.unwanted:
                    _forget(own, ticket)
                for ticket in offer.wanted:
                    if ticket in own.payloads:
                        ready.append(ticket)
                    elif ticket not in own.leased:
                        own.waiting.setdefault(ticket, now + next(self._ticks) * 1e-9)
            self._server.changed.notify_all()
            alive = [info for at, info in own.workers.values() if self._is_fresh(at)]
            return Seen(sum(info["threads"] for info in alive), ready)

    def close_lines(self, run: str, attempts: Sequence[str], tickets: Sequence[str]) -> None:
        with self._server.changed:
            own = self._run(run)
            for ticket in tickets:
                _forget(own, ticket)
            for attempt in attempts:
                own.records.pop(attempt, None)
                own.finished.setdefault(attempt, deque()).append("")
            self._server.changed.notify_all()

    def end(self, run: str, link: str) -> None:
        with self._server.changed:
            own = self._run(run)
            own.links.pop(link, None)
            own.is_ended = True  # another link says that it is not, at its next beat, unless it is dead
            if not any(self._is_fresh(at) for at in own.links.values()):
                own.folder, own.folder_at = "", float("-inf")
            self._server.changed.notify_all()

    def await_ready(self, run: str, attempt: str) -> list[str]:
        with self._server.changed:
            self._server.changed.wait_for(lambda: self._run(run).finished.get(attempt), WAIT_S)
            finished = self._run(run).finished.pop(attempt, deque())
            return [ticket for ticket in finished if ticket]

    def get(self, run: str, ticket: str, memory: Callable[[int], Any]) -> Any:
        with self._server.changed:
            payload = self._run(run).payloads.get(ticket)
        if payload is None:
            return None
        target = memory(len(payload))
        memoryview(target)[:] = payload
        return target

    def put_array(self, run: str, key: str, data: Any) -> None:
        with self._server.changed:
            self._run(run).arrays[key] = bytes(data)

    def has_arrays(self, run: str, keys: Sequence[str]) -> bool:
        return all(key in self._run(run).arrays for key in keys)

    def lease(self, run: str, worker: str, info: dict[str, Any]) -> Lease:
        with self._server.changed:
            found = self._lease(run, worker, info)
            if found.state in ("idle", "absent"):
                self._server.changed.wait(WAIT_S)
                found = self._lease(run, worker, info)
            return found

    def _lease(self, run: str, worker: str, info: dict[str, Any]) -> Lease:
        own, now = self._run(run), self._server.clock()
        own.workers[worker] = now, info
        for ticket, (until, _, offered) in list(own.leased.items()):
            if until <= now:
                del own.leased[ticket]
                own.waiting[ticket] = offered
        if not any(self._is_fresh(at) for at in own.links.values()):
            return Lease("ended" if own.is_ended else "absent")
        while own.waiting:
            ticket = min(own.waiting, key=lambda ticket: own.waiting[ticket])
            offered = own.waiting.pop(ticket)
            link = ticket.partition("-")[0]
            if link in own.links and self._is_fresh(own.links[link]) and ticket.split(":")[0] in own.records:
                own.leased[ticket] = now + self.lease_s, worker, offered
                return Lease("ticket", ticket)
        return Lease("idle")

    def renew(self, run: str, worker: str, info: dict[str, Any], tickets: Sequence[str]) -> list[str]:
        with self._server.changed:
            own, now, lost = self._run(run), self._server.clock(), []
            own.workers[worker] = now, info
            for ticket in tickets:
                _, holder, offered = own.leased.get(ticket, (0, None, 0.0))
                if holder == worker:
                    own.leased[ticket] = now + self.lease_s, worker, offered
                else:
                    lost.append(ticket)
            return lost

    def put(self, run: str, worker: str, ticket: str, payload: Any) -> bool:
        with self._server.changed:
            own = self._run(run)
            is_new = payload is not None and ticket not in own.payloads
            if payload is not None and is_new:
                own.payloads[ticket] = bytes(payload)
            own.waiting.pop(ticket, None)
            own.leased.pop(ticket, None)
            if ticket.split(":")[0] not in own.records:  # of a line that has ended
                own.payloads.pop(ticket, None)
            own.finished.setdefault(ticket.split(":")[0], deque(maxlen=4096)).append(ticket)
            self._server.changed.notify_all()
            return is_new

    def leave(self, run: str, worker: str) -> None:
        with self._server.changed:
            own = self._run(run)
            own.workers.pop(worker, None)
            for ticket, (_, holder, offered) in list(own.leased.items()):
                if holder == worker:
                    del own.leased[ticket]
                    own.waiting[ticket] = offered
            self._server.changed.notify_all()

    def record(self, run: str, attempt: str) -> bytes | None:
        return self._run(run).records.get(attempt)

    def array(self, run: str, key: str) -> bytes | None:
        return self._run(run).arrays.get(key)

    def runs(self) -> list[str]:
        with self._server.changed:
            return sorted(self._server.runs)

    def status(self, run: str) -> Status:
        with self._server.changed:
            own, now = self._run(run), self._server.clock()
            leases = [Held(ticket, worker, until - now) for ticket, (until, worker, _) in own.leased.items()]
            oldest = None if not own.waiting else now - min(own.waiting.values())
            workers = {name: {**info, "seen_s": now - at} for name, (at, info) in own.workers.items()}
            is_live = any(self._is_fresh(at) for at in own.links.values())
            return Status(run, is_live, len(own.waiting), oldest, leases, len(own.payloads), workers)

    def drain(self, run: str) -> int:
        with self._server.changed:
            return 0 if self._server.runs.pop(run, None) is None else 1

    def close(self) -> None:
        pass


def _forget(run: _Run, ticket: str) -> None:
    for part in (run.waiting, run.leased, run.payloads):
        part.pop(ticket, None)
