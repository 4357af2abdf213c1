"""``millrace info``: what a store holds. It reads only the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from typer import Option

from millrace.cli import options
from millrace.cli.printing import plural, print_json, print_line, print_table, several, shorten, size

EXAMPLE = "millrace info prices/"
KINDS = {"series": "series (a table)"}
NOUNS = {"text": ("document", "token"), "series": ("entity", "row")}
# Keys of meta that the sentences above the tables already say.
SAID = ("features", "target", "entity", "time", "cut_times", "report", "layout", "static_scaling")


def run(
    path: options.Layout,
    snapshot: Annotated[str | None, Option(help="Show this earlier snapshot, given by its fingerprint.")] = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
) -> None:
    """Show what a store holds: columns, splits, sizes."""
    from millrace.store.open import open_store

    store = open_store(path, snapshot=snapshot, dtype=dtype)
    facts = describe(store)
    if as_json:
        print_json(facts)
    else:
        show(facts)


def describe(store: Any) -> dict[str, Any]:
    """Everything that ``info`` prints, as plain values."""
    from millrace.store import times

    layout, manifest, unit = store.layout, store.manifest, times.time_unit(store)
    return {
        "path": store.path,
        "layout": store.meta.get("layout", "millrace store"),
        "version": None if manifest is None else manifest.version,
        "kind": store.kind,
        "fingerprint": store.fingerprint,
        "parent": None if manifest is None else manifest.parent,
        "snapshots": [] if manifest is None else _describe_snapshots(store),
        "records": store.num_records,
        "rows": {axis: store.axis_rows(axis) for axis in layout.row_axes if _has_column(layout, axis)},
        "shards": store.num_shards,
        "bytes": store.num_bytes,
        "codec": None if manifest is None or manifest.codec is None else str(manifest.codec),
        "stored_bytes": _stored_bytes(store),
        "columns": {
            name: {
                "dtype": column.dtype,
                "shape": list(column.shape),
                "per": column.per,
                "axis": column.axis,
                "items": len(store.columns[name]),
                **({"values": len(column.values or ())} if column.dtype == "dictionary" else {}),
            }
            for name, column in layout.columns.items()
        },
        "scaling": None
        if manifest is None or manifest.scaling is None
        else {key: manifest.scaling[key] for key in ("method", "fit_on", "per_entity")},
        "splits": {name: _describe_split(store, name) for name in store.splits},
        "cuts": None if store.time_cuts is None else _describe_cuts(store),
        "time": {"unit": unit and times.UNITS[unit], "zone": times.time_zone(store)}
        if times.has_times(store)
        else None,
        "tokenizer": None if manifest is None or manifest.tokenizer is None else manifest.tokenizer.get("name"),
        "meta": dict(store.meta),
    }


def _has_column(layout: Any, axis: str) -> bool:
    """Whether any column has this axis: where all are per record, none has."""
    return any(column.axis == axis for column in layout.columns.values())


def _stored_bytes(store: Any) -> int | None:
    """What a compressed store takes where it lies; None where nobody knows, or for an earlier snapshot."""
    if store.manifest is None or store.manifest.codec is None:
        return int(store.num_bytes)
    from millrace.store.remote.contents import Contents
    from millrace.store.remote.objects import Objects

    objects = Objects(store.path)
    contents = Contents.read(objects)
    return contents.stored_bytes(objects) if contents.fingerprint == store.fingerprint else None


def _describe_snapshots(store: Any) -> list[dict[str, Any]]:
    """The snapshots that ``open_store(snapshot=)`` can open, oldest first."""
    from millrace.store.history import snapshots
    from millrace.store.open import open_store

    current, found = open_store(store.path).fingerprint, []
    sources: set[str] = set()
    for snapshot in snapshots(store.path):
        sources.update(snapshot.sources)
        marks = {
            "current": snapshot.fingerprint == current,
            "shown_here": snapshot.fingerprint == store.fingerprint != current,
        }
        facts = {"fingerprint": snapshot.fingerprint, "date": snapshot.date}
        found.append({**facts, **marks, "sources": len(sources)})  # including those of earlier snapshots
    return found


def _describe_cuts(store: Any) -> dict[str, Any]:
    """Splits by time: the gap after a cut, and when each split begins, if the store records it."""
    import numpy as np

    from millrace.store.times import show_times, time_unit

    cuts, unit, times = store.time_cuts, time_unit(store), store.meta.get("cut_times")
    begins: dict[str, Any] = {}
    is_known = isinstance(times, (list, tuple)) and len(times) == len(cuts.splits) - 1
    if is_known and all(isinstance(time, int if unit else (int, float)) for time in times):
        values = np.array(times) if unit is None else np.array(times, np.int64).view(f"datetime64[{unit}]")
        begins = dict(zip(cuts.splits[1:], show_times(store, values), strict=True))
    return {"column": cuts.column, "gap": cuts.gap, "from": begins}


def _describe_split(store: Any, name: str) -> dict[str, Any]:
    part = store.split(name)
    if part.cuts is not None:
        begins, ends = part.cuts
        return {"records": int((ends > begins).sum()), "rows": int((ends - begins).sum()), "shards": part.num_shards}
    return {"records": part.num_records, "rows": part.num_rows, "shards": part.num_shards}


def show(facts: dict[str, Any]) -> None:
    """Prints sentences and tables for people."""
    for sentence in (*_contents(facts), *_preparation(facts)):
        print_line(sentence)
    tables = {"Columns": _columns(facts), _splits_heading(facts): _splits(facts)}
    tables |= {"Snapshots, oldest first": _snapshots(facts), "Other facts (meta)": _meta(facts["meta"])}
    for heading, table in tables.items():
        if table:
            print_line()
            print_line(heading)
            print_table(table, right={"count", "records", "rows", "shards"}, fit="value")


def _contents(facts: dict[str, Any]) -> list[str]:
    """Sentences about what the store is and how much it holds."""
    record, row = NOUNS.get(facts["kind"], ("record", "row"))
    rows = [plural(count, row) + f" of {axis}" * (axis != "rows") for axis, count in facts["rows"].items()]
    records = plural(facts["records"], record) + (" (a record each)" if record != "record" else "")
    what = f"a millrace store of {KINDS.get(facts['kind'], facts['kind'])}, format version {facts['version']}"
    return [
        f"{facts['path']} is {what if facts['version'] else 'in the layout of another tool: ' + facts['layout']}.",
        f"It holds {' in '.join(filter(None, (' and '.join(rows), records)))}: {size(facts['bytes'])} in "
        f"{plural(facts['shards'], 'shard')}.",
        *([_compression(facts)] if facts["codec"] else []),
        *(_written(snapshot) for snapshot in facts["snapshots"] if snapshot["fingerprint"] == facts["fingerprint"]),
        f"Its fingerprint is {facts['fingerprint']}.",
    ]


def _compression(facts: dict[str, Any]) -> str:
    stored, said = facts["stored_bytes"], f"Its files are compressed by {facts['codec']}"
    return f"{said} to {size(stored)} ({facts['bytes'] / stored:.2f}x)." if stored else f"{said}."


def _written(snapshot: dict[str, Any]) -> str:
    sources = f" from {plural(snapshot['sources'], 'source file')}" if snapshot["sources"] else ""
    return f"It was written on {_date(snapshot)} UTC{sources}."


def _date(snapshot: dict[str, Any]) -> str:
    return str(snapshot["date"]).replace("T", " ").removesuffix("Z")


def _preparation(facts: dict[str, Any]) -> list[str]:
    """Sentences about how the values were prepared."""
    meta, found = facts["meta"], []
    if features := meta.get("features"):
        target = f"; the target is {several(_names(meta['target']), 8, '--json')}" if meta.get("target") else ""
        names = several(_names(features), 8, "--json lists all")
        found.append(f"Each row has {plural(len(_names(features)), 'feature')}: {names}{target}.")
    if meta.get("entity"):
        columns = ["the names of the files" if name == "@file" else name for name in _names(meta["entity"])]
        found.append(f"Entities are identified by {several(columns, 8, '--json lists all')}.")
    if facts["time"]:
        found.append(_time(facts["time"]))
    if scaling := facts["scaling"]:
        each = "each record by its own statistics" if scaling["per_entity"] else "all records together"
        found.append(f"Values are scaled: {scaling['method']}, {each}, fitted on the {scaling['fit_on']} rows.")
        found.append("store.inverse() gives the original units.")
    if facts["tokenizer"]:
        found.append(f"The tokenizer is {facts['tokenizer']}.")
    return found


def _time(time: dict[str, str | None]) -> str:
    if time["unit"] is None:
        return "The column time holds the numbers of the source; store.times() gives them."
    zone = " UTC" if time["zone"] else ""
    return f"The column time counts {time['unit']} since 1970-01-01{zone}; store.times() gives dates."


def _names(value: Any) -> list[str]:
    return [str(name) for name in value] if isinstance(value, (list, tuple)) else [str(value)]


def _columns(facts: dict[str, Any]) -> list[Sequence[str]]:
    table: list[Sequence[str]] = [("name", "type", "shape", "one for each", "count")]
    for name, column in facts["columns"].items():
        row = "row" if column["axis"] == "rows" else f"row of {column['axis']}"
        each = "record" if column["per"] == "record" else row
        dtype = f"dictionary of {column['values']:,} values" if "values" in column else column["dtype"]
        shape = " x ".join(map(str, column["shape"])) or "single"
        table.append((name, dtype, shape, each, f"{column['items']:,}"))
    return table


def _splits_heading(facts: dict[str, Any]) -> str:
    if facts["cuts"] is None:
        return "Splits"
    gap = f", with a gap of {facts['cuts']['gap']} rows" if facts["cuts"]["gap"] else ""
    times = [f"{name} from {start}" for name, start in facts["cuts"]["from"].items()]
    return f"Splits by time{''.join(f', {time}' for time in times)}{gap}"


def _splits(facts: dict[str, Any]) -> list[Sequence[str]]:
    splits = [(name, *(f"{s[key]:,}" for key in ("records", "rows", "shards"))) for name, s in facts["splits"].items()]
    return [("name", "records", "rows", "shards"), *splits] if splits else []


def _snapshots(facts: dict[str, Any]) -> list[Sequence[str]]:
    if len(facts["snapshots"]) < 2:
        return []
    table: list[Sequence[str]] = [("date (UTC)", "fingerprint", "")]
    for snapshot in facts["snapshots"]:
        marks = [word for word in ("current", "shown here") if snapshot[word.replace(" ", "_")]]
        table.append((_date(snapshot), snapshot["fingerprint"], ", ".join(marks)))
    return table


def _meta(meta: dict[str, Any]) -> list[Sequence[str]]:
    """The other keys of meta, such as the user's own."""
    others = {key: value for key, value in meta.items() if key not in SAID}
    table = [(key, shorten(_plain(value), 400)) for key, value in others.items()]
    return [("name", "value"), *table] if table else []


def _plain(value: Any) -> str:
    """A value of meta without Python's brackets."""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, (list, tuple)) else str(value)
