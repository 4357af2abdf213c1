"""How many cores, servers and bytes a second a training needs: arithmetic, and a simulator that checks it."""

from __future__ import annotations

import heapq
import math
from dataclasses import asdict, dataclass
from typing import Any

from millrace.queues.protocol import MOST_AHEAD

SERVER_BYTES_PER_S = (
    500e6  # batches that one Redis carries in and out: measured with 0.5 MiB on 2 cores, see benchmarks
)
SERVER_BATCHES_PER_S = 5000.0  # however small they are: each is a handful of requests
RUN_KEYS = 9  # links, records, folder, tickets, leases, holders, workers (2), wake: one key each, whatever they hold
BLOCK_BYTES = 4 << 20  # of the store's format: each has a hash of 8 bytes
SHARD_ROW_BYTES = 4 * 8  # of shards.bin: split, number, records, tokens
MANIFEST_BYTES = 4096  # of store.json at most, names of source files apart


@dataclass(frozen=True)
class Need:
    """A training: ``batch_bytes`` is what one GPU takes each step, ``make_ms`` what a core needs to make that."""

    gpus: int
    step_ms: float
    batch_bytes: int
    make_ms: float
    depth: int = 4
    gpus_per_host: int = 8
    cores_per_host: int = 0  # that are free beside the training

    @property
    def batches_per_s(self) -> float:
        return self.gpus * 1000 / self.step_ms

    @property
    def cores(self) -> float:
        """Cores that are always busy making batches."""
        return self.batches_per_s * self.make_ms / 1000

    @property
    def bytes_per_s(self) -> float:
        """Into the servers from workers, and once more out of them to trainers."""
        return self.batches_per_s * self.batch_bytes

    @property
    def server_rate(self) -> float:
        """Batches a second that one server carries."""
        return min(SERVER_BYTES_PER_S / self.batch_bytes, SERVER_BATCHES_PER_S)

    @property
    def servers(self) -> int:
        return math.ceil(self.batches_per_s / self.server_rate)

    @property
    def ahead(self) -> int:
        """Tickets of one rank at a time: ``depth``, or one for each thread of the workers of its server if those are more."""
        return max(self.depth, min(math.ceil(self.remote_cores / self.servers), MOST_AHEAD))

    @property
    def tickets(self) -> int:
        """Tickets at a time, over all ranks. Each waits, is leased, or is a payload, however long the run is."""
        return self.gpus * self.ahead

    @property
    def leases(self) -> int:
        """Tickets that workers make right now: one each."""
        return min(self.remote_cores, self.tickets)

    @property
    def keys(self) -> int:
        """Most keys of all servers: one per payload, one per rank for what became ready, and those of the run."""
        return self.tickets + self.gpus + self.servers * RUN_KEYS

    @property
    def local_cores(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_host) * self.cores_per_host

    @property
    def remote_cores(self) -> int:
        """Cores on other machines; 0 if those beside the GPUs are enough."""
        return max(0, math.ceil(self.cores - self.local_cores))

    def facts(self) -> dict[str, Any]:
        return {
            **asdict(self), "batches_per_s": self.batches_per_s, "cores": self.cores, "local_cores": self.local_cores,
            "remote_cores": self.remote_cores, "bytes_per_s": self.bytes_per_s, "servers": self.servers,
            "tickets": self.tickets, "leases": self.leases, "keys": self.keys, "server_bytes": self.tickets * self.batch_bytes,
        }  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """A whole training in numbers, and the store of its text: tickets, shards, and the tables that name and check them."""

    tokens: float
    batch_tokens: int  # of one GPU in one step
    document_tokens: int = 1000  # on average
    token_bytes: int = 2
    shard_tokens: int = 10_000_000  # as in `prepare text`

    @property
    def tickets(self) -> int:
        return math.ceil(self.tokens / self.batch_tokens)

    @property
    def shards(self) -> int:
        return math.ceil(self.tokens / self.shard_tokens)

    @property
    def shard_table_bytes(self) -> int:
        return self.shards * SHARD_ROW_BYTES

    @property
    def hash_table_bytes(self) -> int:
        last = self.tokens - (self.shards - 1) * self.shard_tokens
        return 8 * ((self.shards - 1) * self._blocks(self.shard_tokens) + self._blocks(last))

    @property
    def store_bytes(self) -> int:
        last = self.tokens - (self.shards - 1) * self.shard_tokens
        return (self.shards - 1) * sum(self._files(self.shard_tokens)) + sum(self._files(last))

    def _files(self, tokens: float) -> list[int]:
        """Bytes of the files of a shard: offsets, tokens, and per document source, offset and hash."""
        documents = math.ceil(tokens / self.document_tokens)
        return [8 * (documents + 1), math.ceil(tokens) * self.token_bytes, 4 * documents, 8 * documents, 16 * documents]

    def _blocks(self, tokens: float) -> int:
        return sum(math.ceil(num_bytes / BLOCK_BYTES) for num_bytes in self._files(tokens))

    def facts(self) -> dict[str, Any]:
        return {
            "tickets": self.tickets, "shards": self.shards, "store_bytes": self.store_bytes,
            "manifest_bytes": MANIFEST_BYTES, "shard_table_bytes": self.shard_table_bytes,
            "hash_table_bytes": self.hash_table_bytes,
        }  # fmt: skip


def simulated_rate(need: Need, workers: int, servers: int, steps: int = 200) -> float:
    """Batches a second over all ranks, event by event: ranks want, workers make, servers carry, ranks step.

    Every rank has ``depth`` tickets out. It steps when its next batch is there, and each step lets it offer one more.
    """
    make_s, carry_s, step_s = need.make_ms / 1000, 1 / need.server_rate, need.step_ms / 1000
    free_workers, free_servers = [0.0] * workers, [0.0] * servers
    offers = [(0.0, number, rank) for number in range(need.depth) for rank in range(need.gpus)]
    heapq.heapify(offers)
    ready: list[list[float]] = [[] for _ in range(need.gpus)]
    clocks, done, end = [0.0] * need.gpus, [0] * need.gpus, 0.0
    for _ in range(steps * need.gpus):
        offered, number, rank = heapq.heappop(offers)
        made = max(offered, heapq.heappop(free_workers)) + make_s
        heapq.heappush(free_workers, made)
        carried = max(made, heapq.heappop(free_servers)) + carry_s
        heapq.heappush(free_servers, carried)
        ready[rank].append(carried)
        clocks[rank] = max(clocks[rank], ready[rank][done[rank]]) + step_s
        done[rank] += 1
        heapq.heappush(offers, (clocks[rank] - step_s, number + need.depth, rank))  # taken when its step began
        end = max(end, clocks[rank])
    return sum(done) / end
