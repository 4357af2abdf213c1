"""``millrace head``: the first records of a store, with their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from typer import Option

from millrace.cli import options
from millrace.cli.printing import plural, print_json, print_line, print_table

EXAMPLE = "millrace head prices/ --split val --records 2"
SHOWN_BY_NAME = ("values", "time", "scaling", "name", "categorical", "static", "static_categorical", "cuts")
MAX_COLUMNS = 12  # of a table of rows
MAX_NUMBERS = 16  # of a row


def run(
    path: options.Layout,
    records: Annotated[int, Option("--records", "-n", min=1, help="Show this many records.")] = 3,
    rows: Annotated[int, Option(min=1, help="Show this many rows of each record.")] = 5,
    first: Annotated[int, Option("--from", min=0, help="Start at this record, counted from 0.")] = 0,
    split: Annotated[str | None, Option(help="Only this split.")] = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
) -> None:
    """Show the first records of a store."""
    from millrace.store.open import open_store

    store = open_store(path, dtype=dtype)
    part = store if split is None else store.split(split)
    shown = [record(part, number, rows) for number in range(first, min(first + records, part.num_records))]
    if as_json:
        print_json(shown)
        return
    if not shown:
        print_line(f"no records from {first:,} on: there are {part.num_records:,}, counted from 0")
    for entry in shown:
        show(entry)


def record(store: Any, number: int, rows: int) -> dict[str, Any]:
    """The values of one record: all record columns, and the first rows of each row column."""
    entry: dict[str, Any] = {"record": number, "rows": {}, "shown": rows, "columns": {}}
    if classes := _classes(store, number):
        entry["classes"] = classes
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


def _classes(store: Any, number: int) -> dict[str, str]:
    """The names of the classes of a record, by column."""
    named, columns = store.meta.get("classes"), store.layout.columns
    if isinstance(named, (list, tuple)):
        named = {"label": named}
    found = {}
    for name, names in named.items() if isinstance(named, dict) else ():
        is_single = name in columns and columns[name].per == "record" and not columns[name].shape
        code = store.columns[name][number] if is_single else None
        if isinstance(names, (list, tuple)) and code is not None and 0 <= code < len(names):
            found[name] = str(names[int(code)])
    return found


def _split_rows(store: Any, number: int, start: int, stop: int) -> tuple[int, int]:
    """The rows of a record that belong to a split by time."""
    if store.cuts is None:
        return start, stop
    return start + int(store.cuts[0][number]), start + int(store.cuts[1][number])


def _has_series(store: Any) -> bool:
    """Whether rows can be shown with names, times and values before scaling."""
    columns = store.layout.columns
    if store.kind != "series" or store.manifest is None or store.manifest.scaling is None or "values" not in columns:
        return False
    return len(store.meta["features"]) == (columns["values"].shape or (0,))[0]


def _series(store: Any, number: int, rows: int) -> list[dict[str, Any]]:
    import numpy as np

    from millrace.store.times import show_times

    start, stop = store.offsets[number : number + 2].tolist()
    start, stop = _split_rows(store, number, start, stop)
    picked = slice(start, min(stop, start + rows))
    stored, features = store.columns["values"][picked], range(len(store.meta["features"]))
    unscaled = store.inverse(stored, features=features, entity=number)
    # Scaling and rounding turn a zero into -0.0017. A value is zero if a zero is stored as the same number.
    zero = _rounded(store.scale(np.zeros(len(features)), entity=number), store.layout.columns["values"].dtype)
    unscaled = np.where(np.asarray(stored) == zero, 0.0, unscaled)
    labels = _labels(store, picked)
    shown = []
    for k, (when, values) in enumerate(zip(show_times(store, store.times(picked)), unscaled, strict=True)):
        named = dict(zip(store.meta["features"], values.tolist(), strict=True))
        shown.append({"time": when, **named, **{name: column[k] for name, column in labels.items()}})
    return shown


def _rounded(values: Any, dtype: str) -> Any:
    """Numbers as a column of this type stores them."""
    from millrace.store.layout import bfloat16_bits, bfloat16_values

    return bfloat16_values(bfloat16_bits(values)) if dtype == "bfloat16" else values.astype(dtype)


def _static(store: Any, number: int) -> dict[str, Any]:
    """The static values of a record by name: numbers before scaling, categories by their names."""
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
    """The categories of some rows by their names; None for missing ones."""
    names = store.meta.get("categorical", ()) if "categorical" in store.layout.columns else ()
    codes = store.columns["categorical"][rows].T.tolist() if names else []
    known = {name: [None, *store.meta["categories"][name]] for name in names}
    return {name: [known[name][code] for code in column] for name, column in zip(names, codes, strict=True)}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def show(entry: dict[str, Any]) -> None:
    lengths = [plural(rows, "row") if axis == "rows" else f"{rows:,} {axis}" for axis, rows in entry["rows"].items()]
    who = f" {entry['columns']['name']!r}" if "series" in entry and "name" in entry["columns"] else ""
    is_cut = "text" not in entry and max(entry["rows"].values(), default=0) > entry["shown"]
    cut = f" (the first {entry['shown']} shown)" if is_cut else ""
    print_line(f"record {entry['record']:,}{who}: {', '.join(lengths)}{cut}".removesuffix(": "))
    if "text" in entry:
        print_line(f"  text  {entry['text']!r}{'…' if entry['truncated'] else ''}")
    if entry.get("series"):
        names = list(entry["series"][0])
        columns = [aligned([row[name] for row in entry["series"]]) for name in names[:MAX_COLUMNS]]
        table = [names[:MAX_COLUMNS], *map(list, zip(*columns, strict=True))]
        print_table(table, right=set(names[1:]))
        if len(names) > MAX_COLUMNS:
            print_line(f"  ... and {len(names) - MAX_COLUMNS} more columns; --json shows all")
    if "static" in entry:
        print_line(f"  static  {', '.join(f'{name} {number_text(value)}' for name, value in entry['static'].items())}")
    for name, value in entry["columns"].items():
        if "series" in entry and name in SHOWN_BY_NAME:
            continue  # shown above
        if sizes := _sizes(value):
            print_line(f"  {name}  {' x '.join(map(str, sizes))} numbers; --json shows them")
        elif isinstance(value, list) and value and isinstance(value[0], list):
            print_line(f"  {name}")
            columns = [aligned([row[k] for row in value]) for k in range(min(len(value[0]), MAX_NUMBERS))]
            for cells in zip(*columns, strict=True):
                print_line(f"    {'  '.join(cells)}{'  ...' * (len(value[0]) > MAX_NUMBERS)}")
        else:
            of_class = f" ({entry['classes'][name]})" if name in entry.get("classes", {}) else ""
            print_line(f"  {name}  {_short(value)}{of_class}")


def _sizes(value: Any) -> list[int]:
    """The sizes of an array with more than two dimensions, such as the pixels of an image; none for any other value."""
    sizes = []
    while isinstance(value, list) and value:
        sizes.append(len(value))
        value = value[0]
    return sizes if len(sizes) > 2 else []


def aligned(values: Sequence[Any]) -> list[str]:
    """The cells of one column, with decimal points aligned.

    >>> aligned([0.0, 98.5, -1e-9, 123.25])
    ['  0   ', ' 98.5 ', '-1e-09', '123.25']
    """
    cells = [number_text(value) for value in values]
    if not all(isinstance(value, (int, float)) or value is None for value in values):
        return cells
    tails = [len(cell.partition(".")[2]) + 1 if "." in cell and "e" not in cell else 0 for cell in cells]
    padded = [
        cell if "e" in cell else cell + " " * (max(tails) - tail) for cell, tail in zip(cells, tails, strict=True)
    ]
    width = max(map(len, padded))
    return [cell.rjust(width) for cell in padded]


def number_text(value: Any) -> str:
    """A value for people: an exact zero is 0, and only tiny or huge numbers are in scientific notation.

    >>> [number_text(value) for value in (0.0, -0.0, 1e-9, 98.55, 1234567.0, 0.1 + 0.2, None, "x")]
    ['0', '0', '1e-09', '98.55', '1234567', '0.3', '', 'x']
    """
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if value == 0:
        return "0"
    return f"{value:.0f}" if 1e6 <= abs(value) < 1e15 else f"{value:.6g}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        cells = [_short(item) for item in value[:MAX_NUMBERS]]
        return "[" + ", ".join(cells + ["..."] * (len(value) > MAX_NUMBERS)) + "]"
    return number_text(value) if isinstance(value, float) else repr(value)
