"""Where tasks run; engine.py says what a preparation asks of an engine.

A long task calls ``alive()`` now and then. Its engine then knows that the task has not hung, and how far it is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

EVERY_S = 1.0  # seconds between two reports of a task
_listener = threading.local()  # of the task that this thread runs


def alive(**counts: int) -> None:
    """Reports that a task moves, and what it has done since its last report: bytes read, documents, tokens."""
    report = getattr(_listener, "report", None)
    if report is not None:
        report(counts)


@contextmanager
def listening(report: Callable[[Mapping[str, int]], None]) -> Iterator[None]:
    """Engines run a task inside: ``report`` gets the sums of its counts, once a second at most."""
    sums, last_s = Counter[str](), time.monotonic()

    def add(counts: Mapping[str, int]) -> None:
        nonlocal last_s
        sums.update(counts)
        if time.monotonic() - last_s >= EVERY_S:
            last_s = time.monotonic()
            report(dict(sums))

    _listener.report = add
    try:
        yield
    finally:
        _listener.report = None
