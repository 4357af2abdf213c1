"""A training run for programs: ``mr.open_run(folder)``, and the trained model in it. Torch is imported when needed."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.store.store import Store
    from millrace.train.prediction import Prediction
    from millrace.train.settings import Config


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


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, with its configuration, its store and its step."""

    model: Any
    config: Config
    store: Any
    step: int

    def predict(self, store: Store | None = None, entity: str | int = 0) -> Prediction:
        """Forecasts the rows after the last one of an entity, in the units of the source.

        Without ``store`` it is the one of the training. Another one must have the same features and scaling, such as the
        same store after an append. ``entity`` is a name or a record number. The result has ``times`` (horizon,), ``values``
        (horizon, targets) and the names of the ``targets``.
        """
        from millrace.train.prediction import predict

        return predict(self, entity, store)


def not_for(trained: TrainedModel, why: str, command: str) -> str:
    """Why a command has no use for a model, and what has."""
    kind = trained.config.model.kind
    if ":" not in kind:
        return f"the run trained {kind!r}, which {why}; see millrace {command}"
    return (
        f"the run trained {kind!r}, a model of your own, which {why} here; call it yourself: "
        f"mr.open_run(RUN).model(own={kind!r}).model"
    )


def load_model(
    run: Path, checkpoint: str = "latest", *, own: str | None = None, store: str | None = None
) -> TrainedModel:
    """What ``TrainingRun.model`` returns, whole even if it was saved in shards.

    A run folder may come from somebody else. So a ``module:callable`` model, which is code, is only called if ``own``
    names it.
    """
    from millrace.errors import ConfigError
    from millrace.train import data, model_state
    from millrace.train.checkpoint import Checkpoints
    from millrace.train.run_folder import existing_run

    found = existing_run(run)
    kind = found.config.model.kind
    if ":" in kind and own != kind:
        raise ConfigError(
            f"{run} was trained with {kind!r}, which is code that this would run; if you trust it, name it: "
            f"--model {kind}"
        )
    checkpoints = Checkpoints(run / "checkpoints")
    if checkpoint not in ("latest", "best"):
        raise ConfigError(f"checkpoint {checkpoint!r}; expected latest or best")
    name = checkpoints.pick(checkpoint)
    if name is None:
        raise ConfigError(f"{run} has no {checkpoint} checkpoint yet; run millrace train until its first one")
    if checkpoint == "latest" and (newest := checkpoints.names()[-1]) != name:
        warnings.warn(
            f"{checkpoints.folder / checkpoint} names {name}, so this is its model, though {newest} is there too; "
            f"write {newest} into that file unless you chose the earlier one",
            stacklevel=3,
        )
    pinned = data.open_pinned(store or found.store, found.fingerprint)
    model = data.build_model(found.config, pinned, data.training_view(pinned, found.config))
    saved = checkpoints.check(name)
    model_state.load(checkpoints.folder / name, saved, model, None)
    return TrainedModel(model.eval(), found.config, pinned, saved.step)
