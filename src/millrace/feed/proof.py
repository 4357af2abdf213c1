"""Proof of exact resume on a user's own view: an uninterrupted run against runs that stop and restart."""

from __future__ import annotations

import json
import random
import warnings
from typing import Any, NamedTuple

import numpy as np
import xxhash

from millrace.feed.batch import Batch
from millrace.feed.feed import Feed
from millrace.view.view import View

WORLDS = (1, 2, 3, 4, 5, 8)
MAX_LEGS = 5


class Seen(NamedTuple):
    """One sample as the loop got it."""

    position: int
    sample: int
    content: int  # hash of its bytes
    draw: float  # a random number of its own


def prove_resume(
    view: View, *, batch: int, seed: int, steps: int, trials: int, trial_seed: int = 0
) -> list[dict[str, Any]]:
    """Tries ``trials`` random histories; each tells its legs and the first difference, or None."""
    expected, _ = _leg(view, seed, {"steps": steps, "batch": batch, "world": 1, "depth": 1, "workers": 1}, None)
    chance = random.Random(trial_seed)
    return [_trial(view, seed, batch, expected, chance) for _ in range(trials)]


def _trial(view: View, seed: int, batch: int, expected: list[Seen], chance: random.Random) -> dict[str, Any]:
    """One history: legs of random length, world, batch, depth and threads, with a saved state between them."""
    found: list[Seen] = []
    legs: list[dict[str, int]] = []
    state: str | None = None
    while len(found) < len(expected):
        size = max(1, chance.choice((batch, batch // 2, batch * 2, batch * 3, chance.randint(1, 2 * batch))))
        left = -(-(len(expected) - len(found)) // size)
        if not legs and left < 2:
            continue  # every history has a stop
        most = left if legs else left - 1
        legs.append({
            "steps": left if len(legs) + 1 == MAX_LEGS else chance.randint(1, most),
            "batch": size,
            "world": chance.choice([world for world in WORLDS if world <= size]),
            "depth": chance.randint(1, 6),
            "workers": chance.randint(1, 3),
        })  # fmt: skip
        got, states = _leg(view, seed, legs[-1], state)
        if len(set(states)) != 1:
            return {"legs": legs, "difference": f"ranks disagree on the state: {sorted(set(states))}"}
        found, state = found + got, states[0]
    return {"legs": legs, "difference": _difference(expected, found)}


def _leg(view: View, seed: int, leg: dict[str, int], state: str | None) -> tuple[list[Seen], list[str]]:
    """What all ranks of one leg got, in the order of the global batches, and the state of each at its end."""
    batches: list[list[Seen]] = [[] for _ in range(leg["steps"])]
    states = []
    for rank in range(leg["world"]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # batches of a proof are of all sizes
            feed = Feed(
                view, batch=leg["batch"], seed=seed, rank=rank, world=leg["world"], device="numpy", transform=_draw,
                depth=leg["depth"], workers=leg["workers"],
            )  # fmt: skip
        if state is not None:
            feed.load_state_dict(json.loads(state))
        with feed:
            for step, batch in zip(range(leg["steps"]), feed, strict=False):
                batches[step] += _seen(batch)
        states.append(json.dumps(feed.state_dict()))
    return [seen for batch in batches for seen in batch], states


def _draw(batch: Batch, rng: Any) -> Batch:
    batch["millrace_draw"] = rng.uniform()
    return batch


def _seen(batch: Batch) -> list[Seen]:
    assert batch.positions is not None
    assert batch.samples is not None
    draws = batch.pop("millrace_draw").tolist()
    contents = [_hash(batch, row) for row in range(len(draws))]
    return [
        Seen(*entry) for entry in zip(batch.positions.tolist(), batch.samples.tolist(), contents, draws, strict=True)
    ]


def _hash(batch: Batch, row: int) -> int:
    state = xxhash.xxh3_64()
    for name, value in batch.items():
        item = value[row]
        state.update(name.encode())
        state.update(item.encode() if isinstance(item, str) else np.ascontiguousarray(item).tobytes())
    return state.intdigest()


def _difference(expected: list[Seen], found: list[Seen]) -> str | None:
    """The first place where the two histories differ."""
    for place, (want, got) in enumerate(zip(expected, found, strict=False)):
        if want != got:
            return f"delivery {place} was {got}, expected {want}"
    return None if len(found) >= len(expected) else f"ended after {len(found)} of {len(expected)} samples"
