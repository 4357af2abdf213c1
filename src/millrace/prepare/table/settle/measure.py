"""Between the passes, in the parent: cuts, statistics and scalings of all entities, from what workers measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.errors import ConfigError, SourceError
from millrace.prepare.engines.engine import Engine
from millrace.prepare.progress import Progress
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.read.schema import Role
from millrace.prepare.table.read.sources import Survey
from millrace.prepare.table.settle import fit
from millrace.prepare.table.settle.clean import calendar_names
from millrace.prepare.table.settle.index import Index
from millrace.prepare.table.settle.splits import cut_times, entity_splits
from millrace.ragged import Array, Int64s
from millrace.scaling.moments import Moments
from millrace.scaling.quantiles import QuantileSearch, quartiles_of
from millrace.scaling.scaler import Scaling, center_and_scale


class Fitted(msgspec.Struct):
    """What is known of every entity once the train rows are measured."""

    rows: Any  # int64 (entities,); 0: it was dropped
    cuts: Any  # int64 (entities, cuts)
    splits: Any  # int64 (entities,): which set of shards
    scaling: Scaling
    each: Any  # float64 (entities, 2, features), or None
    dropped: Counter[str]
    train_codes: Any  # bool: for the codes of all categories, whether train rows have them
    is_train: Any  # bool (entities,): those with a train row
    times: Any = None  # at which the splits are cut; None: by rows of each entity, or not at all
    steps: Any = None  # how often each step in time occurs; see time_steps.py
    borrowed: int = 0  # entities that take the scaling of all for some feature


class Measuring:
    """Measures the train rows of an index, once its parts are read."""

    def __init__(self, folder: Path, options: TableOptions, survey: Survey, pool: Engine, progress: Progress) -> None:
        self._folder, self._options, self._survey, self._pool, self._progress = folder, options, survey, pool, progress

    def run(
        self,
        index: Index,
        times: Sequence[Any] | None = None,
        after: Mapping[int, Any] | None = None,
        scaling_of: Callable[[Moments, int], Scaling] | None = None,
    ) -> Fitted:
        """Rows, cuts, splits and scaling of every entity.

        An append gives the ``times`` of its store's cuts, the last time of each entity there (``after``), and a
        function that gives the scaling (``scaling_of``).
        """
        options, features = self._options, len(self._survey.schema.role.features)
        if times is None:
            ends = index.runs["first"].min().item(), index.runs["last"].max().item()
            times = cut_times(options, self._survey.schema, *ends)
        splits = entity_splits(index.names, options)
        train = (splits == 0) | (options.fit_on == "all")
        known = after or {}
        if times is None and options.has_time_split and options.fit_on == "train":
            train[list(known)] = False  # cut by shares of rows: the new rows of a known entity are of its last split
        tasks = [
            fit.FitTask(
                number, first, last, str(self._folder), options, self._survey.schema, None if times is None else tuple(times),
                train[first:last].tobytes(), {entity: known[entity] for entity in range(first, last) if entity in known},
            )
            for number, (first, last) in enumerate(fit.groups(index.rows))
        ]  # fmt: skip
        results: dict[int, fit.FitDone] = {}
        try:
            for number, result in self._pool.run(fit.fit_entities, tasks):
                results[number] = result
                self._progress("measure", len(results), len(tasks), {})
        except SourceError as error:
            raise self._with_files(error, index) from error
        ordered = [results[number] for number in range(len(tasks))]
        rows = np.concatenate([np.frombuffer(part.rows, np.int64) for part in ordered])
        cuts = np.concatenate([np.frombuffer(part.cuts, np.int64) for part in ordered]).reshape(len(rows), -1)
        moments = fit.unpack(b"".join(part.moments for part in ordered), features).merged
        quartiles = self._quartiles(tasks, ordered) if options.scale == "robust" and scaling_of is None else None
        measured = cuts[:, 0] if options.has_time_split and options.fit_on == "train" else rows
        count = int(measured[train].sum())
        scaling = self._scaling(moments, quartiles, count) if scaling_of is None else scaling_of(moments, count)
        each, borrowed = self._each(ordered, scaling, rows) if options.per_entity else (None, 0)
        dropped = sum((Counter(part.dropped) for part in ordered), Counter[str]())
        steps = sum((Counter(part.steps) for part in ordered), Counter[int]())
        codes = np.logical_or.reduce([np.frombuffer(part.train_codes, bool) for part in ordered])
        is_train = train & (measured > 0)
        return Fitted(rows, cuts, splits, scaling, each, dropped, codes, is_train, times, steps, borrowed)

    def _with_files(self, error: SourceError, index: Index) -> SourceError:
        """The error with the files that hold the entity and time it names."""
        name, at = getattr(error, "entity", None), getattr(error, "at", None)
        if name is None or at is None:
            return error
        entity = index.names.index(name)
        runs = index.runs[index.offsets[entity] : index.offsets[entity + 1]]
        parts = dict.fromkeys(runs["part"][(runs["first"] <= at) & (runs["last"] >= at)].tolist())
        pieces = [piece for part in parts for piece in self._survey.parts[index.parts.index(part)]]
        files = list(dict.fromkeys(self._survey.sources[piece.source].file.path for piece in pieces))
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        return SourceError(f"{error} (look in {files[0]!r}{more})", source=files[0], entity=name, at=at)

    def _quartiles(self, tasks: Sequence[fit.FitTask], fitted: Sequence[fit.FitDone]) -> Array:
        """Quartiles of all train rows, in passes over the parts."""
        features, parts, passes = len(self._survey.schema.role.features), [], 0
        for first in range(0, features, fit.SEARCH_FEATURES):
            search = QuantileSearch(min(fit.SEARCH_FEATURES, features - first), self._survey.schema.raw_dtype)
            while (targets := search.next_pass()) is not None:
                plain = tuple((target.bits, target.shift, target.prefixes) for target in targets)
                asked = [fit.HistogramTask(task, first, plain, done) for task, done in zip(tasks, fitted, strict=True)]
                total: Any = 0
                passes += 1
                for finished, (_, counts) in enumerate(self._pool.run(fit.count_values, asked), start=1):
                    self._progress("measure", finished, len(asked), {"quartiles": passes})
                    total = total + np.frombuffer(counts, np.int64).reshape(-1, 1 << 16)
                edges = np.cumsum([0, *(len(target.prefixes) for target in targets)]).tolist()
                search.update([total[low:high] for low, high in pairwise(edges)])
            parts.append(search.result())
        return np.concatenate(parts)

    def _scaling(self, moments: Moments, quartiles: Array | None, rows: int) -> Scaling:
        """The scaling of all features, measured over so many rows; calendar features stay as they are."""
        options, features = self._options, self._survey.schema.role.features
        fitted = Scaling.fit(
            options.scale, features, moments, quartiles, dtype=options.dtype, fit_on=options.fit_on,
            per_entity=options.per_entity, nulls=(rows - moments.count).tolist(),
        )  # fmt: skip
        return fitted.with_waves(calendar_names(options.calendar))

    def _each(self, fitted: Sequence[fit.FitDone], whole: Scaling, rows: Int64s) -> tuple[Array, int]:
        """Center and scale of every entity; those of all where it has fewer than 2 train values, and how many do so."""
        features = self._survey.schema.role.features
        moments = fit.unpack(b"".join(part.each for part in fitted), len(features))
        quartiles = None
        if self._options.scale == "robust":
            quartiles = np.concatenate([np.frombuffer(part.quartiles, np.float64) for part in fitted])
            quartiles = np.moveaxis(quartiles.reshape(-1, len(features), 3), 0, -1)
        center, scale = center_and_scale(self._options.scale, features, moments, quartiles)
        enough = moments.count >= 2
        each = np.empty((len(rows), 2, len(whole.features)))
        each[:] = np.stack((whole.center, whole.scale))
        each[:, 0, : len(features)][enough.T] = center.T[enough.T]
        each[:, 1, : len(features)][enough.T] = np.where(scale == 0, 1.0, scale).T[enough.T]
        return each, int((~enough.all(axis=0) & (rows > 0)).sum())


def scale_static(values: Array, train: Array, method: str) -> tuple[Array, dict[str, Any] | None]:
    """Static numbers scaled over the train entities, each counted once; a missing one becomes the centre, 0."""
    if not values.shape[1]:
        return np.zeros((len(values), 0), np.float32), None
    columns = [values[train, k] for k in range(values.shape[1])]
    quartiles = np.array([quartiles_of(column) for column in columns]) if method == "robust" else None
    names = [str(k) for k in range(len(columns))]
    fitted = Scaling.fit(method, names, Moments.of(columns), quartiles)
    scaled = np.nan_to_num((values - fitted.center) / fitted.scale).astype(np.float32)
    return scaled, {"center": fitted.center.tolist(), "scale": fitted.scale.tolist()}


def train_first(index: Index, fitted: Fitted, role: Role) -> Index:
    """The index with the categories of train rows numbered first, so that no later row changes their codes."""
    categories, static = dict(index.categories), index.static.copy()
    first = 0
    for name in role.categorical:
        values = index.categories[name]
        categories[name] = _move_first(values, fitted.train_codes[first + 1 : first + 1 + len(values)])
        first += len(values) + 1
    for k, name in enumerate(role.static_categorical, start=len(role.static)):
        values, codes = index.categories[name], index.static[:, k]
        categories[name] = _move_first(values, np.isin(np.arange(1, len(values) + 1), codes[fitted.is_train]))
        places = {value: number + 1 for number, value in enumerate(categories[name])}
        known = np.isfinite(codes)
        static[known, k] = np.array([0, *(places[value] for value in values)])[codes[known].astype(np.int64)]
    return index._replace(categories=categories, static=static)


def _move_first(values: Sequence[str], is_first: Array) -> tuple[str, ...]:
    return tuple(values[k] for k in np.argsort(~is_first, kind="stable").tolist())


def check_refit(scaling: Scaling) -> None:
    """Refuses ``--refit`` of a scaling that cannot be fitted from statistics alone."""
    if scaling.method == "robust" or scaling.per_entity:
        raise ConfigError("--refit needs all rows for quartiles or a scaling per entity; prepare the whole table again")


def refit_scaling(old: Scaling, moments: Moments, rows: int) -> Scaling:
    """The scaling of a store fitted again on its train rows, by their statistics, and on so many new ones."""
    width = len(moments)
    count = np.array(old.statistics["count"][:width], np.int64)
    mean, std, low, high = (
        np.array([0.0 if value is None else value for value in old.statistics[key][:width]])
        for key in ("mean", "std", "min", "max")
    )
    low, high = np.where(count > 0, low, np.inf), np.where(count > 0, high, -np.inf)
    before = Moments(count, mean, std**2 * count, low, high, np.zeros(width))
    nulls = np.array([value or 0 for value in old.statistics["nulls"][:width]]) + rows - moments.count
    return Scaling.fit(
        old.method, old.features[:width], Moments.merge(before, moments), dtype=old.dtype, fit_on=old.fit_on,
        nulls=nulls.tolist(),
    ).with_waves(old.features[width:])  # fmt: skip
