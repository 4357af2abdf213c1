"""What the resume tests share: a view whose samples say which they are, and whole runs over all ranks of a world."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import numpy as np
import pytest

import millrace as mr


@functools.cache
def view_of(n: int) -> mr.View:
    """n samples; x of sample i is [i]."""
    return mr.Blocks(mr.from_arrays({"tokens": np.arange(n + 1)}), length=1)


class Job:
    """A training job over all ranks of a world: started from a state or from nothing, run for some steps, saved."""

    def __init__(self, view: mr.View, *, world: int = 1, state: dict[str, Any] | None = None, **options: Any) -> None:
        options = {"device": "numpy", **options}
        self.feeds = [mr.Feed(view, rank=rank, world=world, **options) for rank in range(world)]
        if state is not None:
            kept = json.loads(json.dumps(state, allow_nan=False))  # what a checkpoint does to it
            for feed in self.feeds:
                feed.load_state_dict(kept)
                assert feed.state_dict() == state

    def run(self, steps: int | None = None) -> list[tuple[int, int]]:
        """(position, sample) of the next batches, all ranks together in the order of positions."""
        with_all = [list(itertools.islice(feed, steps)) for feed in self.feeds]
        assert len({len(batches) for batches in with_all}) == 1, "ranks differ in their number of batches"
        return [pair for batches in zip(*with_all, strict=True) for pair in one_step(batches)]

    @property
    def state(self) -> dict[str, Any]:
        """What every rank would save: the same."""
        states = [feed.state_dict() for feed in self.feeds]
        assert all(state == states[0] for state in states)
        return states[0]

    def close(self) -> None:
        for feed in self.feeds:
            feed.close()


def one_step(batches: tuple[mr.Batch, ...]) -> list[tuple[int, int]]:
    """The pairs of one global batch; the shares lie one after the other and hold what they say."""
    for batch in batches:
        assert np.array_equal(batch.x[batch.valid, 0], batch.samples[batch.valid])
        assert np.array_equal(batch.valid, batch.positions >= 0)
    positions, samples = (
        np.concatenate([getattr(b, name)[b.valid] for b in batches]) for name in ("positions", "samples")
    )
    assert np.array_equal(positions, np.arange(positions[0], positions[0] + len(positions)))
    return list(zip(positions.tolist(), samples.tolist(), strict=True))


@pytest.fixture(scope="session")
def numbers():
    return view_of


@pytest.fixture(scope="session")
def job():
    return Job
