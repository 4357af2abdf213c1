"""A trained model from a run folder, for ``generate``, ``forecast`` and your own programs.

Programs get it by ``mr.open_run(folder).model()``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from millrace.errors import ConfigError
from millrace.train import data, model_state
from millrace.train.checkpoint import Checkpoints
from millrace.train.run_folder import existing_run

if TYPE_CHECKING:
    from millrace.store.store import Store
    from millrace.train.prediction import Prediction
from millrace.train.settings import Config


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, with its configuration, its store and its step."""

    model: nn.Module
    config: Config
    store: Any
    step: int

    def predict(self, store: Store | None = None, entity: str | int = 0) -> Prediction:
        """Forecasts the rows after the last one of an entity, in the units of the source.

        Without ``store`` it is the one of the training. Another one must have the same features and scaling, such as the
        same store after an append. ``entity`` is a name or a record number.

            model = mr.open_run("runs/heat").model()
            forecast = model.predict(mr.open_store("sensors"), "s3")
            forecast.times, forecast.values    # (horizon,), (horizon, targets); forecast.targets names the columns
        """
        from millrace.train.prediction import predict

        return predict(self, entity, store)


def load_model(
    run: Path, checkpoint: str = "latest", *, own: str | None = None, store: str | None = None
) -> TrainedModel:
    """The model of a run at its ``latest`` or ``best`` checkpoint, on the CPU, whole even if it was saved in shards.

    A run folder may come from somebody else. So a ``module:callable`` model, which is code, is only called if ``own``
    names it. ``store`` is the path of the store, if it was moved.
    """
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
    name = checkpoints.resolve(checkpoint)
    if name is None:
        raise ConfigError(f"{run} has no {checkpoint} checkpoint yet; run millrace train until its first one")
    pinned = data.open_pinned(store or found.store, found.fingerprint)
    model = data.build_model(found.config, pinned, data.training_view(pinned, found.config))
    saved = checkpoints.check(name)
    model_state.load(checkpoints.folder / name, saved, model, None)
    return TrainedModel(model.eval(), found.config, pinned, saved.step)
