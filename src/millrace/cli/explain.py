"""``millrace explain``: which samples, rows and sources a training step held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from typer import Argument, Option

from millrace.cli import options
from millrace.cli.printing import plural, print_json, print_line, print_table, several, shorten

EXAMPLE = "millrace explain corpus/ --step 81204 --length 1024 --batch 32 --seed 7"
MAX_CELL = 300  # characters
# Record columns that do not say where a sample comes from.
SERIES_COLUMNS = ("name", "cuts", "scaling", "static", "static_categorical")
TEXT_COLUMNS = ("hash",)


def run(
    path: Annotated[str, Argument(help="A run folder (of millrace train, or of a Feed with run=), or a store.")],
    step: Annotated[int, Option(min=1, help="The training step, counted from 1.")],
    split: options.Split = None,
    length: options.Length = None,
    lookback: options.Lookback = None,
    horizon: options.Horizon = None,
    stride: options.Stride = None,
    lead: options.Lead = 0,
    column: options.ColumnName = None,
    batch: options.BatchSize = 32,
    seed: options.Seed = 0,
    most: Annotated[int, Option(min=1, help="Print this many samples.")] = 20,
    as_json: options.Json = False,
) -> None:
    """Show which samples and rows a training step used.

    For a run folder, --step is enough. For a store, also give the view, batch and seed of the run.
    """
    import os
    import warnings

    from millrace.errors import ConfigError
    from millrace.feed import journal

    note = ""
    if os.path.isfile(os.path.join(path, journal.NAME)):
        last = last_step(path)
        if last is not None and step > last:
            raise ConfigError(
                f"step {step:,} is after the end of the run {path}, which has {last:,} steps; give 1 to {last:,}"
            )
        found = explain_run(path, step)
        if last is None and found["stop"] is None:
            note = f"The run does not record its last step: this is what step {step:,} holds if the run got there."
    else:
        from millrace.feed.explain import prepared_from
        from millrace.feed.feed import Feed

        view = options.build_view(path, split, length, lookback, horizon, stride, lead, column=column)
        with warnings.catch_warnings():  # a batch larger than the view is no mistake here
            warnings.simplefilter("ignore", UserWarning)
            found = Feed(view, batch=batch, seed=seed, rank=0, world=1, device="numpy").explain(step - 1)
        found["sources"] = prepared_from(view)
    show(found, step, most, as_json)
    if note and not as_json:
        print_line(note)


def last_step(run: str) -> int | None:
    """The last step that a training run can have done, by its metrics.jsonl; None for a run without one.

    Steps are logged every ``train.log_every``: a run that failed may have done a few more.
    """
    import json
    import os

    from millrace.errors import StoreError
    from millrace.store.plain_file import read_plain

    try:
        lines = read_plain(os.path.join(run, "metrics.jsonl"), follow=True).split(b"\n")[:-1]
        logged = max((int(json.loads(line)["step"]) for line in lines), default=0)
        config = json.loads(read_plain(os.path.join(run, "run.json"), follow=True))["config"]["train"]
        return max(logged, min(int(config["max_steps"]), logged + int(config["log_every"])))
    except (StoreError, ValueError, KeyError, TypeError, RecursionError):
        return None


def explain_run(path: str, step: int) -> Any:
    """What a step of a run held, by the lines that its feeds wrote."""
    from millrace.errors import StoreNotFound
    from millrace.feed import journal
    from millrace.feed.explain import describe, prepared_from
    from millrace.order.orders import order_from_spec
    from millrace.store.open import open_store
    from millrace.view.spec import from_spec

    start, _ = journal.start_of_step(path, step)
    stores = {}
    for fingerprint, where in start["stores"].items():
        if where is None:
            raise StoreNotFound(f"the run {path} read a store in memory; only stores on disk can be explained")
        store = open_store(where)
        is_same = store.fingerprint == fingerprint or store.manifest is None  # else rows were appended since
        stores[fingerprint] = store if is_same else open_store(where, snapshot=fingerprint)
    view = from_spec(start["view"], stores, journal.arrays(path), allow_mixed_tokenizers=True)
    order = order_from_spec(start["order"])
    found = describe(view, order, journal.positions_of_step(path, step, view, order), step - 1)
    found |= {"sources": prepared_from(view), "stop": start["stop"]}
    return found


def show(found: Any, step: int, most: int, as_json: bool) -> None:
    rows, sources = found["rows"], found["sources"]
    if as_json:
        arrays = {name: found[name].tolist() for name in ("positions", "samples")}
        print_json({"step": step, **arrays, "rows": rows, "sources": sources})
        return
    first, last = int(found["positions"].min()), int(found["positions"].max())
    among = "" if last - first + 1 == len(rows) else "among "  # bins of a budget are not in a row
    epochs = sorted(set(found["epochs"].tolist()))
    epoch = f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs[0]} to {epochs[-1]}"
    print_line(f"step {step:,}: {plural(len(rows), 'sample')}, {among}positions {first:,} to {last:,}, {epoch}")
    lines = [cells for row in rows[:most] for cells in _lines(row, len({row["store"] for row in rows}) > 1)]
    names = list(dict.fromkeys(name for cells in lines for name in cells))
    table = [names, *([cells.get(name, "") for name in names] for cells in lines)]
    print_table(table, right={"position", "sample"}, fit="source")
    if len(rows) > most:
        print_line(f"  ... and {len(rows) - most:,} more; --most {len(rows)} shows all, --json is for programs")
    for store, files in sources.items():
        if files:
            which = f"{store} was prepared from" if len(sources) > 1 else "The store was prepared from"
            print_line(f"{which} {several(files, 5, '--json lists all')}.")
    if any(sources.values()):
        print_line("It does not record which file or line a row came from.")


def _lines(row: dict[str, Any], name_store: bool) -> Iterator[dict[str, str]]:
    """The cells of one sample by heading: a line for each of its records."""
    for number, piece in enumerate(row["pieces"]):
        cells = {"position": f"{row['position']:,}", "sample": f"{row['sample']:,}"} if number == 0 else {}
        if "entity" in row:
            cells["entity"] = shown_value(row["entity"])
        for name, part in (("input", row.get("input")), ("target", row.get("target")), ("times", row)):
            if part and "times" in part:
                cells[name] = f"{part['times'][0]} to {part['times'][1]}"
        first, stop = piece["rows"]
        cells["rows"] = f"{first:,} to {stop - 1:,}" if stop > first else "none"
        if "entity" not in row:
            cells["record"] = f"{piece['record']:,}"
        cells["shard"] = piece["shard"]
        if name_store:
            cells["store"] = str(row["store"])
        hidden = SERIES_COLUMNS if "entity" in row else TEXT_COLUMNS if "source" in piece["columns"] else ()
        for name, value in piece["columns"].items():
            if name not in hidden:
                cells[name if name not in cells else f"column {name}"] = shown_value(value)
        yield cells


def shown_value(value: Any) -> str:
    """A value of a record column in one cell."""
    if isinstance(value, list):
        return "[" + ", ".join([shown_value(item) for item in value[:4]] + ["..."] * (len(value) > 4)) + "]"
    return f"{value:.6g}" if isinstance(value, float) else shorten(str(value), MAX_CELL)
