"""Forecasts beyond the last row of a series: what a trained forecaster says of rows that are not there yet.

``predict`` gives one entity, ``predictions`` all of them in batches, so that memory does not grow with their number;
``forecast_table.py`` writes them to a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from millrace.errors import ConfigError
from millrace.ragged import Array, Int64s, Spans
from millrace.store.store import Store
from millrace.train.data import windows_of
from millrace.train.forecast import forecaster_of, in_units, record_of
from millrace.train.future import next_times
from millrace.train.load import Trained
from millrace.view.view import View
from millrace.view.windows import Windows

BATCH = 1024  # entities at once
RECENT = 512  # rows from which the usual step of an entity is taken


@dataclass(frozen=True)
class Prediction:
    """The rows after the last one of an entity, in the units of the source.

    ``times`` are datetimes where the store knows their unit, row numbers where it has no times.
    """

    entity: str
    targets: list[str]
    times: Array  # (H,)
    values: Array  # (H, T), float64


class LastRows(View):
    """The last ``lookback`` rows of each record, as the model of a view of windows takes them; sample i is record i."""

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
        raise ConfigError("the last rows of a store are read here only; make a view of Windows")


class Predictor:
    """A trained forecaster over a store: that of its run, or one that goes on from it."""

    def __init__(self, trained: Trained, store: Store | None = None) -> None:
        self._model = forecaster_of(trained)
        self.store: Store = trained.store if store is None else store
        if trained.config.data.include and "known_future" in trained.config.data.include:
            raise ConfigError(
                "the run was trained with data.include = 'known_future', and the store has no values behind its last rows; "
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
    def needs(self) -> int:
        """Rows of an entity that can be forecast: the lookback, and two for the step of its times."""
        return max(self._view.lookback, 2 if "time" in self.store.columns else 1)

    def is_long_enough(self) -> npt.NDArray[np.bool_]:
        """For each record."""
        return np.asarray(np.diff(self.store.offsets) >= self.needs)

    def values(self, records: Int64s) -> Array:
        """(records, H, T), in the units of the source."""
        batch = self._last[records]
        tensors = {name: torch.from_numpy(value) for name, value in batch.items() if value.dtype != object}
        with torch.no_grad():
            made = self._model.forecast(tensors).numpy()
        return in_units(self.store, self._view, made, records)

    def times(self, record: int) -> Array:
        """(H,), continued by the entity's usual step."""
        first, last = (int(edge) for edge in self.store.offsets[record : record + 2])
        count = self._view.lead + self._view.horizon
        if "time" not in self.store.columns:
            return np.arange(last - first, last - first + count)[self._view.lead :]
        unit = (self.store.meta.get("time") or {}).get("unit")
        recent = np.asarray(self.store.columns["time"][max(first, last - RECENT) : last])
        found = next_times(recent, unit, count)[self._view.lead :]
        return found if unit is None else found.astype(f"datetime64[{unit}]")

    def names(self, records: Int64s) -> list[str]:
        if "name" not in self.store.columns:
            return [str(record) for record in records]
        return [str(name) for name in self.store.columns["name"][records]]


def predict(trained: Trained, entity: str | int, store: Store | None = None) -> Prediction:
    """The rows after the last one of an entity, by its name or record number."""
    predictor = Predictor(trained, store)
    record = record_of(predictor.store, str(entity))
    rows = int(np.diff(predictor.store.offsets[record : record + 2])[0])
    if rows < predictor.needs:
        raise ConfigError(
            f"entity {entity!r} has {rows:,} rows, and a forecast needs {predictor.needs:,}; choose another"
        )
    records = np.array([record])
    return Prediction(
        predictor.names(records)[0], predictor.targets, predictor.times(record), predictor.values(records)[0]
    )


def predictions(
    predictor: Predictor, records: Int64s | None = None, progress: Callable[[int, int], None] = lambda done, of: None
) -> Iterator[list[Prediction]]:
    """Batches of forecasts of all records that are long enough, or of those given."""
    chosen = np.flatnonzero(predictor.is_long_enough()) if records is None else records
    for first in range(0, len(chosen), BATCH):
        progress(first, len(chosen))
        some = chosen[first : first + BATCH]
        made, names = predictor.values(some), predictor.names(some)
        yield [
            Prediction(name, predictor.targets, predictor.times(int(record)), values)
            for name, record, values in zip(names, some, made, strict=True)
        ]


def _check_alike(trained: Trained, view: Windows, store: Store) -> None:
    """Refuses a store whose rows mean something else than those the model was trained on."""
    before = windows_of(trained.store, trained.config.data)
    for what, old, new in (
        ("features", before.labels, view.labels),
        ("scaling", scaling_of(trained.store), scaling_of(store)),
        ("categories", trained.store.meta.get("categories"), store.meta.get("categories")),
    ):
        if old != new:
            raise ConfigError(
                f"{store.path} has other {what} than {trained.store.path}, on which the model was trained; give a store "
                "that goes on from it (millrace prepare table --append), or train again"
            )


def scaling_of(store: Store) -> Any:
    return store.meta.get("scaling") if store.manifest is None else store.manifest.scaling
