"""``prepare_table``: from Parquet and CSV to a scaled series store, in two passes and constant memory.

Pass 1 decodes every file once and keeps raw rows aside; then the cuts are found and the train rows measured; pass 2
fills, scales and writes. Killed at any time, the same call continues: whole parts, measurements and shards are kept.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.errors import ConfigError, MillraceError, SourceError
from millrace.prepare.engines.local import LocalPool
from millrace.prepare.plan import check_plan, differences
from millrace.prepare.table import fit, shards
from millrace.prepare.table.clean import calendar_names, grid_step
from millrace.prepare.table.index import Index, build_index
from millrace.prepare.table.options import READING, TableOptions, make_options
from millrace.prepare.table.part import PartDone, PartTask, prepare_part
from millrace.prepare.table.report import TableReport
from millrace.prepare.table.sources import Survey, survey
from millrace.prepare.table.splits import SPLITS, check_splits, cut_times, entity_splits, rows_by_split
from millrace.ragged import Array, Int64s
from millrace.scaling.moments import Moments, merge_all
from millrace.scaling.quantiles import QuantileSearch, quantiles_of
from millrace.scaling.scaler import Scaling
from millrace.store import platform
from millrace.store.layout import Column, Layout
from millrace.store.manifest import Cuts
from millrace.store.open import open_store
from millrace.store.publish import Partial

SCRATCH = ("parts", "plan.json", "index", "fit")
PLAN_VERSION = 1
Progress = Callable[[str, int, int, Mapping[str, Any]], None]


def prepare_table(
    paths: Sequence[str] | str,
    out: str | os.PathLike[str],
    *,
    workers: int | None = None,
    append: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> TableReport:
    """Makes a series store at ``out`` from Parquet or CSV files; see ``TableOptions``.

    Everything but ``provenance.json`` is byte-identical for any number of workers and any interruptions.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    target = Path(os.path.realpath(out))
    told = progress or (lambda *_: None)
    count = workers or os.cpu_count() or 1
    if append:
        from millrace.prepare.table.append import append_table

        return append_table([os.fspath(path) for path in given], target, options, count, told)
    return Preparation([os.fspath(path) for path in given], target, make_options(options), count, told).run()


def run_task(task: Any) -> Any:
    """What a worker does, by the kind of its task."""
    if isinstance(task, PartTask):
        return prepare_part(task)
    if isinstance(task, fit.FitTask):
        return fit.fit_entities(task)
    if isinstance(task, fit.HistogramTask):
        return fit.count_values(task)
    return shards.write_shard(task)


class Fitted(msgspec.Struct):
    """What is known of every entity once the train rows are measured."""

    rows: Any  # int64 (entities,); 0: it was dropped
    cuts: Any  # int64 (entities, cuts)
    splits: Any  # int64 (entities,): which set of shards
    scaling: Scaling
    each: Any  # float64 (entities, 2, features), or None
    dropped: Counter[str]
    borrowed: int = 0  # entities that take the scaling of all for some feature


class Preparation:
    """One run, from the survey to the finished store."""

    def __init__(self, paths: list[str], out: Path, options: TableOptions, workers: int, progress: Progress) -> None:
        self._paths, self._out, self._options = paths, out, options
        self._workers, self._progress = workers, progress
        self._partial = Partial(out, scratch=SCRATCH)
        self._folder = self._partial.folder
        self._started = time.monotonic()
        self._is_mine = self._is_void = False

    def run(self) -> TableReport:
        found = survey(self._paths, self._options)
        grid_step(self._options.freq, found.schema)
        if self._options.calendar and found.schema.time_unit is None:
            raise ConfigError("--calendar needs times that are dates; these are plain numbers")
        if (self._out / "store.json").exists():
            return self._finished(found)
        self._partial.acquire()
        try:
            if self._partial.complete():
                return self._finished(found)
            return self._prepare(found)
        except MillraceError:
            if self._is_mine and (self._is_void or not any((self._folder / "parts").glob("*[0-9]/done.json"))):
                self._partial.close(remove=True)  # nothing to continue: a mended call starts afresh
            raise
        finally:
            self._partial.close(remove=False)

    def _plan(self, found: Survey) -> dict[str, Any]:
        described = {s.file.path: [s.file.size, s.file.mtime_ns, s.file.ends] for s in found.sources}
        plan = {
            "version": PLAN_VERSION, "options": msgspec.to_builtins(self._options), "sources": described,
            "order": list(described),
        }  # fmt: skip
        return json.loads(json.dumps(plan))  # type: ignore[no-any-return]

    def _finished(self, found: Survey) -> TableReport:
        """An output that is there: the same call is done at once, any other is refused."""
        store = open_store(self._out)
        path = self._out / "provenance.json"
        made = json.loads(path.read_bytes().splitlines()[0]) if path.exists() else {}
        changed = differences(made.get("plan") or {}, self._plan(found))
        if changed:
            raise ConfigError(
                f"{self._out} is finished, but with other sources or options: {'; '.join(changed[:6])}; "
                "choose another --out, add rows with --append, or remove it yourself"
            )
        return TableReport(str(self._out), store.fingerprint, False, **made["report"], seconds=0.0)

    def _prepare(self, found: Survey) -> TableReport:
        check_plan(self._folder / "plan.json", self._plan(found), self._folder, self._mended)
        self._is_mine = True
        # A user's function may end its process: not ours, where there are workers.
        apart = self._options.transform is not None and self._workers > 1
        with LocalPool(run_task, min(self._workers, max(1, len(found.parts))), apart=apart) as pool:
            done = self._read(pool, found)
            index = build_index(self._folder, done, found.schema)
            if not index.names:
                self._is_void = True
                raise SourceError(
                    "no rows are left: the files are empty, or all was dropped; look at --where and --on-error"
                )
            fit.save_index(self._folder, index)
            fitted = self._fit(pool, found, index)
            self._check(index, fitted)
            return self._write(pool, found, index, done, fitted)

    def _mended(self, old: Any, new: Any) -> Any:
        """The old plan with what may change once the rows are read; what was made of the rows goes, the parts stay."""
        options = {**new["options"], **{name: old["options"].get(name) for name in READING}}
        allowed = {**old, "options": options}
        if allowed == new:
            with platform.writing(self._folder, "removing"):
                for name in sorted({*os.listdir(self._folder)} - {"parts", "plan.json", "owner.json", "lease"}):
                    platform.remove(self._folder / name)
        return allowed

    def _read(self, pool: LocalPool, found: Survey) -> list[PartDone]:
        with platform.writing(self._folder):
            platform.make_dir(self._folder / "parts")
            platform.make_dir(self._folder / "fit")
        tasks = [
            PartTask(
                number,
                units,
                tuple(found.sources[unit.source] for unit in units),
                self._options,
                found.schema,
                str(self._folder),
            )
            for number, units in enumerate(found.parts)
        ]
        done: dict[int, PartDone] = {}
        rows = 0
        for number, result in pool.run(tasks):
            done[number] = result
            rows += result.rows_read
            self._progress("read", len(done), len(tasks), {"rows": rows})
        return [done[number] for number in range(len(tasks))]

    def _fit(self, pool: LocalPool, found: Survey, index: Index) -> Fitted:
        options, features = self._options, len(found.schema.role.features)
        times = cut_times(options, found.schema, index.runs["first"].min().item(), index.runs["last"].max().item())
        splits = entity_splits(index.names, options)
        train = (splits == 0) | (options.fit_on == "all")
        tasks = [
            fit.FitTask(
                number, first, last, str(self._folder), options, found.schema, None if times is None else tuple(times),
                train[first:last].tobytes(),
            )
            for number, (first, last) in enumerate(fit.groups(index.rows))
        ]  # fmt: skip
        results: dict[int, fit.FitDone] = {}
        for number, result in pool.run(tasks):
            results[number] = result
            self._progress("measure", len(results), len(tasks), {})
        ordered = [results[number] for number in range(len(tasks))]
        rows = np.concatenate([np.frombuffer(part.rows, np.int64) for part in ordered])
        cuts = np.concatenate([np.frombuffer(part.cuts, np.int64) for part in ordered]).reshape(len(rows), -1)
        moments = merge_all([fit.unpack(part.moments, features)[0] for part in ordered])
        quartiles = self._quartiles(pool, found, tasks, ordered) if options.scale == "robust" else None
        measured = cuts[:, 0] if options.has_time_split and options.fit_on == "train" else rows
        scaling = self._scaling(found, moments, quartiles, int(measured[train].sum()))
        each, borrowed = self._each(found, ordered, scaling, rows) if options.per_entity else (None, 0)
        dropped = sum((Counter(part.dropped) for part in ordered), Counter[str]())
        return Fitted(rows, cuts, splits, scaling, each, dropped, borrowed)

    def _quartiles(
        self, pool: LocalPool, found: Survey, tasks: Sequence[fit.FitTask], fitted: Sequence[fit.FitDone]
    ) -> Array:
        """Of all train rows, in passes over what was kept aside."""
        features, parts = len(found.schema.role.features), []
        for first in range(0, features, fit.SEARCHED):
            search = QuantileSearch(min(fit.SEARCHED, features - first), dtypes=found.schema.raw_dtype)
            while (targets := search.next_pass()) is not None:
                plain = tuple((target.bits, target.shift, target.prefixes) for target in targets)
                asked = [fit.HistogramTask(task, first, plain, done) for task, done in zip(tasks, fitted, strict=True)]
                total: Any = 0
                for _, counts in pool.run(asked):
                    total = total + np.frombuffer(counts, np.int64).reshape(-1, 1 << 16)
                edges = np.cumsum([0, *(len(target.prefixes) for target in targets)]).tolist()
                search.update([total[low:high] for low, high in pairwise(edges)])
            parts.append(search.result())
        return np.concatenate(parts)

    def _scaling(self, found: Survey, moments: Moments, quartiles: Array | None, rows: int) -> Scaling:
        """For all features, measured over so many rows; the calendar behind them stays as it is."""
        options, features = self._options, found.schema.role.features
        nulls = rows - moments.count
        fitted = Scaling.fit(
            options.scale, features, moments, quartiles, dtype=options.dtype, fit_on=options.fit_on,
            per_entity=options.per_entity, nulls=nulls.tolist(),
        )  # fmt: skip
        waves = calendar_names(options.calendar)
        if not waves:
            return fitted
        return Scaling(
            fitted.method, (*features, *waves), np.append(fitted.center, np.zeros(len(waves))),
            np.append(fitted.scale, np.ones(len(waves))), fitted.dtype, fitted.fit_on, fitted.per_entity, fitted.constant,
            fitted.empty, {key: [*values, *([None] * len(waves))] for key, values in fitted.statistics.items()},
        )  # fmt: skip

    def _each(self, found: Survey, fitted: Sequence[fit.FitDone], whole: Scaling, rows: Int64s) -> tuple[Array, int]:
        """Center and scale of every entity; one with fewer than 2 train values takes those of all, and is counted."""
        features = found.schema.role.features
        moments = [one for part in fitted for one in fit.unpack(part.each, len(features))]
        quartiles: Any = [None] * len(moments)
        if self._options.scale == "robust":
            quartiles = np.concatenate([np.frombuffer(part.quartiles, np.float64) for part in fitted])
            quartiles = quartiles.reshape(-1, len(features), 3)
        each = np.empty((len(moments), 2, len(whole.features)))
        each[:] = np.stack((whole.center, whole.scale))
        borrowed = 0
        for k, (one, known) in enumerate(zip(moments, quartiles, strict=True)):
            mine = Scaling.fit(self._options.scale, features, one, known)
            enough = one.count >= 2
            borrowed += bool(rows[k] and not enough.all())
            each[k, 0, : len(features)] = np.where(enough, mine.center, whole.center[: len(features)])
            each[k, 1, : len(features)] = np.where(enough, mine.scale, whole.scale[: len(features)])
        return each, borrowed

    def _check(self, index: Index, fitted: Fitted) -> None:
        if not fitted.rows.any():
            gone = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(fitted.dropped.items()))
            raise ConfigError(
                f"no entity has --min-rows {self._options.min_rows} rows left; the longest of {len(index.names)} was read "
                f"with {int(index.rows.max())} (dropped, {gone}): ask for fewer, or fill nulls rather than drop them"
            )
        check_splits(self._options, self._rows_by_split(fitted))

    def _rows_by_split(self, fitted: Fitted) -> dict[str, int]:
        if self._options.has_time_split:
            return rows_by_split(fitted.cuts, fitted.rows, self._options.time_splits)
        if self._options.split_by == "entity":
            asked = [
                True,
                bool(self._options.val or self._options.val_entities),
                bool(self._options.test or self._options.test_entities),
            ]
            return {
                split: int(fitted.rows[fitted.splits == k].sum())
                for k, (split, is_asked) in enumerate(zip(SPLITS, asked, strict=True))
                if is_asked
            }
        return {"train": int(fitted.rows.sum())}

    def _write(
        self, pool: LocalPool, found: Survey, index: Index, done: Sequence[PartDone], fitted: Fitted
    ) -> TableReport:
        options, schema = self._options, found.schema
        columns = shards.layout_columns(options, schema, has_mask=shards.needs_mask(options, schema))
        static, static_scaling = scale_static(
            index.static[:, : len(schema.role.static)],
            (fitted.rows > 0) & ((fitted.splits == 0) | (options.fit_on == "all")),
            options.scale,
        )
        tasks = self._shard_tasks(found, index, fitted, columns, static)
        self._partial.begin({"plan": self._plan(found)}, Layout(columns), None, resume=True)
        filled = self._write_shards(pool, tasks, len(schema.role.features))
        report = self._report(found, done, fitted, filled, len(tasks), columns)
        fields: dict[str, Any] = {
            "kind": "series", "columns": columns, "splits": tuple(dict.fromkeys(task.split for task in tasks)),
            "scaling": fitted.scaling.to_manifest(), "meta": self._meta(found, index, static_scaling, report),
        }  # fmt: skip
        if options.has_time_split:
            fields["cuts"] = Cuts(options.time_splits, gap=options.gap)
        provenance = {"plan": self._plan(found), "report": report}
        fingerprint = self._partial.publish(fields, None, provenance)
        return TableReport(str(self._out), fingerprint, True, **report, seconds=time.monotonic() - self._started)

    def _shard_tasks(
        self, found: Survey, index: Index, fitted: Fitted, columns: Mapping[str, Column], static: Array
    ) -> list[shards.ShardTask]:
        plain = {name: (column.dtype, column.shape, column.per) for name, column in columns.items()}
        scaling = fitted.scaling.to_manifest()
        row_bytes = sum(column.item_bytes for column in columns.values() if column.axis is not None)
        numbers = len(found.schema.role.static)
        tasks = []
        for k, split in enumerate(SPLITS):
            mine = np.flatnonzero((fitted.splits == k) & (fitted.rows > 0))
            for number, (first, last) in enumerate(
                shards.cut_shards(fitted.rows[mine], row_bytes, self._options.shard_bytes)
            ):
                entities = tuple(
                    shards.Entity(
                        entity, index.names[entity], int(fitted.rows[entity]), tuple(fitted.cuts[entity].tolist()),
                        tuple(static[entity].tolist()),
                        tuple(np.nan_to_num(index.static[entity, numbers:]).astype(int).tolist()),
                        b"" if fitted.each is None else fitted.each[entity].tobytes(),
                    )
                    for entity in mine[first:last].tolist()
                )  # fmt: skip
                tasks.append(
                    shards.ShardTask(
                        split, number, entities, str(self._folder), self._options, found.schema, scaling, plain
                    )
                )
        return tasks

    def _write_shards(self, pool: LocalPool, tasks: Sequence[shards.ShardTask], features: int) -> Array:
        """(2, features): cells that were filled, and those of them before the first observation."""
        kept = self._folder / "fit" / "filled.json"
        filled: dict[str, list[list[int]]] = json.loads(kept.read_bytes()) if kept.exists() else {}
        missing = []
        for task in tasks:
            name = f"{task.split}-{task.number:05d}"
            if name not in self._partial.entries or name not in filled:
                missing.append(task)
        for finished, (number, result) in enumerate(pool.run(missing), start=1):
            task = missing[number]
            filled[f"{task.split}-{task.number:05d}"] = [list(result.filled), list(result.leading)]
            with platform.writing(kept):
                platform.write_file(kept, json.dumps(filled).encode(), mode=0o644)
            self._partial.add(result.entry)
            self._progress("write", finished, len(missing), {"rows": sum(entity.rows for entity in task.entities)})
        return np.sum([*filled.values()], axis=0) if filled else np.zeros((2, features), np.int64)

    def _report(
        self,
        found: Survey,
        done: Sequence[PartDone],
        fitted: Fitted,
        filled: Int64s,
        num_shards: int,
        columns: Mapping[str, Column],
    ) -> dict[str, Any]:
        dropped = sum((Counter(part.dropped) for part in done), Counter(fitted.dropped))
        if found.pruned:
            dropped["where, by row group"] += found.pruned
        nulls, infinite = (np.sum([getattr(part, what) for part in done], axis=0) for what in ("nulls", "infinite"))
        statistics = fitted.scaling.statistics
        described = {
            name: {
                **{key: statistics[key][k] for key in ("mean", "std", "min", "max")},
                "nulls": int(nulls[k]), "infinite": int(infinite[k]), "filled": int(filled[0][k]), "leading": int(filled[1][k]),
            }
            for k, name in enumerate(found.schema.role.features)
        }  # fmt: skip
        row_bytes = sum(column.item_bytes for column in columns.values() if column.axis is not None)
        notes = list(found.notes)
        if self._options.fit_on == "all":
            notes.append("the scaling was fitted on all rows (--fit-on all), val and test too")
        for names, what, rule in (
            (fitted.scaling.constant, "one value", "less that value, not divided"),
            (fitted.scaling.empty, "no value", "0 where missing, else as they are"),
        ):
            if names:
                told = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
                notes.append(f"{what} in the train rows: {told}; stored {rule}")
        if fitted.borrowed:
            notes.append(
                f"{fitted.borrowed} entities have a feature with fewer than 2 train values: scaled there as all are"
            )
        return {
            "entities": int((fitted.rows > 0).sum()),
            "rows": self._rows_by_split(fitted),
            "rows_read": sum(part.rows_read for part in done) + found.pruned,
            "rows_sorted": sum(part.rows_sorted for part in done),
            "dropped": dict(sorted(dropped.items())),
            "columns": described,
            "shards": num_shards,
            "bytes": int(fitted.rows.sum()) * row_bytes,
            "notes": notes,
        }

    def _meta(
        self, found: Survey, index: Index, static_scaling: dict[str, Any] | None, report: dict[str, Any]
    ) -> dict[str, Any]:
        role, options = found.schema.role, self._options
        waves = calendar_names(options.calendar)
        meta: dict[str, Any] = {
            "features": [*role.features, *waves],
            "time": {"column": options.time, "unit": found.schema.time_unit, "zone": found.schema.time_zone},
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


def scale_static(values: Array, train: Array, method: str) -> tuple[Array, dict[str, Any] | None]:
    """Static numbers scaled over the train entities, each counted once; a missing one is the centre, 0."""
    if not values.shape[1]:
        return np.zeros((len(values), 0), np.float32), None
    columns = [values[train, k] for k in range(values.shape[1])]
    quartiles = np.array([quantiles_of(column) for column in columns]) if method == "robust" else None
    names = [str(k) for k in range(len(columns))]
    fitted = Scaling.fit(method, names, Moments.of(columns), quartiles)
    scaled = np.nan_to_num((values - fitted.center) / fitted.scale).astype(np.float32)
    return scaled, {"center": fitted.center.tolist(), "scale": fitted.scale.tolist()}
