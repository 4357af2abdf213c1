"""``millrace explain``: which samples, rows and sources a training step held."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from millrace.cli import views

EXAMPLE = "millrace explain corpus/ --step 81204 --length 1024 --batch 32 --seed 7"


def run(
    path: Annotated[str, typer.Argument(help="A run folder (of a Feed with run=), or a store.")],
    step: Annotated[int, typer.Option(min=1, help="The step, counted from 1.")],
    split: views.Split = None,
    length: views.Length = None,
    lookback: views.Lookback = None,
    horizon: views.Horizon = None,
    stride: views.Stride = None,
    lead: views.Lead = 0,
    batch: views.BatchSize = 32,
    seed: views.Seed = 0,
    most: Annotated[int, typer.Option(min=1, help="How many samples to print.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show what a training step held.

    For a run folder, everything is known. For a store, say which view, batch and seed the run had.
    """
    import os

    from millrace.feed import journal

    if os.path.isfile(os.path.join(path, journal.NAME)):
        found = explain_run(path, step)
    else:
        from millrace.feed.feed import Feed

        view = views.build_view(path, split, length, lookback, horizon, stride, lead)
        found = Feed(view, batch=batch, seed=seed, rank=0, world=1, device="numpy").explain(step - 1)
    show(found, step, most, as_json)


def explain_run(path: str, step: int) -> Any:
    """The step of a run, by the lines its feeds left there."""
    from millrace.errors import StoreNotFound
    from millrace.feed import journal
    from millrace.feed.explain import describe
    from millrace.order.orders import order_from_spec
    from millrace.store.open import open_store
    from millrace.view.spec import from_spec

    check_step(path, step)
    start, position = journal.start_of_step(path, step)
    stores = {}
    for fingerprint, where in start["stores"].items():
        if where is None:
            raise StoreNotFound(
                f"the run {path} read a store in memory, which is gone; only stores on disk can be explained"
            )
        stores[fingerprint] = open_pinned(where, fingerprint, open_store)
    view = from_spec(start["view"], stores, journal.arrays(path))
    end = position + start["batch"] if start["stop"] is None else min(position + start["batch"], start["stop"])
    return describe(view, order_from_spec(start["order"]), position, end, step - 1)


def check_step(path: str, step: int) -> None:
    """Refuses a step that a training run was never to take; ``run.json`` says how many, and a longer life before it took more."""
    import json
    import os

    from millrace.errors import ConfigError

    try:
        with open(os.path.join(path, "run.json")) as file:
            steps = int(json.load(file)["config"]["train"]["max_steps"])
        with open(os.path.join(path, "metrics.jsonl")) as file:
            steps = max([steps, *(int(json.loads(line)["step"]) for line in file if line.endswith("\n"))])
    except (OSError, ValueError, KeyError, TypeError):  # the feed of a loop of one's own: nobody knows its end
        return
    if step > steps:
        raise ConfigError(f"step {step:,}: the run {path} has {steps:,} steps; give one from 1 to {steps:,}")


def open_pinned(where: str, fingerprint: str, open_store: Any) -> Any:
    """The snapshot a run used, also after later appends."""
    store = open_store(where)
    return (
        store if store.fingerprint == fingerprint or store.manifest is None else open_store(where, snapshot=fingerprint)
    )


def show(found: Any, step: int, most: int, as_json: bool) -> None:
    from millrace.cli.console import print_json, print_line, print_table

    rows = found["rows"]
    if as_json:
        print_json(
            {"step": step, "positions": found["positions"].tolist(), "samples": found["samples"].tolist(), "rows": rows}
        )
        return
    first, last = int(found["positions"][0]), int(found["positions"][-1])
    print_line(f"step {step:,}: {len(rows):,} samples, positions {first:,} to {last:,}, epoch {found['epochs'][0]}")
    table = [("position", "sample", "shard", "rows", "record", "columns")]
    for row in rows[:most]:
        for number, piece in enumerate(row["pieces"]):
            columns = ", ".join(
                f"{name}={str(value)[:60]}" for name, value in piece["columns"].items() if name != "hash"
            )
            span = f"{piece['rows'][0]:,} to {piece['rows'][1] - 1:,}"
            start = (f"{row['position']:,}", f"{row['sample']:,}") if number == 0 else ("", "")
            table.append((*start, piece["shard"], span, f"{piece['record']:,}", columns))
    print_table(table)
    if len(rows) > most:
        print_line(f"  ... and {len(rows) - most:,} more; --most {len(rows)} shows all, --json for machines")
