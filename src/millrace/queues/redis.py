"""A queue on a Redis or Valkey server. Every step that must be whole is one script; payloads have their own connection."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from millrace.errors import ConfigError, QueueError
from millrace.queues import scripts
from millrace.queues.address import Address, check_exposure, read_password
from millrace.queues.answers import answer_error, unreachable
from millrace.queues.protocol import Held, Lease, Offer, Seen, Status, taken
from millrace.queues.wire import PayloadConnection

VERSION = (6, 2)
KINDS = "rdfetlhwiq"  # one key each, as scripts.py describes them
TLS_FILES = {"ca_certs": "ca", "certfile": "cert", "keyfile": "key"}
WAIT_S = 0.5  # of await_ready and lease
FOREIGN = "surrogateescape"  # tickets come back to the server with the bytes they have there, whoever wrote them


class RedisQueue:
    """Tickets and payloads on a server. Threads may share it."""

    def __init__(self, address: Address) -> None:
        password = read_password()
        check_exposure(address, password)
        self._address, self._password, self.name = address, password, str(address)
        self.deadline_s, self.lease_s = address.seconds["deadline_s"], address.seconds["lease_s"]
        self.compress = address.compress
        self._alive, self._ttl, self._lease = (
            int(address.seconds[name] * 1000) for name in ("alive_s", "ttl_s", "lease_s")
        )
        timeout = address.seconds["timeout_s"]
        self._wait_s = min(WAIT_S, timeout / 2)
        tls: dict[str, Any] = {}
        if address.is_tls:
            tls = {"ssl": True, **{f"ssl_{name}": address.files.get(file) for name, file in TLS_FILES.items()}}
        # One retry, for connections that a restart has cut: every request may be repeated.
        self._client: Any = redis.Redis(
            host=address.host, port=address.port, db=address.db, username=address.username, password=password,
            socket_timeout=timeout, socket_connect_timeout=timeout, socket_keepalive=True, retry=Retry(NoBackoff(), 1),
            protocol=2, encoding_errors=FOREIGN, **tls,
        )  # fmt: skip
        self._scripts = {
            name: self._client.register_script(getattr(scripts, name))
            for name in ("OFFER", "CLOSE_LINES", "END", "LEASE", "RENEW", "DONE", "LEAVE")
        }
        self._local, self._wires = threading.local(), list[PayloadConnection]()

    def __repr__(self) -> str:
        return f"<RedisQueue {self.name}>"

    @contextlib.contextmanager
    def _asking(self) -> Iterator[Any]:
        try:
            yield self._client
        except (redis.exceptions.AuthenticationError, redis.exceptions.ResponseError) as error:
            raise answer_error(self._address, str(error)) from error
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
            raise unreachable(self._address, error) from error
        except redis.exceptions.RedisError as error:
            raise QueueError(f"{self.name}: {type(error).__name__}: {error}") from error

    def _run(self, script: str, run: str, *arguments: Any) -> Any:
        with self._asking():
            return self._scripts[script](keys=[f"r:{run}"], args=arguments)

    @property
    def _wire(self) -> PayloadConnection:
        if not hasattr(self._local, "wire"):
            self._local.wire = PayloadConnection(self._address, self._password)
            self._wires.append(self._local.wire)
        return self._local.wire  # type: ignore[no-any-return]

    def check(self, num_bytes: int) -> None:
        with self._asking() as client:
            facts = client.info()
        found = str(facts.get("redis_version", "0"))
        if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < VERSION:
            raise ConfigError(f"{self.name} is Redis {found}; expected 6.2 or later: upgrade it")
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise ConfigError(
                f"{self.name} has maxmemory-policy {policy}, which deletes batches; set it: CONFIG SET maxmemory-policy noeviction"
            )
        free = facts["maxmemory"] - facts["used_memory"]
        if facts["maxmemory"] and free < num_bytes:
            raise ConfigError(
                f"{self.name} has {free:,} bytes free of its maxmemory {facts['maxmemory']:,}, and a window of batches takes "
                f"{num_bytes:,}; raise maxmemory, or lower depth= or the batch"
            )

    def offer(self, run: str, link: str, folder: str, offers: Sequence[Offer]) -> Seen:
        threads, ready = 0, []
        for offer in offers or [Offer("")]:
            state, count, *found = self._run(
                "OFFER", run, link, folder, self._alive, self._ttl, offer.attempt, offer.record, len(offer.unwanted),
                *offer.unwanted, *offer.wanted,
            )  # fmt: skip
            if state == b"taken":
                raise taken(run, count.decode(errors="replace"))
            threads = count
            ready += [_text(ticket) for ticket in found]
        return Seen(threads, ready)

    def close_lines(self, run: str, attempts: Sequence[str], tickets: Sequence[str]) -> None:
        self._run("CLOSE_LINES", run, len(attempts), self._ttl, *attempts, *tickets)

    def end(self, run: str, link: str) -> None:
        self._run("END", run, link, self._alive, self._ttl)

    def await_ready(self, run: str, attempt: str) -> list[str]:
        with self._asking() as client:
            found = client.blpop([f"n:{run}:{attempt}"], self._wait_s)
            if found is None:
                return []
            more = client.lpop(f"n:{run}:{attempt}", 4096) or []
            return [_text(ticket) for ticket in (found[1], *more) if ticket]

    def get(self, run: str, ticket: str, memory: Callable[[int], Any]) -> Any:
        return self._wire.get(f"b:{run}:{ticket}".encode(errors=FOREIGN), memory)

    def put_array(self, run: str, key: str, data: Any) -> None:
        self._wire.set_new(f"a:{run}:{key}".encode(), data, self._ttl)

    def has_arrays(self, run: str, keys: Sequence[str]) -> bool:
        with self._asking() as client:
            return len(keys) == sum(int(client.pexpire(f"a:{run}:{key}", self._ttl)) for key in keys)

    def lease(self, run: str, worker: str, info: dict[str, Any]) -> Lease:
        found = self._leased(run, worker, info)
        if found.state in ("idle", "absent"):
            with self._asking() as client:
                client.blpop([f"q:{run}"], self._wait_s)
            found = self._leased(run, worker, info)
        return found

    def _leased(self, run: str, worker: str, info: dict[str, Any]) -> Lease:
        state, ticket = self._run("LEASE", run, worker, json.dumps(info), self._lease, self._alive, self._ttl)
        return Lease(_text(state), _text(ticket))

    def renew(self, run: str, worker: str, info: dict[str, Any], tickets: Sequence[str]) -> list[str]:
        lost = self._run("RENEW", run, worker, json.dumps(info), self._lease, self._ttl, *tickets)
        return [_text(ticket) for ticket in lost]

    def put(self, run: str, worker: str, ticket: str, payload: Any) -> bool:
        key = f"b:{run}:{ticket}".encode(errors=FOREIGN)
        is_new = payload is not None and self._wire.set_new(key, payload, self._ttl)
        self._run("DONE", run, ticket, self._ttl)
        return is_new

    def leave(self, run: str, worker: str) -> None:
        self._run("LEAVE", run, worker)

    def record(self, run: str, attempt: str) -> bytes | None:
        with self._asking() as client:
            return client.hget(f"d:{run}", attempt)  # type: ignore[no-any-return]

    def array(self, run: str, key: str) -> bytes | None:
        found = self._wire.get(f"a:{run}:{key}".encode(), bytearray)
        return None if found is None else bytes(found)

    def runs(self) -> list[str]:
        with self._asking() as client:
            return sorted(
                {key[2:].decode(errors="replace") for kind in "rw" for key in client.scan_iter(f"{kind}:*", 1000)}
            )

    def status(self, run: str) -> Status:
        with self._asking() as client:
            pipe = client.pipeline(transaction=False)
            pipe.time()
            for kind in "tlwr":
                pipe.zrange(f"{kind}:{run}", 0, -1, withscores=True)
            for kind in "hi":
                pipe.hgetall(f"{kind}:{run}")
            (seconds, micros), waiting, leased, workers, links, holders, infos = pipe.execute()
            ready = sum(1 for _ in client.scan_iter(f"b:{run}:*", 1000))
        now = seconds * 1000 + micros / 1000
        return Status(
            run, any(now - at < self._alive for _, at in links), len(waiting),
            None if not waiting else max(0.0, now - min(at for _, at in waiting)) / 1000,
            [Held(_shown(ticket), _shown(holders.get(ticket, b" ?").partition(b" ")[2]), (at - now) / 1000)
             for ticket, at in leased],
            ready,
            {_shown(name): {**_info(infos.get(name)), "seen_s": max(0.0, now - at) / 1000}
             for name, at in workers},
        )  # fmt: skip

    def drain(self, run: str) -> int:
        with self._asking() as client:
            keys = [f"{kind}:{run}".encode() for kind in KINDS]
            keys += [key for kind in "bna" for key in client.scan_iter(f"{kind}:{run}:*", 1000)]
            return sum(client.unlink(*keys[begin : begin + 1000]) for begin in range(0, len(keys), 1000))

    def close(self) -> None:
        for wire in self._wires:
            wire.close()
        with contextlib.suppress(Exception):
            self._client.close()


def _text(data: bytes) -> str:
    return data.decode(errors=FOREIGN)


def _shown(data: bytes) -> str:
    return data.decode(errors="replace")


def _info(data: bytes | None) -> dict[str, Any]:
    """What a worker says about itself: plain values only."""
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, str) or (isinstance(v, (int, float)) and abs(v) < 1e15)}
