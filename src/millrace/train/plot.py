"""The picture of a run's losses, and the figure that other pictures share. Needs matplotlib, the extra ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millrace.distribution import install_command
from millrace.errors import ConfigError
from millrace.train.metrics import read_metrics


def figure(width: float, height: float, panels: int = 1) -> tuple[Any, list[Any]]:
    """A figure and the axes of its panels, one above the other over the same x. It needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"no picture can be drawn: matplotlib is not installed; {install_command('report')}"
        ) from error
    drawn = Figure(figsize=(width, height), layout="constrained")
    panel_axes = list(drawn.subplots(panels, sharex=True, squeeze=False)[:, 0])
    for axes in panel_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    return drawn, panel_axes


def plot_losses(run: Path) -> str:
    """Draws ``RUN/loss.png``; returns the line that says so, or why not."""
    lines = read_metrics(run)
    train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    val = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
    if not train:
        return "no losses to draw"
    try:
        drawn, [axes] = figure(7, 4)
    except ConfigError as error:
        return str(error)
    axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1.2, label="train")
    if val:
        axes.plot(*zip(*val, strict=True), color="tab:orange", marker="o", markersize=4, label="val")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(run.name)
    axes.legend(frameon=False)
    drawn.savefig(run / "loss.png", dpi=120)
    return f"drew {run / 'loss.png'}"
