"""``millrace head``: the first records of a store, with their values."""

from __future__ import annotations

from typing import Annotated, Any

import typer

EXAMPLE = "millrace head prices/ --split val --records 2"


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
        entry["text"] = store.decode(store.columns["tokens"][start : min(stop, start + 20 * rows)])
    for name, column in store.layout.columns.items():
        values = store.columns[name]
        if column.axis is None:
            entry["columns"][name] = _plain(values[number])
            continue
        offsets = store.axis_offsets(column.axis)
        start, stop = int(offsets[number]), int(offsets[number + 1])
        entry["rows"][column.axis] = stop - start
        entry["columns"][name] = _plain(values[start : min(stop, start + rows)])
    return entry


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def show(entry: dict[str, Any]) -> None:
    from millrace.cli.console import print_line

    lengths = ", ".join(
        f"{rows:,} rows" if axis == "rows" else f"{rows:,} {axis}" for axis, rows in entry["rows"].items()
    )
    print_line(f"record {entry['record']:,}: {lengths}")
    if "text" in entry:
        print_line(f"  text  {entry['text']!r}")
    for name, value in entry["columns"].items():
        if isinstance(value, list) and value and isinstance(value[0], list):
            print_line(f"  {name}")
            for row in value:
                print_line(f"    {_short(row)}")
        else:
            print_line(f"  {name}  {_short(value)}")


def _short(value: Any) -> str:
    if isinstance(value, list):
        cells = [_short(item) for item in value[:16]]
        return "[" + ", ".join(cells + ["..."] * (len(value) > 16)) + "]"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
