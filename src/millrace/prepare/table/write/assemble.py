"""From measured entities to the tasks of shards, the store's metadata, and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millrace.prepare.table.notes import list_names, sparse_note
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.read.part import PartDone
from millrace.prepare.table.read.sources import Survey
from millrace.prepare.table.settle.clean import calendar_names
from millrace.prepare.table.settle.index import Index
from millrace.prepare.table.settle.measure import Fitted
from millrace.prepare.table.settle.splits import SPLITS, rows_by_split
from millrace.prepare.table.settle.time_steps import irregular_note
from millrace.prepare.table.write import shards
from millrace.ragged import Array
from millrace.store.layout import Column


class Settled(NamedTuple):
    """All that shards, metadata and report are made from, once the train rows are measured."""

    options: TableOptions
    survey: Survey
    entities: Index
    fitted: Fitted
    columns: Mapping[str, Column]

    @property
    def row_bytes(self) -> int:
        return sum(column.item_bytes for column in self.columns.values() if column.axis is not None)


def split_rows(options: TableOptions, fitted: Fitted) -> dict[str, int]:
    """Rows of each split that was asked for."""
    if options.has_time_split:
        return rows_by_split(fitted.cuts, fitted.rows, options.time_splits)
    asked = (True, options.val or options.val_entities, options.test or options.test_entities)
    return {split: int(fitted.rows[fitted.splits == k].sum()) for k, split in enumerate(SPLITS) if asked[k]}


def shard_tasks(
    folder: Path, settled: Settled, static: Array, first_numbers: Mapping[str, int]
) -> list[shards.ShardTask]:
    """The shards of all entities that have rows; ``first_numbers`` are the first free ones of each split."""
    options, survey, index, fitted, columns = settled
    scaling = fitted.scaling.to_manifest()
    names, rows, cuts, numbers = index.names, fitted.rows.tolist(), fitted.cuts.tolist(), static.tolist()
    codes = np.nan_to_num(index.static[:, len(survey.schema.role.static) :]).astype(int).tolist()
    tasks = []
    for k, split in enumerate(SPLITS):
        mine = np.flatnonzero((fitted.splits == k) & (fitted.rows > 0))
        cut = shards.cut_shards(fitted.rows[mine], settled.row_bytes, options.shard_bytes)
        for number, (first, last) in enumerate(cut, start=first_numbers.get(split, 0)):
            entities = tuple(
                shards.Entity(
                    entity, names[entity], rows[entity], tuple(cuts[entity]), tuple(numbers[entity]), tuple(codes[entity]),
                    b"" if fitted.each is None else fitted.each[entity].tobytes(),
                )
                for entity in mine[first:last].tolist()
            )  # fmt: skip
            tasks.append(
                shards.ShardTask(split, number, entities, str(folder), options, survey.schema, scaling, columns)
            )
    return tasks


def make_report(settled: Settled, done: Sequence[PartDone], tasks: Sequence[shards.ShardTask]) -> dict[str, Any]:
    """The report of a run, without its duration."""
    options, survey, index, fitted, _ = settled
    filled = shards.filled_cells(tasks)
    dropped = sum((Counter(part.dropped) for part in done), Counter(fitted.dropped))
    if survey.skipped:
        dropped["files that cannot be used"] = survey.skipped
    if survey.pruned:
        dropped["where, by row group"] += survey.pruned
    nulls, infinite = (np.sum([getattr(part, what) for part in done], axis=0) for what in ("nulls", "infinite"))
    statistics = fitted.scaling.statistics
    described = {
        name: {
            **{key: statistics[key][k] for key in ("mean", "std", "min", "max")},
            "nulls": int(nulls[k]), "infinite": int(infinite[k]), "filled": int(filled[0][k]), "leading": int(filled[1][k]),
        }
        for k, name in enumerate(survey.schema.role.features)
    }  # fmt: skip
    notes = list(survey.notes)
    rows = max(1, sum(part.rows for part in done))
    notes += filter(None, (
        irregular_note(fitted.steps or {}, survey.schema.time_unit),
        sparse_note({name: (nulls[k] + infinite[k]) / rows for k, name in enumerate(described)}),
    ))  # fmt: skip
    if options.fit_on == "all":
        notes.append("the scaling was fitted on all rows (--fit-on all), val and test too")
    if names := list(map(repr, fitted.scaling.constant)):
        notes.append(f"one value in the train rows: {list_names(names)}; stored less that value, not divided")
    if names := list(map(repr, fitted.scaling.empty)):
        notes.append(f"no value in the train rows: {list_names(names)}; stored 0 where missing, else as they are")
    if fitted.borrowed:
        notes.append(
            f"{fitted.borrowed} entities have a feature with fewer than 2 train values: scaled there as all are"
        )
    role = survey.schema.role
    labels = (*role.categorical, *role.static, *role.static_categorical)
    unlabelled = np.sum([part.unlabelled for part in done], axis=0, dtype=np.int64)
    missing = np.concatenate((unlabelled, (~np.isfinite(index.static)).sum(axis=0)))
    return {
        "entities": int((fitted.rows > 0).sum()),
        "rows": split_rows(options, fitted),
        "rows_read": sum(part.rows_read for part in done) + survey.pruned,
        "rows_sorted": sum(part.rows_sorted for part in done),
        "dropped": dict(sorted(dropped.items())),
        "columns": described,
        "missing": {name: int(count) for name, count in zip(labels, missing, strict=True) if count},
        "shards": len(tasks),
        "bytes": int(fitted.rows.sum()) * settled.row_bytes,
        "notes": notes,
    }


def make_meta(settled: Settled, static_scaling: dict[str, Any] | None, report: dict[str, Any]) -> dict[str, Any]:
    """What the store says of its columns.

    ``time`` says how to read the column of that name: as int64 counts of ``unit`` (D, s, ms, us or ns) since 1970-01-01
    UTC. The unit is one for the whole store: that of Parquet files; for CSV files s, or D for dates alone. Without a
    ``zone`` local times are counted as if they were UTC. Without a ``unit`` times are the plain numbers of the source.
    """
    options, survey, index, fitted, _ = settled
    role = survey.schema.role
    waves = calendar_names(options.calendar)
    meta: dict[str, Any] = {
        "features": [*role.features, *waves],
        "time": {"column": options.time, "unit": survey.schema.time_unit, "zone": survey.schema.time_zone},
        **({} if fitted.times is None else {"cut_times": list(fitted.times)}),
        "entity": list(options.entity),
        "report": report,
    }
    if role.inputs != role.features:
        meta["inputs"] = [*role.inputs, *waves]
    if role.target:
        meta["target"] = list(role.target)
    for name in ("categorical", "static", "static_categorical"):
        if getattr(role, name):
            meta[name] = list(getattr(role, name))
    if index.categories:
        meta["categories"] = {name: list(values) for name, values in index.categories.items()}
    if role.known_future or waves:
        meta["known_future"] = [*role.known_future, *waves]
    if static_scaling is not None:
        meta["static_scaling"] = static_scaling
    return meta
