"""Forecasts of a trained model for one entity, against what happened."""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.errors import ConfigError
from millrace.ragged import Array
from millrace.train.data import windows_of
from millrace.train.load import Trained
from millrace.train.models.forecast import Forecaster
from millrace.train.plot import figure


@dataclass(frozen=True)
class Forecasts:
    """The last horizons of one entity, oldest first: rows within the record, truth and forecast by target."""

    entity: str
    targets: list[str]
    rows: Array  # (windows, H)
    truth: Array  # (windows, H, T)
    forecast: Array  # (windows, H, T)
    past_rows: Array  # (rows,)
    past: Array  # (rows, T)

    @property
    def mse(self) -> float:
        return float(np.mean((self.forecast - self.truth) ** 2))


def forecast(trained: Trained, entity: str, *, windows: int = 4) -> Forecasts:
    """Forecasts the last ``windows`` horizons of an entity, each from the rows before it."""
    model, store = trained.model, trained.store
    if not isinstance(model, Forecaster):
        raise ConfigError(
            f"the run trained {trained.config.model.kind!r}, which forecasts nothing; see millrace generate"
        )
    record = _record(store, entity)
    view = windows_of(store, dataclasses.replace(trained.config.data, stride=1))
    first, last = (
        bisect.bisect_left(range(len(view)), r, key=lambda i: view.records([i])[0]) for r in (record, record + 1)
    )
    if first == last:
        raise ConfigError(f"entity {entity!r} has fewer rows than one window of {view.span}; choose another")
    samples = np.arange(last - 1, first - 1, -view.horizon)[:windows][::-1]
    batch = view[samples]
    with torch.no_grad():
        made = model.forecast({name: torch.from_numpy(value) for name, value in batch.items() if value.dtype != object})
    origin = int(store.offsets[record])
    starts = view.spans(samples).starts - origin
    begins = starts + view.lookback + view.lead
    past_rows = np.arange(int(starts[0]), int(begins[-1]) + view.horizon)
    targets = list(range(model.shapes.features)) if view.target is None else list(view.target)

    def in_units(values: Array) -> Array:
        """As the source had them, where the store knows its scaling."""
        scaled = store.meta.get("scaling") if store.manifest is None else store.manifest.scaling
        return values if scaled is None else store.inverse(values, features=targets, entity=record)

    values = np.asarray(store.columns[view.column][past_rows[0] + origin : past_rows[-1] + 1 + origin])
    return Forecasts(
        entity=entity,
        targets=[str(label) for label in view.labels["y"]],
        rows=begins[:, None] + np.arange(view.horizon),
        truth=in_units(batch["y"]),
        forecast=in_units(made.numpy()),
        past_rows=past_rows,
        past=in_units(values.reshape(len(values), -1)[:, targets]),
    )


def _record(store: Any, entity: str) -> int:
    """The record of an entity, by its name or its number."""
    names = store.columns["name"][:].tolist() if "name" in store.columns else []
    if entity in names:
        return int(names.index(entity))
    if entity.isdigit() and int(entity) < store.num_records:
        return int(entity)
    raise ConfigError(
        f"entity {entity!r} is not in {store.path}; it has {store.num_records:,} ({', '.join(names[:5])}, ...): give a name, "
        f"or a number from 0 to {store.num_records - 1}"
    )


def plot_forecast(found: Forecasts, path: Path) -> None:
    """Draws the first target of the forecasts against what happened."""
    drawn, axes = figure(9, 4)
    axes.plot(found.past_rows, found.past[:, 0], color="0.35", linewidth=1.0, label="what happened")
    for number, rows in enumerate(found.rows):
        label = "forecast" if number == 0 else None
        axes.axvline(rows[0] - 0.5, color="0.85", linewidth=0.8, zorder=0)
        axes.plot(rows, found.forecast[number, :, 0], color="tab:orange", linewidth=1.8, label=label)
    axes.set_xlabel("row")
    axes.set_ylabel(found.targets[0])
    axes.set_title(f"{found.entity}: {len(found.rows)} forecasts of {found.rows.shape[1]} rows")
    axes.legend(frameon=False)
    try:
        drawn.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # no such folder, or a format that nobody draws
        raise ConfigError(f"{path} cannot be drawn: {error}; give a .png in a folder that is there") from error
