"""Forecasts of a trained model for one entity, against what happened."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.errors import ConfigError
from millrace.ragged import Array
from millrace.train.data import has_mask, windows_of
from millrace.train.load import Trained
from millrace.train.models.forecast import Forecaster
from millrace.train.plot import figure

PANELS = 8  # of one picture; more are not read


@dataclass(frozen=True)
class Forecasts:
    """The last horizons of one entity, oldest first: rows within the record, truth and forecast by target.

    ``times`` are those of ``past_rows``, as datetimes where the store knows their unit; without a column of times the rows.
    What was never observed is NaN in ``truth`` and ``past``.
    """

    entity: str
    targets: list[str]
    axis: str  # what ``times`` are
    times: Array  # (rows,)
    rows: Array  # (windows, H)
    truth: Array  # (windows, H, T)
    forecast: Array  # (windows, H, T)
    past_rows: Array  # (rows,)
    past: Array  # (rows, T)

    @property
    def places(self) -> Array:
        """Where the rows of each window lie in ``times``: (windows, H)."""
        return np.asarray(self.rows - self.past_rows[0])

    @property
    def mse(self) -> dict[str, float | None]:
        """By target, since each is in units of its own, over what was observed; None where nothing was."""
        squares = (self.forecast - self.truth) ** 2
        each = [column[~np.isnan(column)] for column in np.moveaxis(squares, -1, 0)]
        return {
            name: float(np.mean(found)) if len(found) else None for name, found in zip(self.targets, each, strict=True)
        }


def forecast(trained: Trained, entity: str, *, windows: int = 4, target: Sequence[str] = ()) -> Forecasts:
    """Forecasts the last ``windows`` horizons of an entity, each from the rows before it; some of the targets, or all."""
    model, store = forecaster_of(trained), trained.store
    record = record_of(store, entity)
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
    targets = target_numbers(view)
    of_past = slice(past_rows[0] + origin, past_rows[-1] + 1 + origin)
    past = in_units(store, view, _observed(store, view.column, of_past)[:, targets], record)
    rows = begins[:, None] + np.arange(view.horizon)
    labels = [str(label) for label in view.labels["y"]]
    chosen = chosen_targets(target, labels)
    axis, times = _times(store, of_past, past_rows)
    return Forecasts(
        entity=entity,
        targets=[labels[k] for k in chosen],
        axis=axis,
        times=times,
        rows=rows,
        truth=past[rows - past_rows[0]][..., chosen],
        forecast=in_units(store, view, made.numpy(), record)[..., chosen],
        past_rows=past_rows,
        past=past[:, chosen],
    )


def forecaster_of(trained: Trained) -> Forecaster:
    if not isinstance(trained.model, Forecaster):
        raise ConfigError(
            f"the run trained {trained.config.model.kind!r}, which forecasts nothing; see millrace generate"
        )
    return trained.model


def target_numbers(view: Any) -> list[int]:
    """The features of y among those of the store."""
    return list(range(view.fields[1].tail[-1])) if view.target is None else list(view.target)


def in_units(store: Any, view: Any, values: Array, entity: Any) -> Array:
    """Values of targets as the source had them, where the store knows its scaling."""
    scaled = store.meta.get("scaling") if store.manifest is None else store.manifest.scaling
    return values if scaled is None else store.inverse(values, features=target_numbers(view), entity=entity)


def _observed(store: Any, column: str, rows: slice) -> Array:
    """Rows of a store, NaN where it says that a value is missing, whether the model was told so or not."""
    values = np.asarray(store.columns[column][rows])
    values = values.reshape(len(values), -1)
    if not has_mask(store, column):
        return values
    return np.where(np.asarray(store.columns["mask"][rows]).reshape(values.shape) != 0, values, np.nan)


def chosen_targets(wanted: Sequence[str], targets: list[str]) -> list[int]:
    """The places of the targets that are asked for; all where none is."""
    unknown = [name for name in wanted if name not in targets]
    if unknown:
        raise ConfigError(f"target {unknown[0]!r} is not forecast by this run; expected one of {', '.join(targets)}")
    return [targets.index(name) for name in dict.fromkeys(wanted)] or list(range(len(targets)))


def _times(store: Any, rows: slice, past_rows: Array) -> tuple[str, Array]:
    """What to call the times of rows, and the times; the rows themselves where the store has none."""
    if "time" not in store.columns:
        return "row", past_rows
    told = store.meta.get("time", {})
    times, unit = np.asarray(store.columns["time"][rows]), told.get("unit")
    label = str(told.get("column") or "time") + (" (UTC)" if told.get("zone") else "")
    return label, times if unit is None else times.astype(f"datetime64[{unit}]")


def record_of(store: Any, entity: str) -> int:
    """The record of an entity, by its name or its number."""
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


def plot_forecast(found: Forecasts, path: Path) -> None:
    """Draws the forecasts against what happened, one panel for each target; of more than ``PANELS`` the first."""
    targets = found.targets[:PANELS]
    drawn, panels = figure(9, 1.5 + 2.5 * len(targets), len(targets))
    begins = found.times[found.places[:, 0]]
    for number, (name, axes) in enumerate(zip(targets, panels, strict=True)):
        past = found.past[:, number]
        marker = "." if np.isnan(past).any() else ""  # a value between two gaps has no line
        axes.plot(found.times, past, color="0.35", linewidth=1.0, marker=marker, markersize=3, label="what happened")
        for window, places in enumerate(found.places):
            label = "forecast" if window == 0 else None
            axes.axvline(begins[window], color="0.85", linewidth=0.8, zorder=0)
            axes.plot(
                found.times[places], found.forecast[window, :, number], color="tab:orange", linewidth=1.8, label=label
            )
        axes.set_ylabel(name)
    left_out = f"; {PANELS} of {len(found.targets)} targets" if len(found.targets) > PANELS else ""
    panels[0].set_title(f"{found.entity}: {len(found.rows)} forecasts of {found.rows.shape[1]} rows{left_out}")
    panels[0].legend(frameon=False)
    panels[-1].set_xlabel(found.axis)
    if found.times.dtype.kind == "M":
        from matplotlib import dates

        concise: Any = dates.ConciseDateFormatter
        panels[-1].xaxis.set_major_formatter(concise(panels[-1].xaxis.get_major_locator()))
    try:
        drawn.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # no such folder, or a format that nobody draws
        raise ConfigError(f"{path} cannot be drawn: {error}; give a .png in a folder that is there") from error
