"""Earlier forecasts of a trained model for one entity, compared with what happened, and their picture."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.ragged import Array
from millrace.train.data import has_mask, windows_of
from millrace.train.open_run import TrainedModel
from millrace.train.plot import figure
from millrace.train.prediction import chosen_targets, forecaster_of, in_units, record_of, run_model, target_numbers

PANELS = 8  # of one picture; nobody reads more


@dataclass(frozen=True)
class Backtest:
    """The last horizons of one entity, oldest first: truth and forecast by target.

    ``times`` belong to ``past_rows``: datetimes if the store knows their unit, row numbers if it has no times. Values that
    were never observed are NaN in ``truth`` and ``past``.
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
        """The places of each window's rows in ``times``: (windows, H)."""
        return np.asarray(self.rows - self.past_rows[0])

    @property
    def mse(self) -> dict[str, float | None]:
        """The mean squared error of each target over its observed values; None without any."""
        squares = (self.forecast - self.truth) ** 2
        observed = [column[~np.isnan(column)] for column in np.moveaxis(squares, -1, 0)]
        means = [float(np.mean(values)) if len(values) else None for values in observed]
        return dict(zip(self.targets, means, strict=True))


def backtest(trained: TrainedModel, entity: str, *, windows: int = 4, target: Sequence[str] = ()) -> Backtest:
    """Forecasts the last ``windows`` horizons of an entity, each from the rows before it; all targets, or some."""
    model, store = forecaster_of(trained), trained.store
    record = record_of(store, entity)
    view = windows_of(store, dataclasses.replace(trained.config.data, stride=1))
    every_sample = range(len(view))
    first, last = (
        bisect.bisect_left(every_sample, r, key=lambda i: view.records([i])[0]) for r in (record, record + 1)
    )
    if first == last:
        raise ConfigError(f"entity {entity!r} has fewer rows than one window of {view.span}; choose another")
    samples = np.arange(last - 1, first - 1, -view.horizon)[:windows][::-1]
    scaled = run_model(model, view[samples])
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
    return Backtest(
        entity, [labels[k] for k in chosen], axis, times, rows, truth=past[rows - past_rows[0]][..., chosen],
        forecast=in_units(store, view, scaled, record)[..., chosen], past_rows=past_rows, past=past[:, chosen],
    )  # fmt: skip


def _observed(store: Any, column: str, rows: slice) -> Array:
    """Rows of a store, NaN for missing values, whether the model gets the mask or not."""
    values = np.asarray(store.columns[column][rows])
    values = values.reshape(len(values), -1)
    if not has_mask(store, column):
        return values
    return np.where(np.asarray(store.columns["mask"][rows]).reshape(values.shape) != 0, values, np.nan)


def _times(store: Any, rows: slice, past_rows: Array) -> tuple[str, Array]:
    """A label for the time axis and the times of rows; the row numbers if the store has no times."""
    if "time" not in store.columns:
        return "row", past_rows
    meta = store.meta.get("time", {})
    times, unit = np.asarray(store.columns["time"][rows]), meta.get("unit")
    label = str(meta.get("column") or "time") + (" (UTC)" if meta.get("zone") else "")
    return label, times if unit is None else times.astype(f"datetime64[{unit}]")


def plot_backtest(test: Backtest, path: Path) -> None:
    """Draws the forecasts against what happened, one panel for each of the first ``PANELS`` targets."""
    targets = test.targets[:PANELS]
    drawn, panels = figure(9, 1.5 + 2.5 * len(targets), len(targets))
    begins = test.times[test.places[:, 0]]
    for number, (name, axes) in enumerate(zip(targets, panels, strict=True)):
        past = test.past[:, number]
        marker = "." if np.isnan(past).any() else ""  # no line joins a value between two gaps
        axes.plot(test.times, past, color="0.35", linewidth=1.0, marker=marker, markersize=3, label="what happened")
        for window, places in enumerate(test.places):
            label = "forecast" if window == 0 else None
            axes.axvline(begins[window], color="0.85", linewidth=0.8, zorder=0)
            forecast = test.forecast[window, :, number]
            axes.plot(test.times[places], forecast, color="tab:orange", linewidth=1.8, label=label)
        axes.set_ylabel(name)
    left_out = f"; {PANELS} of {len(test.targets)} targets" if len(test.targets) > PANELS else ""
    panels[0].set_title(f"{test.entity}: {len(test.rows)} forecasts of {test.rows.shape[1]} rows{left_out}")
    panels[0].legend(frameon=False)
    panels[-1].set_xlabel(test.axis)
    if test.times.dtype.kind == "M":
        from matplotlib import dates

        concise: Any = dates.ConciseDateFormatter
        panels[-1].xaxis.set_major_formatter(concise(panels[-1].xaxis.get_major_locator()))
    try:
        drawn.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # no such folder, or an unknown format
        raise ConfigError(f"{path} cannot be drawn: {error}; give a .png in a folder that exists") from error
