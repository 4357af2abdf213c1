"""Where tasks run. An engine is ``run(function, tasks) -> results in any order``; tasks are pure and may run twice.

A long task says ``alive()`` now and then: an engine that watches its workers knows by it that one has not hung.
"""

from __future__ import annotations

from collections.abc import Callable

on_alive: Callable[[], None] | None = None
"""Set by the engine in its workers."""


def alive() -> None:
    if on_alive is not None:
        on_alive()
