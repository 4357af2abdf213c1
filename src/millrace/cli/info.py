"""``millrace info``: what a store holds, from its manifest alone."""

from __future__ import annotations

from typing import Annotated, Any

import typer

EXAMPLE = "millrace info prices/"


def run(
    path: Annotated[str, typer.Argument(help="A store, or a foreign layout such as train.bin.")],
    snapshot: Annotated[str | None, typer.Option(help="Show an earlier snapshot, by its fingerprint.")] = None,
    dtype: Annotated[str | None, typer.Option(help="What a headerless foreign file holds, e.g. uint32.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show what a store holds: columns, splits, sizes."""
    from millrace.cli.console import print_json
    from millrace.store.open import open_store

    store = open_store(path, snapshot=snapshot, dtype=dtype)
    facts = describe(store)
    if as_json:
        print_json(facts)
    else:
        show(facts)


def describe(store: Any) -> dict[str, Any]:
    """Everything ``info`` prints, as plain values."""
    layout, manifest = store.layout, store.manifest
    return {
        "path": store.path,
        "layout": store.meta.get("layout", "millrace store"),
        "version": None if manifest is None else manifest.version,
        "kind": store.kind,
        "fingerprint": store.fingerprint,
        "parent": None if manifest is None else manifest.parent,
        "snapshots": [] if manifest is None else snapshots(store.path),
        "records": store.num_records,
        "rows": {axis: store.axis_rows(axis) for axis in store.axes if axis not in layout.columns},
        "shards": store.num_shards,
        "bytes": store.num_bytes,
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
        "cuts": None if store.time_cuts is None else {"column": store.time_cuts.column, "gap": store.time_cuts.gap},
        "meta": dict(store.meta),
    }


def snapshots(path: str) -> list[str]:
    """The fingerprints ``--snapshot`` and ``open_store(snapshot=)`` can open."""
    import os

    return sorted(
        name.removesuffix(".json") for name in os.listdir(os.path.join(path, "snapshots")) if name.endswith(".json")
    )


def _describe_split(store: Any, name: str) -> dict[str, Any]:
    part = store.split(name)
    if part.cuts is not None:
        begins, ends = part.cuts
        return {"records": int((ends > begins).sum()), "rows": int((ends - begins).sum()), "shards": part.num_shards}
    return {"records": part.num_records, "rows": part.num_rows, "shards": part.num_shards}


def _scaling(scaling: dict[str, Any]) -> str:
    each = ", every record by its own" if scaling["per_entity"] else ""
    return f"{scaling['method']}, fitted on {scaling['fit_on']} rows{each}"


def show(facts: dict[str, Any]) -> None:
    from millrace.cli.console import print_fields, print_line, print_table, size

    rows = ", ".join(
        f"{count:,} on {axis}" if len(facts["rows"]) > 1 else f"{count:,}" for axis, count in facts["rows"].items()
    )
    print_fields([
        ("path", facts["path"] or "in memory"),
        ("layout", facts["layout"] if facts["version"] is None else f"{facts['layout']}, format version {facts['version']}"),
        ("kind", facts["kind"]),
        ("records", f"{facts['records']:,}"),
        ("rows", rows),
        ("size", f"{size(facts['bytes'])} in {facts['shards']:,} shards"),
        *([] if facts["scaling"] is None else [("scaling", _scaling(facts["scaling"]))]),
        ("fingerprint", facts["fingerprint"] + (f" (continues {facts['parent']})" if facts["parent"] else "")),
    ])  # fmt: skip
    for snapshot in facts["snapshots"]:
        if len(facts["snapshots"]) > 1:
            print_line(f"  snapshot {snapshot}{' (this one)' if snapshot == facts['fingerprint'] else ''}")
    print_line("columns")
    table = [("name", "dtype", "shape", "per", "items")]
    for name, column in facts["columns"].items():
        per = "record" if column["per"] == "record" else f"row of {column['axis']}"
        dtype = f"dictionary of {column['values']:,}" if "values" in column else column["dtype"]
        table.append((name, dtype, str(tuple(column["shape"])) if column["shape"] else "", per, f"{column['items']:,}"))
    print_table(table)
    if facts["splits"]:
        print_line(
            "splits"
            if facts["cuts"] is None
            else f"splits by time (column {facts['cuts']['column']}, gap {facts['cuts']['gap']})"
        )
        splits = [
            (name, f"{s['records']:,}", f"{s['rows']:,}", f"{s['shards']:,}") for name, s in facts["splits"].items()
        ]
        print_table([("name", "records", "rows", "shards"), *splits])
    if facts["meta"]:
        print_line("meta")
        for key, value in facts["meta"].items():
            print_line(f"  {key}: {str(value)[:200]}")
