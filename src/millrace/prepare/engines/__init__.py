"""Where tasks run. An engine is ``run(function, tasks) -> results in any order``; tasks are pure and may run twice.

A long task says ``alive()`` now and then: an engine that watches its workers knows by it that one has not hung, and
with the counts it gives how far it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

on_alive: Callable[[Mapping[str, int]], None] | None = None
"""Set by the engine where its tasks run."""


def alive(**counts: int) -> None:
    """Says that a task moves, and what it has done since it last said so: bytes read of files, documents, tokens."""
    if on_alive is not None:
        on_alive(counts)
