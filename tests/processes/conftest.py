"""What the tests of worker processes share: the modules that workers import, views, and whether two batches are equal."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import millrace as mr

sys.path.insert(0, str(Path(__file__).parent / "modules"))


def feed_processes() -> list[psutil.Process]:
    """Fork servers and workers of this process: other tests may have left children of other kinds."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "millrace.feed.processes.worker" in str(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def view_of(n: int = 40) -> mr.View:
    """n samples; x of sample i is [i]."""
    return mr.Blocks(mr.from_arrays({"tokens": np.arange(n + 1)}), length=1)


def plain(value: Any) -> Any:
    """A column as something that compares: its type, shape and bytes."""
    if isinstance(value, mr.Ragged):
        return "ragged", plain(value.values), plain(value.offsets)
    if hasattr(value, "detach"):
        return str(value.dtype), tuple(value.shape), value.contiguous().view(-1).tolist()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.dtype.str, value.shape, value.tobytes()
    return (type(value), value.tolist() if isinstance(value, np.ndarray) else value)


def described(batch: mr.Batch) -> Any:
    marks = [getattr(batch, name).tolist() for name in ("positions", "samples", "valid")]
    return marks, {name: plain(value) for name, value in dict.items(batch)}


@pytest.fixture
def feed_of() -> Iterator[Callable[..., mr.Feed]]:
    """feed_of(transform, **options): a feed, closed at the end."""
    feeds = []

    def make(transform: Any = None, *, n: int = 40, **options: Any) -> mr.Feed:
        options = {"batch": 8, "seed": 3, "device": "numpy", "processes": True, "workers": 2, **options}
        feeds.append(mr.Feed(view_of(n), transform=transform, **options))
        return feeds[-1]

    yield make
    for feed in feeds:
        feed.close()


@pytest.fixture
def contents() -> Callable[..., list[Any]]:
    """contents(feed, count): its next batches, as something that compares."""

    def take(feed: mr.Feed, count: int | None = None) -> list[Any]:
        return [described(batch) for batch in itertools.islice(feed, count)]

    return take
