"""Proves exact resume on a user's view: compares a run without stops to runs that stop and restart."""

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


class Delivery(NamedTuple):
    """One sample as the loop got it."""

    position: int
    sample: int
    content: int  # hash of its bytes
    draw: float  # a random number of its own


def prove_resume(
    view: View, *, batch: int, seed: int, steps: int, trials: int, trial_seed: int = 0
) -> list[dict[str, Any]]:
    """Tries ``trials`` random histories; each has its ``legs`` and the first ``difference``, or None."""
    expected, _ = _leg(view, seed, {"steps": steps, "batch": batch, "world": 1, "depth": 1, "workers": 1}, None)
    chance = random.Random(trial_seed)
    return [_trial(view, seed, batch, expected, chance) for _ in range(trials)]


def _trial(view: View, seed: int, batch: int, expected: list[Delivery], chance: random.Random) -> dict[str, Any]:
    """One history: legs of random length, world, batch, depth and threads, with a saved state between them."""
    got: list[Delivery] = []
    legs: list[dict[str, int]] = []
    state: str | None = None
    while len(got) < len(expected):
        size = max(1, chance.choice((batch, batch // 2, batch * 2, batch * 3, chance.randint(1, 2 * batch))))
        left = -(-(len(expected) - len(got)) // size)
        if not legs and left < 2:
            continue  # every history has a stop
        legs.append({
            "steps": left if len(legs) + 1 == MAX_LEGS else chance.randint(1, left if legs else left - 1),
            "batch": size,
            "world": chance.choice([world for world in WORLDS if world <= size]),
            "depth": chance.randint(1, 6),
            "workers": chance.randint(1, 3),
        })  # fmt: skip
        deliveries, states = _leg(view, seed, legs[-1], state)
        if len(set(states)) != 1:
            return {"legs": legs, "difference": f"ranks disagree on the state: {sorted(set(states))}"}
        got, state = got + deliveries, states[0]
    return {"legs": legs, "difference": _difference(expected, got)}


def _leg(view: View, seed: int, leg: dict[str, int], state: str | None) -> tuple[list[Delivery], list[str]]:
    """What all ranks of one leg got, in the order of the global batches, and the state of each at its end."""
    batches: list[list[Delivery]] = [[] for _ in range(leg["steps"])]
    options: dict[str, Any] = {name: value for name, value in leg.items() if name != "steps"}
    states = []
    for rank in range(leg["world"]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a proof has batches of all sizes
            feed = Feed(view, seed=seed, rank=rank, device="numpy", transform=_draw, **options)
        if state is not None:
            feed.load_state_dict(json.loads(state))
        with feed:
            for step, batch in zip(range(leg["steps"]), feed, strict=False):
                batches[step] += _deliveries(batch)
        states.append(json.dumps(feed.state_dict()))
    return [delivery for batch in batches for delivery in batch], states


def _draw(batch: Batch, rng: Any) -> Batch:
    batch["millrace_draw"] = rng.uniform()
    return batch


def _deliveries(batch: Batch) -> list[Delivery]:
    assert batch.positions is not None
    assert batch.samples is not None
    draws = batch.pop("millrace_draw").tolist()
    contents = [_hash(batch, row) for row in range(len(draws))]
    return list(map(Delivery, batch.positions.tolist(), batch.samples.tolist(), contents, draws))


def _hash(batch: Batch, row: int) -> int:
    state = xxhash.xxh3_64()
    for name, value in batch.items():
        item = value[row]
        state.update(name.encode())
        state.update(item.encode() if isinstance(item, str) else np.ascontiguousarray(item).tobytes())
    return state.intdigest()


def _difference(expected: list[Delivery], got: list[Delivery]) -> str | None:
    """The first difference between two histories."""
    for number, (wanted, found) in enumerate(zip(expected, got, strict=False)):
        if wanted != found:
            return f"delivery {number} was {found}, expected {wanted}"
    return None if len(got) >= len(expected) else f"ended after {len(got)} of {len(expected)} samples"
