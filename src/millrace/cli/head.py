"""``millrace head``: the first records of a store, with their values."""

from __future__ import annotations

from typing import Annotated, Any

import typer

EXAMPLE = "millrace head prices/ --split val --records 2"
SHOWN_BY_NAME = ("values", "time", "scaling", "name", "categorical", "static", "static_categorical")
SHOWN = 12  # columns of a table of rows


def run(
    path: Annotated[str, typer.Argument(help="A store, or a foreign layout such as train.bin.")],
    records: Annotated[int, typer.Option("--records", "-n", min=1, help="How many records to show.")] = 3,
    rows: Annotated[int, typer.Option(min=1, help="How many rows of each record to show.")] = 5,
    first: Annotated[int, typer.Option("--from", min=0, help="The first record to show.")] = 0,
    split: Annotated[str | None, typer.Option(help="Show this split only.")] = None,
    dtype: Annotated[str | None, typer.Option(help="What a headerless foreign file holds, e.g. uint32.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show the first records of a store."""
    from millrace.cli.console import print_json, print_line
    from millrace.store.open import open_store

    store = open_store(path, dtype=dtype)
    part = store if split is None else store.split(split)
    shown = [record(part, number, rows) for number in range(first, min(first + records, part.num_records))]
    if as_json:
        print_json(shown)
        return
    if not shown:
        print_line(f"no records from {first}: there are {part.num_records:,}")
    for entry in shown:
        show(entry)


def record(store: Any, number: int, rows: int) -> dict[str, Any]:
    """The values of one record: all record columns, the first rows of each row column."""
    entry: dict[str, Any] = {"record": number, "rows": {}, "columns": {}}
    if store.manifest is not None and store.manifest.tokenizer is not None:
        start, stop = store.offsets[number : number + 2].tolist()
        last = min(stop, start + 20 * rows)
        entry["text"] = store.decode(store.columns["tokens"][start:last])
        entry["truncated"] = last < stop
    if _has_series(store):
        entry["series"] = _series(store, number, rows)
        if static := _static(store, number):
            entry["static"] = static
    for name, column in store.layout.columns.items():
        values = store.columns[name]
        if column.axis is None:
            entry["columns"][name] = _plain(values[number])
            continue
        offsets = store.axis_offsets(column.axis)
        start, stop = int(offsets[number]), int(offsets[number + 1])
        if column.axis == store.layout.primary:
            start, stop = _split_rows(store, number, start, stop)
        entry["rows"][column.axis] = stop - start
        entry["columns"][name] = _plain(values[start : min(stop, start + rows)])
    return entry


def _split_rows(store: Any, number: int, start: int, stop: int) -> tuple[int, int]:
    """The rows of a record that belong to the split, where it is one by time."""
    if store.cuts is None:
        return start, stop
    return start + int(store.cuts[0][number]), start + int(store.cuts[1][number])


def _has_series(store: Any) -> bool:
    """Whether rows can be shown as people know them: with names, times and the values before they were scaled."""
    columns = store.layout.columns
    named = (
        len(store.meta.get("features", ())) == (columns["values"].shape or (0,))[0] if "values" in columns else False
    )
    return store.kind == "series" and named and store.manifest is not None and store.manifest.scaling is not None


def _series(store: Any, number: int, rows: int) -> list[dict[str, Any]]:
    import numpy as np

    start, stop = store.offsets[number : number + 2].tolist()
    start, stop = _split_rows(store, number, start, stop)
    picked = slice(start, min(stop, start + rows))
    unscaled = store.inverse(
        store.columns["values"][picked], features=range(len(store.meta["features"])), entity=number
    )
    labels = _labels(store, picked)
    kept = store.meta.get("time") or {}
    shown = []
    for k, (time, values) in enumerate(zip(store.columns["time"][picked], unscaled, strict=True)):
        when = _plain(time)
        if kept.get("unit") is not None:
            when = str(np.datetime64(int(time), kept["unit"])) + "Z" * (kept.get("zone") is not None)
        named = dict(zip(store.meta["features"], values.tolist(), strict=True))
        shown.append({"time": when, **named, **{name: column[k] for name, column in labels.items()}})
    return shown


def _static(store: Any, number: int) -> dict[str, Any]:
    """What a record has one value of, by name: numbers before they were scaled, categories as they were named."""
    found: dict[str, Any] = {}
    if scaling := store.meta.get("static_scaling"):
        values = _plain(store.columns["static"][number])
        both = zip(values, scaling["center"], scaling["scale"], strict=True)
        found |= zip(store.meta["static"], [value * scale + center for value, center, scale in both], strict=True)
    for k, name in enumerate(store.meta.get("static_categorical", ())):
        code = int(store.columns["static_categorical"][number][k])
        found[name] = [None, *store.meta["categories"][name]][code]
    return found


def _labels(store: Any, rows: slice) -> dict[str, list[str | None]]:
    """The categories of some rows as they were named; null where they are missing."""
    names = store.meta.get("categorical", ()) if "categorical" in store.layout.columns else ()
    codes = store.columns["categorical"][rows].T.tolist() if names else []
    known = {name: [None, *store.meta["categories"][name]] for name in names}
    return {name: [known[name][code] for code in column] for name, column in zip(names, codes, strict=True)}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def show(entry: dict[str, Any]) -> None:
    from millrace.cli.console import print_line, print_table

    lengths = ", ".join(
        f"{rows:,} rows" if axis == "rows" else f"{rows:,} {axis}" for axis, rows in entry["rows"].items()
    )
    who = f" {entry['columns']['name']!r}" if "series" in entry and "name" in entry["columns"] else ""
    print_line(f"record {entry['record']:,}{who}: {lengths}")
    if "text" in entry:
        print_line(f"  text  {entry['text']!r}{'…' if entry['truncated'] else ''}")
    if entry.get("series"):
        table = [list(entry["series"][0]), *([_cell(value) for value in row.values()] for row in entry["series"])]
        print_table([row[:SHOWN] + ["..."] * (len(row) > SHOWN) for row in table])
    if "static" in entry:
        print_line(f"  static  {', '.join(f'{name} {_cell(value)}' for name, value in entry['static'].items())}")
    for name, value in entry["columns"].items():
        if "series" in entry and name in SHOWN_BY_NAME:
            continue  # shown above, as they were before
        if isinstance(value, list) and value and isinstance(value[0], list):
            print_line(f"  {name}")
            for row in value:
                print_line(f"    {_short(row)}")
        else:
            print_line(f"  {name}  {_short(value)}")


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _short(value: Any) -> str:
    if isinstance(value, list):
        cells = [_short(item) for item in value[:16]]
        return "[" + ", ".join(cells + ["..."] * (len(value) > 16)) + "]"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
