"""The report of a store: what it is, its splits, shards and origin, and what its kind adds.

``millrace inspect DIR`` calls ``store_report``. It reads the manifest, the provenance and a sample, never everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millrace.report import records, series, text
from millrace.report.blocks import Facts, Note, Report, Section, Table
from millrace.report.escape import num_bytes
from millrace.report.sample import Sample, histogram, present
from millrace.store.history import commits
from millrace.store.store import Store

KINDS = {"text": text.sections, "series": series.sections, "records": records.sections}
NOUNS = {"text": ("documents", "tokens"), "series": ("entities", "rows"), "records": ("records", "rows")}
MANY_SHARDS = 4096  # of which not every one is looked at


def store_report(store: Store, *, seed: int = 0) -> Report:
    """What a person wants to see of a store."""
    sample, made = Sample(store, seed), _last_commit(store)
    kind = KINDS[store.kind](sample, made) if sample.num_records else []
    title = f"{store.path or 'a store in memory'}: {store.kind}"
    subtitle = f"Contents below come from {sample.said()} (seed {seed}). Sizes and splits are exact."
    shown = [section for section in kind if section.blocks]
    return Report(title, subtitle, [_overview(store), *shown, _origin(store, made), _shards(store)])


def _last_commit(store: Store) -> Mapping[str, Any]:
    """The line of provenance.json about this snapshot; empty where there is none."""
    lines = commits(store.path) if store.path and "://" not in store.path else []
    return next((line for line in reversed(lines) if line.get("fingerprint") == store.fingerprint), {})


def report_of(made: Mapping[str, Any]) -> Mapping[str, Any]:
    found = made.get("report")
    return found if isinstance(found, Mapping) else {}


def _overview(store: Store) -> Section:
    records_name, rows_name = NOUNS[store.kind]
    facts = [
        ("what it is", f"{store.kind}, {store.meta.get('layout', 'a millrace store')}"),
        (records_name, f"{store.num_records:,}"),
        (rows_name, f"{store.num_rows:,}"),
        ("size", f"{num_bytes(store.num_bytes)} in {_count(store.num_shards, 'shard')}"),
        ("fingerprint", store.fingerprint),
    ]
    if store.manifest is not None and store.manifest.tokenizer is not None:
        facts.append(("tokenizer", str(store.manifest.tokenizer.get("name"))))
    columns: list[tuple[str, ...]] = [("column", "type", "shape", "one for each")]
    for name, column in store.layout.columns.items():
        each = "record" if column.per == "record" else "row" if column.axis == "rows" else f"row of {column.axis}"
        columns.append((name, column.dtype, " x ".join(map(str, column.shape)) or "single", each))
    return Section("Overview", "", [Facts(facts), Table(_splits(store, records_name, rows_name)), Table(columns)])


def _splits(store: Store, records_name: str, rows_name: str) -> Sequence[tuple[str, ...]]:
    if store.time_cuts is not None:
        cut = "by time within each entity; ranges are below"
        return [("split", "divided"), *((name, cut) for name in store.splits)]
    rows: list[tuple[str, ...]] = [("split", records_name, rows_name, "shards", f"share of {rows_name}")]
    for name in store.splits or ("all",):
        part = store.split(name) if store.splits else store
        share = part.num_rows / max(store.num_rows, 1)
        rows.append((name, f"{part.num_records:,}", f"{part.num_rows:,}", f"{part.num_shards:,}", f"{share:.1%}"))
    return rows


def _origin(store: Store, made: Mapping[str, Any]) -> Section:
    """Where the data came from, and what was left out."""
    if not made:
        where = (
            "is in its provenance.json, which is not read from a bucket"
            if "://" in (store.path or "")
            else "is not recorded"
        )
        return Section("Origin", "", [Note(f"Where the store came from {where}.")])
    facts = [("written (UTC)", str(made.get("time", ""))), ("command", _words(made.get("command")))]
    versions = made.get("versions")
    if isinstance(versions, Mapping):
        facts.append(("versions", ", ".join(f"{name} {value}" for name, value in versions.items())))
    plan = made.get("plan")
    sources = plan.get("sources") if isinstance(plan, Mapping) else None
    if isinstance(sources, (Mapping, list)):
        names = list(map(str, sources))
        facts.append(
            ("sources", f"{_count(len(names), 'file or folder', 'files and folders')}, such as {', '.join(names[:3])}")
        )
    report = report_of(made)
    dropped = report.get("dropped")
    if isinstance(dropped, Mapping):
        facts.append(("dropped", ", ".join(f"{why}: {count}" for why, count in dropped.items() if count) or "nothing"))
    notes = [note for found in (report.get("notes"), made.get("notes")) if isinstance(found, list) for note in found]
    facts += [("note", note) for note in list(dict.fromkeys(map(str, notes)))[:10]]
    return Section("Origin", "How the store was made, as its provenance.json says.", [Facts(facts)])


def _count(count: int, noun: str, plural: str = "") -> str:
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def _words(command: Any) -> str:
    return " ".join(map(str, command)) if isinstance(command, list) else str(command or "")


def _shards(store: Store) -> Section:
    about = "A shard is a folder of files. Shards of one size load evenly; a very small one costs nothing."
    few = min(store.num_shards, MANY_SHARDS)
    rows = np.array([store.shard(k).num_rows for k in range(few)], np.int64)
    if not few:
        return Section("Shards", about, [Note("There are no shards.")])
    note = "" if few == store.num_shards else f"the first {few:,} of {store.num_shards:,}"
    facts = [("shards", f"{store.num_shards:,}"), ("rows in the largest", f"{rows.max():,}")]
    if few > 1:
        facts += [("rows in the median", f"{np.median(rows):,.0f}"), ("rows in the smallest", f"{rows.min():,}")]
    chart = histogram("Rows of a shard", rows, note) if few > 1 else None
    return Section("Shards", about, present([Facts(facts), chart]))
