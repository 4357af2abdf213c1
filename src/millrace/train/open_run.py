"""``mr.open_run(folder)``: a training run for programs. Torch is imported when it is needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.train.settings import Config
    from millrace.train.trained_model import TrainedModel


class TrainingRun:
    """The folder of a training run: its configuration, its numbers, its trained model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def config(self) -> Config:
        """The configuration of the last start."""
        from millrace.train.run_folder import existing_run

        return existing_run(self.folder).config

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``: ``step`` with ``loss``, or with ``val_loss``."""
        from millrace.train.metrics import read_metrics

        return read_metrics(self.folder)

    def model(self, checkpoint: str = "latest", *, own: str | None = None, store: str | None = None) -> TrainedModel:
        """The trained model at its ``latest`` or ``best`` checkpoint, on the CPU, ready to predict.

        ``own`` names the ``module:callable`` of your own model, if you trust its code. ``store`` is the path of the run's
        store, if it was moved.
        """
        from millrace.train.trained_model import load_model

        return load_model(self.folder, checkpoint, own=own, store=store)

    def __repr__(self) -> str:
        return f"<TrainingRun {self.folder}>"


def open_run(folder: str | os.PathLike[str]) -> TrainingRun:
    """Opens the folder of a training run (``millrace train --run``), for its numbers and its model.

        run = mr.open_run("runs/heat")
        run.metrics()[-1]
        run.model("best").predict(mr.open_store("sensors"), "s3").values

    ``predict`` forecasts the rows after the last one of an entity, in the units of the source.
    """
    from millrace.train.run_folder import existing_run

    existing_run(Path(folder))
    return TrainingRun(Path(folder))
