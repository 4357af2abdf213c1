"""Pace: how long a request to one store takes and how fast bytes come, from its own downloads; it decides how to read.

The rule: a few samples of a large file come as blocks of 4 MiB, until blocks of that file would have taken as long as all
of it; from then on files come whole. So reading never takes more than twice the time of the better way.
"""

from __future__ import annotations

from statistics import median

from millrace.store.layout import BLOCK_BYTES

LATENCY_S, BYTES_PER_S = 0.02, 100e6  # until something was measured
SMALL_BYTES = 64 << 10  # a request for less measures the latency
MEASURED = 9  # downloads that the rate is taken from: it is measured once for a store


class Pace:
    """Of one store. Any thread may use it."""

    def __init__(self) -> None:
        self._latency_s: float | None = None
        self._rates: list[float] = []

    def note(self, num_bytes: int, seconds: float) -> None:
        """One request and what it brought."""
        if num_bytes <= SMALL_BYTES:
            self._latency_s = seconds if self._latency_s is None else min(seconds, self._latency_s)
        elif len(self._rates) < MEASURED:
            self._rates.append(num_bytes / max(seconds - self.latency_s, seconds / 10, 1e-6))

    @property
    def latency_s(self) -> float:
        return LATENCY_S if self._latency_s is None else self._latency_s

    @property
    def bytes_per_s(self) -> float:
        """Of one download; several run side by side."""
        return median(self._rates) if self._rates else BYTES_PER_S

    def seconds(self, requests: int, num_bytes: int) -> float:
        return requests * self.latency_s + num_bytes / self.bytes_per_s

    def prefers_blocks(self, blocks: int, num_bytes: int, files: int = 1) -> bool:
        """Whether so many blocks come sooner than files of so many bytes."""
        return self.seconds(blocks, blocks * BLOCK_BYTES) < self.seconds(files, num_bytes)

    def __str__(self) -> str:
        return f"{self.latency_s * 1000:.3g} ms a request, {self.bytes_per_s / 1e6:,.0f} MB/s a download"
