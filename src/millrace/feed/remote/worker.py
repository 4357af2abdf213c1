"""Worker: leases tickets of a run, makes their batches by the same code as a local feed, and puts them into the queue.

It owns nothing that others need. Killed, its leases end and others do its work. Stopped and continued, what it puts late
changes nothing: the same batch is there, or nobody wants it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError, MillraceError, QueueError, ResumeMismatch, StoreError, StoreNotFound
from millrace.feed.batch import Batch
from millrace.feed.line import Line
from millrace.feed.make.compose import compose_make
from millrace.feed.make.program import Program
from millrace.feed.remote.copies import CheckedMake, Copies
from millrace.feed.remote.functions import check_functions
from millrace.feed.remote.payload import Stamp, pack
from millrace.feed.remote.record import REMEDY, Record, batch_of, functions_of
from millrace.feed.stages import Fallback, Make
from millrace.queues.protocol import Queue, QueueFull
from millrace.ragged import Array
from millrace.store.checked_copy import TRUST
from millrace.store.open import open_store
from millrace.store.store import Store
from millrace.view.spec import array_of_bytes, from_spec

PAUSE_S = 0.5  # while the queue does not answer, or is full
MAX_LINES = 8  # kept


class Functions(NamedTuple):
    """The user's part of the batches, as the command line of the worker names it."""

    decode: Any = None
    transform: Any = None
    seed: int = 0


class Maker(NamedTuple):
    """Makes the batches of one line."""

    line: Line
    stamp: Stamp
    make: Make[Batch]


class Lines:
    """The lines of a run, rebuilt from their records. ``makers(attempt)`` is None for a line that has ended."""

    def __init__(
        self,
        queue: Queue,
        run: str,
        functions: Functions,
        stores: Sequence[str],
        *,
        threads: int,
        trust: str = TRUST[0],
    ) -> None:
        self._queue, self._run, self._functions, self._threads = queue, run, functions, threads
        self._own, self._given = functions_of(functions), [open_store(path) for path in stores]
        self._copies = Copies(trust)
        self._stores: dict[str, Store] = {}
        self._makers: dict[str, Maker] = {}
        self._lock = threading.Lock()

    def maker(self, attempt: str, *, with_core: bool = True) -> Maker | None:
        with self._lock:
            if attempt not in self._makers or not with_core:
                data = self._queue.record(self._run, attempt)
                if data is None:
                    return None
                while len(self._makers) >= MAX_LINES:
                    del self._makers[next(iter(self._makers))]
                maker = self._rebuilt(attempt, Record.read(data), with_core)
                if maker is None:
                    return None
                self._makers[attempt] = maker
            return self._makers[attempt]

    def _rebuilt(self, attempt: str, record: Record, with_core: bool) -> Maker | None:
        """The maker of a record. What stands in it may be anything: what cannot be built is refused in words."""
        try:
            return self._build(attempt, record, with_core)
        except ResumeMismatch as error:
            raise ConfigError(f"the record of this run does not fit what lies beside it: {error}; {REMEDY}") from error
        except MillraceError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the record of this run cannot be used here: {type(error).__name__}: {error}; {REMEDY}"
            ) from error

    def _build(self, attempt: str, record: Record, with_core: bool) -> Maker | None:
        check_functions(record.functions, self._own)
        stores = {fingerprint: self._store(fingerprint, path) for fingerprint, path in record.stores.items()}
        copies = self._copies.of(stores.values(), record.view)
        found = {key: self._queue.array(self._run, key) for key in record.arrays}
        if any(data is None for data in found.values()):  # lost in a flush: the trainer puts them again
            return None
        arrays = {key: array_of_bytes(key, data or b"") for key, data in found.items()}
        line = record.line(from_spec(record.view, stores, arrays, allow_mixed_tokenizers=True))
        functions = self._functions._replace(seed=record.seed)
        program = Program.of(line) if with_core else None
        make: Make[Batch] = compose_make(line, functions, program, slots=self._threads + 1, in_threads=True)
        if copies:
            make = CheckedMake(make, line, copies)
        return Maker(line, record.stamp(self._run, attempt, line), make)

    def _store(self, fingerprint: str, path: str) -> Store:
        """Read-only, and with this fingerprint: one that was given, or that at the path of the record."""
        if fingerprint not in self._stores:
            remedy = "give --store PATH of a copy on this machine"
            for store in self._given:
                if (found := _pinned(store, fingerprint)) is not None:
                    return self._stores.setdefault(fingerprint, found)
            if self._given:
                given = ", ".join(f"{store.path} ({store.fingerprint})" for store in self._given)
                raise ConfigError(f"the run reads store {fingerprint}, and --store is {given}; {remedy}")
            try:
                found = _pinned(open_store(path), fingerprint)
            except StoreError as error:
                raise ConfigError(f"the store of the run cannot be opened here: {error}; {remedy}") from error
            if found is None:
                raise ConfigError(f"{path} is another store than that of the run, {fingerprint}; {remedy}")
            self._stores[fingerprint] = found
        return self._stores[fingerprint]


def _pinned(store: Store, fingerprint: str) -> Store | None:
    """The store, or its snapshot, of this fingerprint."""
    if store.fingerprint == fingerprint or store.manifest is None or store.path is None:
        return store if store.fingerprint == fingerprint else None
    try:
        return open_store(store.path, snapshot=fingerprint)
    except StoreNotFound:
        return None


class Worker:
    """Threads that work for a run until it ends."""

    def __init__(
        self,
        queue: Queue,
        run: str,
        maker: Callable[..., Maker | None],
        *,
        threads: int = 1,
        say: Callable[[str], None],
    ) -> None:
        self._queue, self._run, self._maker, self._threads, self._say = queue, run, maker, threads, say
        self.id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.num_made = self.num_bytes = 0
        self._began, self._held, self._lost = time.monotonic(), set[str](), set[str]()
        self._said: set[str] = set()
        self._has_seen_run = self.is_over = False
        self._failure: BaseException | None = None
        self._local = threading.local()

    def serve(self) -> None:
        """Works until the run ends. The calling thread renews leases."""
        threads = [
            threading.Thread(target=self._work, name=f"millrace-worker-{k}", daemon=True) for k in range(self._threads)
        ]
        for thread in threads:
            thread.start()
        try:
            self._watch(threads)
        finally:
            self.is_over = True
            with contextlib.suppress(MillraceError):  # its leases end by themselves
                self._queue.leave(self._run, self.id)
        if self._failure is not None:
            raise self._failure

    def _watch(self, threads: list[threading.Thread]) -> None:
        renewed = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            threads[0].join(0.1) if threads[0].is_alive() else time.sleep(0.05)
            if time.monotonic() - renewed > self._queue.lease_s / 3:
                renewed = time.monotonic()
                try:
                    self._lost.update(self._queue.renew(self._run, self.id, self._info(), sorted(self._held)))
                except MillraceError as error:
                    self._once(f"{error}; waiting for it")

    def _info(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._began
        host, pid, _ = self.id.split(":")
        return {"host": host, "pid": int(pid), "threads": self._threads, "made": self.num_made, "bytes": self.num_bytes,
                "seconds": round(seconds, 3)}  # fmt: skip

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _work(self) -> None:
        try:
            while not self.is_over:
                try:
                    state, ticket = self._queue.lease(self._run, self.id, self._info())
                except QueueError as error:
                    self._once(f"{error}; waiting for it")
                    time.sleep(PAUSE_S)
                    continue
                if state == "ended" and self._has_seen_run:
                    self.is_over = True
                elif state in ("absent", "ended"):
                    self._once(f"waiting for run {self._run} at {self._queue.name}")
                else:
                    self._has_seen_run = True
                    if ticket:
                        self._do(ticket)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self._failure = self._failure or error
            self.is_over = True

    def _do(self, ticket: str) -> None:
        self._held.add(ticket)
        try:
            maker = self._maker(ticket.split(":")[0])
            batch = None if maker is None else batch_of(maker.line, ticket)
            if maker is not None and batch is not None:
                self._put(ticket, self._payload(maker, ticket, batch))
            else:
                self._queue.put(self._run, self.id, ticket, None)
        except QueueError as error:  # the ticket is offered again
            self._once(f"{error}; waiting for it")
        finally:
            self._held.discard(ticket)
            self._lost.discard(ticket)

    def _payload(self, maker: Maker, ticket: str, batch: int) -> Any:
        """The payload, or None if the batch cannot be made here: the trainer then makes it, and meets the error itself."""
        try:
            try:
                made = maker.make.make(batch)
            except Fallback:
                again = self._maker(ticket.split(":")[0], with_core=False)
                if again is None:
                    return None
                made = again.make.make(batch)
            first = int(ticket.split(":")[1])
            return pack(made, maker.stamp, first, self._buffer, compress=self._queue.compress)
        except Exception as error:  # noqa: BLE001 - of the user's function too
            self._once(f"batch {batch} is left to the trainer: {error}")
            return None

    def _buffer(self, size: int) -> Array:
        """Memory of this thread, used again for each payload."""
        known: Array | None = getattr(self._local, "buffer", None)
        if known is None or len(known) < size:
            known = self._local.buffer = np.empty(size + size // 4, np.uint8)
        return known[:size]

    def _put(self, ticket: str, payload: Any) -> None:
        while not self.is_over and ticket not in self._lost:
            try:
                if self._queue.put(self._run, self.id, ticket, payload):
                    self.num_made += 1
                    self.num_bytes += len(payload)
                return
            except QueueFull as error:
                self._once(f"{error}; waiting until the trainer has taken some batches")
                time.sleep(PAUSE_S)
