"""Functions of a user: filters of texts and records, and transforms of tables at once, some of which fail on one input.

While the file that ``$STUCK`` names is there, ``slow`` and ``held`` do not end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _is_bad(given: Any) -> bool:
    """Whether a text, a record, or a table with some rows, is the one to fail on."""
    if isinstance(given, str):
        return "document 7 of the second" in given
    if isinstance(given, dict):
        return 77.0 in given["x"].tolist()
    return 77.0 in given["x"].to_pylist()


def _result(given: Any) -> Any:
    return True if isinstance(given, (str, dict)) else given


def _poison(action: Callable[[], Any]) -> Callable[[Any], Any]:
    def function(given: Any) -> Any:
        if _is_bad(given):
            action()
        return _result(given)

    return function


def _raise(error: BaseException) -> None:
    raise error


raises = _poison(lambda: _raise(ValueError("no such word")))
leaves = _poison(lambda: _raise(SystemExit(5)))
exits = _poison(lambda: os._exit(3))
crashes = _poison(lambda: ctypes.string_at(0))
killed = _poison(lambda: os.kill(os.getpid(), signal.SIGKILL))


def dies_once(given: Any) -> Any:
    """The first attempt at the bad input kills its process."""
    died = Path(os.environ["STUCK"]).with_name("died")
    if _is_bad(given) and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return _result(given)


def slow(given: Any) -> Any:
    if len(given):  # not for the table without rows, by which columns are found
        time.sleep(0.005)
    return held(given)


def held(given: Any) -> Any:
    while len(given) and os.path.exists(os.environ.get("STUCK", "")):
        time.sleep(0.02)
    return _result(given)
