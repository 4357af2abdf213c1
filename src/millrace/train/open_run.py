"""A training run as programs open it: ``mr.open_run(folder)``. Torch is imported when something of it is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.train.load import Trained
    from millrace.train.settings import Config


class TrainingRun:
    """The folder of a training run: its configuration, its numbers, its trained model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def config(self) -> Config:
        """The configuration that the run was last started with."""
        from millrace.train.run import existing_run

        return existing_run(self.folder).config

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``: ``step`` with ``loss``, or with ``val_loss``."""
        from millrace.train.metrics import read_metrics

        return read_metrics(self.folder)

    def model(self, checkpoint: str = "latest", *, own: str | None = None, store: str | None = None) -> Trained:
        """The trained model at its ``latest`` or ``best`` checkpoint, on the CPU, ready to predict.

        ``own`` names the ``module:callable`` of a model of your own, if you trust it. ``store`` says where the run's store
        lies if it was moved.
        """
        from millrace.train.load import load_model

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
    from millrace.train.run import existing_run

    existing_run(Path(folder))
    return TrainingRun(Path(folder))
