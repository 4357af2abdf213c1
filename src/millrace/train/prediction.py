"""Forecasts after the last row of a series: the rows that are not there yet.

``predict`` gives one entity. ``predictions`` gives all of them in batches, so memory does not grow with their number.
``prediction_table.py`` writes them to a file; ``backtest.py`` compares earlier forecasts with what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from millrace.errors import ConfigError
from millrace.ragged import Array, Int64s, Spans
from millrace.store.store import Store
from millrace.train.data import windows_of
from millrace.train.models.forecaster import Forecaster
from millrace.train.open_run import TrainedModel, not_for
from millrace.view.view import View
from millrace.view.windows import Windows

BATCH = 1024  # entities at once
RECENT = 512  # rows that show the usual step of an entity
DAY = np.timedelta64(1, "D")
SHORTEST_MONTH = 28 * DAY


@dataclass(frozen=True)
class Prediction:
    """The rows after the last one of an entity, in the units of the source.

    ``times`` are datetimes if the store knows their unit, and row numbers if it has no times.
    """

    entity: str
    targets: list[str]
    times: Array  # (H,)
    values: Array  # (H, T), float64


class LastRows(View):
    """The last ``lookback`` rows of each record, with the fields of a view of windows; sample i is record i."""

    def __init__(self, view: Windows) -> None:
        self.store, self._lookback = view.store, view.lookback
        inside = (field.axis is None or field.first + (field.length or 0) <= view.lookback for field in view.fields)
        self.fields = tuple(field for field, is_in in zip(view.fields, inside, strict=True) if is_in)

    def __len__(self) -> int:
        return self.store.num_records

    def spans(self, samples: npt.ArrayLike, axis: str | None = None) -> Spans:
        ends = self.store.offsets[np.asarray(samples) + 1]
        return Spans(ends - self._lookback, ends)

    def spec(self) -> dict[str, Any]:
        raise ConfigError("the last rows of a store are only read here; make a view of Windows")


class Predictor:
    """A trained forecaster over a store: that of its run, or one that continues it."""

    def __init__(self, trained: TrainedModel, store: Store | None = None) -> None:
        self._model = forecaster_of(trained)
        self.store: Store = trained.store if store is None else store
        if "known_future" in trained.config.data.include:
            raise ConfigError(
                "the run was trained with data.include = 'known_future', and the store has no values after its last rows; "
                "train without it to forecast beyond them"
            )
        self._view = windows_of(self.store, trained.config.data)
        if store is not None:
            _check_alike(trained, self._view, store)
        self._last = LastRows(self._view)
        self.targets = [str(label) for label in self._view.labels["y"]]

    @property
    def horizon(self) -> int:
        return self._view.horizon

    @property
    def min_rows(self) -> int:
        """Rows that an entity needs: the lookback, and two for the step of its times."""
        return max(self._view.lookback, 2 if "time" in self.store.columns else 1)

    def is_long_enough(self) -> npt.NDArray[np.bool_]:
        """For each record, whether it can be forecast."""
        return np.asarray(np.diff(self.store.offsets) >= self.min_rows)

    def values(self, records: Int64s) -> Array:
        """(records, H, T), in the units of the source."""
        return in_units(self.store, self._view, run_model(self._model, self._last[records]), records)

    def times(self, record: int) -> Array:
        """(H,), continued by the entity's usual step."""
        first, last = (int(edge) for edge in self.store.offsets[record : record + 2])
        count = self._view.lead + self._view.horizon
        if "time" not in self.store.columns:
            return np.arange(last - first, last - first + count)[self._view.lead :]
        unit = (self.store.meta.get("time") or {}).get("unit")
        recent = np.asarray(self.store.columns["time"][max(first, last - RECENT) : last])
        times = next_times(recent, unit, count)[self._view.lead :]
        return times if unit is None else times.astype(f"datetime64[{unit}]")

    def names(self, records: Int64s) -> list[str]:
        if "name" not in self.store.columns:
            return [str(record) for record in records]
        return [str(name) for name in self.store.columns["name"][records]]


def predict(trained: TrainedModel, entity: str | int, store: Store | None = None) -> Prediction:
    """The rows after the last one of an entity, given by name or record number."""
    predictor = Predictor(trained, store)
    record = record_of(predictor.store, str(entity))
    rows = int(np.diff(predictor.store.offsets[record : record + 2])[0])
    if rows < predictor.min_rows:
        raise ConfigError(
            f"entity {entity!r} has {rows:,} rows, a forecast needs {predictor.min_rows:,}; choose another"
        )
    return next(predictions(predictor, np.array([record])))[0]


def predictions(
    predictor: Predictor, records: Int64s, progress: Callable[[int, int], None] = lambda done, of: None
) -> Iterator[list[Prediction]]:
    """Batches of forecasts for these records."""
    for first in range(0, len(records), BATCH):
        progress(first, len(records))
        some = records[first : first + BATCH]
        each = zip(predictor.names(some), some, predictor.values(some), strict=True)
        yield [Prediction(name, predictor.targets, predictor.times(int(k)), values) for name, k, values in each]


def forecaster_of(trained: TrainedModel) -> Forecaster:
    """The model, if it can forecast."""
    if not isinstance(trained.model, Forecaster):
        raise ConfigError(not_for(trained, "forecasts nothing", "generate"))
    return trained.model


def run_model(model: Forecaster, batch: Any) -> Array:
    """(B, H, T): what the model forecasts for a batch of arrays, as it was scaled."""
    tensors = {name: torch.from_numpy(value) for name, value in batch.items() if value.dtype != object}
    with torch.no_grad():
        return np.asarray(model.forecast(tensors).numpy())


def target_numbers(view: Any) -> list[int]:
    """The features of y, by their numbers in the store."""
    return list(range(view.fields[1].tail[-1])) if view.target is None else list(view.target)


def in_units(store: Any, view: Any, values: Array, entity: Any) -> Array:
    """Values of targets in the units of the source, if the store knows its scaling."""
    if scaling_of(store) is None:
        return values
    return np.asarray(store.inverse(values, features=target_numbers(view), entity=entity))


def scaling_of(store: Any) -> Any:
    return store.meta.get("scaling") if store.manifest is None else store.manifest.scaling


def chosen_targets(wanted: Sequence[str], targets: list[str]) -> list[int]:
    """The numbers of the targets asked for; of all targets if none is."""
    unknown = [name for name in wanted if name not in targets]
    if unknown:
        raise ConfigError(f"target {unknown[0]!r} is not forecast by this run; expected one of {', '.join(targets)}")
    return [targets.index(name) for name in dict.fromkeys(wanted)] or list(range(len(targets)))


def record_of(store: Any, entity: str) -> int:
    """The record of an entity, given by name or number."""
    names = store.columns["name"][:].tolist() if "name" in store.columns else []
    if entity in names:
        return int(names.index(entity))
    if entity.isdigit() and int(entity) < store.num_records:
        return int(entity)
    some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    raise ConfigError(
        f"entity {entity!r} is not in {store.path}; it has {store.num_records:,} ({some}): give a name, or a number from 0 to "
        f"{store.num_records - 1}"
    )


def _check_alike(trained: TrainedModel, view: Windows, store: Store) -> None:
    """Refuses a store whose rows mean something else than those of the training."""
    before = windows_of(trained.store, trained.config.data)
    for what, old, new in (
        ("features", before.labels, view.labels),
        ("scaling", scaling_of(trained.store), scaling_of(store)),
        ("categories", trained.store.meta.get("categories"), store.meta.get("categories")),
    ):
        if old != new:
            raise ConfigError(
                f"{store.path} has other {what} than {trained.store.path}, on which the model was trained; give a store "
                "that continues it (millrace prepare table --append), or train again"
            )


def next_times(times: Int64s, unit: str | None, count: int) -> Int64s:
    """The ``count`` times after the last of at least two, by their usual step.

    The step is a number of months if every time lies at the same place of its month. Else it is the most frequent
    difference, or the median difference if none is frequent.

    >>> next_times(np.array([0, 10, 20, 50, 60]), None, 3).tolist()
    [70, 80, 90]
    """
    if unit is not None:
        by_months = _next_by_months(times.astype(f"datetime64[{unit}]"), count)
        if by_months is not None:
            return by_months.astype(f"datetime64[{unit}]").astype(np.int64)
    return np.asarray(times[-1] + _usual_step(np.diff(times)) * np.arange(1, count + 1), np.int64)


def _usual_step(steps: Int64s) -> int:
    steps = steps[steps > 0]
    if not len(steps):
        return 0  # all rows have the same time
    values, counts = np.unique(steps, return_counts=True)
    is_frequent = 2 * counts.max() >= len(steps)
    return int(values[counts.argmax()] if is_frequent else np.median(steps))


def _next_by_months(dates: Array, count: int) -> Array | None:
    """The next dates by months, if all dates are the same day of their month, or its last day."""
    for shift in (0 * DAY, DAY):  # a last day of a month plus one day is a first day
        months = (dates + shift).astype("datetime64[M]")
        rest = dates + shift - months
        is_same = (rest == rest[0]).all() and rest[0] < (SHORTEST_MONTH if shift == 0 * DAY else DAY)
        numbers: Int64s = months.astype(np.int64)
        steps = numbers[1:] - numbers[:-1]
        if is_same and (steps > 0).all():
            step = _usual_step(steps)
            return np.asarray((months[-1] + step * np.arange(1, count + 1)) + rest[0] - shift)
    return None
