"""Calls of a library that answers no signals: in the main thread, Ctrl-C would wait for a server that is silent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

GRACE_S = 1.0  # after Ctrl-C, so that a call hardly ever ends while the interpreter does
NAME = "millrace-call"
Result = TypeVar("Result")


def interruptible(call: Callable[[], Result]) -> Result:
    """The result of a call. The main thread lets another one make it, and can be interrupted meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was asked for
            answers.put((None, error))

    threading.Thread(target=run, name=NAME, daemon=True).start()
    try:
        result, error = answers.get()
    except BaseException:
        with contextlib.suppress(Empty):
            answers.get(timeout=GRACE_S)
        raise
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def each(items: Iterable[Result]) -> Iterator[Result]:
    """The items, every one by such a call."""
    iterator, end = iter(items), object()
    while (item := interruptible(lambda: next(iterator, end))) is not end:
        yield item  # type: ignore[misc]
