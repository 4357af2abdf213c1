"""Tasks for the contract of engines; workers import them, wherever they run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from millrace.errors import StoreCorrupt
from millrace.prepare import engines


def double(task: int) -> int:
    return 2 * task


def count(task: int) -> int:
    """Reports every step."""
    engines.EVERY_S = 0.0
    for _ in range(task):
        engines.alive(read=1)
    return task


def wait_for(path: str) -> str:
    """Ends once the file is there; ``""`` waits for nothing."""
    while path and not os.path.exists(path):
        time.sleep(0.005)
    return path


def mark(path: str) -> str:
    Path(path).touch(exist_ok=False)
    return path


def refuse(task: int) -> int:
    if task == 3:
        raise StoreCorrupt("task 3 is damaged", path="some/path", column="values", expected=7, found=8)
    return task


def stumble(task: int) -> int:
    if task == 3:
        raise LookupError("no such word")
    return task


def process_id(task: int) -> int:
    return os.getpid()


def die_once(path: str) -> str:
    """The first attempt kills its process."""
    if path and not os.path.exists(path):
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return path


def die(task: int) -> int:
    if task == 3:
        os._exit(3)
    return task
