"""The journal of a run: one line in ``RUN/feed.jsonl`` per start of its feed. ``millrace explain RUN`` reads it.

Step s (from 1) of a run belongs to the last start whose first step is not after s.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.errors import ConfigError, StoreCorrupt
from millrace.feed.budget import Budget, BudgetLine
from millrace.order.orders import Order
from millrace.ragged import Int64s
from millrace.store import platform
from millrace.store.plain_file import open_file, read_plain
from millrace.store.strict_json import sealed, unsealed
from millrace.view.spec import view_arrays
from millrace.view.view import View

if TYPE_CHECKING:
    from millrace.feed.feed import Feed
    from millrace.feed.line import Line

NAME = "feed.jsonl"
FIELDS = {"step", "position", "batch", "stop", "stores", "view", "order"}
MORE_FIELDS = {"seed", "last", "bin", "max_rows"}  # that a line may have too


def note_start(run: str | os.PathLike[str], feed: Feed, line: Line) -> None:
    """Adds a line when a feed of a run starts; only rank 0 does."""
    if line.rank != 0:
        return
    folder = Path(run)
    with platform.writing(folder / NAME):
        platform.make_dir(folder)
        entry: dict[str, Any] = {
            "step": _steps_before(folder, feed) + 1,  # a pass that the loop left took fewer steps
            "position": line.start,
            "batch": feed.batch,
            "stop": line.stop,
            "seed": feed.seed,
            "stores": {store.fingerprint: store.path for store in feed.view.stores},
            "view": feed.view.spec(),
            "order": feed.order.spec(),
        }
        for key, ids in view_arrays(feed.view).items():
            if not (folder / f"ids-{key}.npy").exists():
                np.save(folder / f"ids-{key}.tmp.npy", ids)
                platform.rename(folder / f"ids-{key}.tmp.npy", folder / f"ids-{key}.npy")
        if feed.last == "drop":
            entry["last"] = feed.last
        if isinstance(line, BudgetLine):
            entry |= {"bin": line.first_bin, "max_rows": line.budget.max_rows}
        with open(folder / NAME, "a+b", buffering=0) as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # a kill may have left a part of a line
            platform.write(file.fileno(), json.dumps(sealed(entry)).encode() + b"\n", folder / NAME)


def arrays(run: str | os.PathLike[str]) -> dict[str, Any]:
    """The ids of subsets that a run used, by hash, for ``from_spec``."""
    paths = [path for path in sorted(Path(run).glob("ids-*.npy")) if not path.name.endswith(".tmp.npy")]
    ids = {}
    try:
        for path in paths:
            with open_file(str(path), follow=True) as (fd, _), open(fd, "rb", closefd=False) as file:
                ids[path.stem.removeprefix("ids-")] = np.load(file)
        return ids
    except (StoreCorrupt, ValueError, EOFError) as error:
        raise ConfigError(f"the ids of a subset in {run} are damaged ({error}); its steps are lost") from error


def starts(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every start of a run, without an unfinished last line."""
    path = Path(run) / NAME
    if not os.path.lexists(path):
        raise ConfigError(f"there is no {path}; the run was started without run=, so its steps are not known")
    try:
        return [_start(json.loads(line)) for line in read_plain(str(path), follow=True).split(b"\n")[:-1]]
    except (StoreCorrupt, ValueError, RecursionError) as error:
        problem = getattr(error, "problem", None) or error
        raise ConfigError(
            f"{path} is damaged ({problem}), so the steps of this run are not known; bring it back from a copy, or move it away "
            "to train on without it"
        ) from error


def _start(values: Any) -> dict[str, Any]:
    """The start that a line holds; ``ValueError`` where it is not what was written. Millrace 0.1 wrote no hash."""
    if not isinstance(values, dict) or not values.keys() >= FIELDS:
        raise ValueError("a line lacks some of its fields")
    entry, is_sealed = unsealed(values)
    if not is_sealed and (unknown := entry.keys() - FIELDS - MORE_FIELDS):
        raise ValueError(f"a line has the field {min(unknown)!r:.60}")
    if any(type(entry[name]) is not int for name in ("step", "position", "batch")):
        raise ValueError("a step, position or batch is no whole number")
    return entry


def _steps_before(folder: Path, feed: Feed) -> int:
    """Steps before the place where a feed stands, if the last start before it had continued."""
    if not os.path.lexists(folder / NAME):
        return feed.steps_before
    place, budget = (feed.reached, feed.bin), feed.budget
    max_rows = None if budget is None else budget.max_rows
    for start in reversed(starts(folder)):
        if (start["position"], start.get("bin", 0)) <= place and start.get("max_rows") == max_rows:
            line = None if budget is None else _budget_line(start, budget)
            batches = _batches(start, place[0]) if line is None else line.batches_to(*place)
            return int(start["step"]) - 1 + batches
    return feed.steps_before


def _budget_line(start: dict[str, Any], budget: Budget) -> BudgetLine:
    options = budget.view, budget.order, start["batch"], 0, 1, start["position"], start["stop"]
    return BudgetLine(*options, last=start.get("last", "pad"), first_bin=start["bin"], budget=budget)


def _batches(start: dict[str, Any], position: int) -> int:
    """Batches of a start before a position."""
    count = -(-(position - start["position"]) // start["batch"])
    if start.get("last") == "drop" and start["stop"] is not None:
        count = min(count, (start["stop"] - start["position"]) // start["batch"])
    return int(count)


def misplaced(run: str | os.PathLike[str], step: int, position: int) -> str | None:
    """Why a run cannot stand at a position after a step, by its starts; None where it can, or where they do not say."""
    path = Path(run) / NAME
    entries = starts(run) if os.path.lexists(path) else []
    if not entries or "max_rows" in entries[-1]:
        return None
    first = entries[0]
    if first["step"] > step or (first["step"] == 1 and first["position"]):
        return None  # the first start is not there
    at = start_of_step(run, step + 1)[1]
    if at == position:
        return None
    return f"it stands at position {position:,}, and step {step:,} ends at {at:,} by {path}, which you may move away"


def positions_of_step(run: str | os.PathLike[str], step: int, view: View, order: Order) -> Int64s:
    """The positions that step ``step`` (from 1) held, given the view and order of its start."""
    start, position = start_of_step(run, step)
    if "max_rows" not in start:
        end = position + start["batch"]
        return np.arange(position, end if start["stop"] is None else min(end, start["stop"]))
    line = _budget_line(start, Budget(view, order, start["max_rows"]))
    steps = None if line.num_batches is None else int(start["step"]) - 1 + line.num_batches
    if steps is not None and step > steps:
        raise _after_end(run, step, steps)
    return line.positions_of(step - start["step"])


def start_of_step(run: str | os.PathLike[str], step: int) -> tuple[dict[str, Any], int]:
    """The start that step ``step`` (from 1) belongs to, and the step's first position.

    With ``max_rows`` it is the position of the start: those of a step are not in a row.
    """
    if step < 1:
        raise ConfigError(f"step {step}; steps count from 1")
    known = [start for start in starts(run) if start["step"] <= step]
    if not known:
        raise ConfigError(f"step {step} is before the first start of {run}")
    last = known[-1]
    if "max_rows" in last:
        return last, last["position"]
    position = last["position"] + (step - last["step"]) * last["batch"]
    if last["stop"] is not None:
        steps = int(last["step"]) - 1 + _batches(last, last["stop"])
        if step > steps:
            raise _after_end(run, step, steps)
    return last, position


def _after_end(run: str | os.PathLike[str], step: int, steps: int) -> ConfigError:
    return ConfigError(
        f"step {step:,} is after the end of the run {run}, which has {steps:,} steps; give 1 to {steps:,}"
    )
