"""A trained model out of a run folder, for those who use it: generate, forecast, one's own programs.

``mr.open_run(folder).model()`` is the way there for programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from millrace.errors import ConfigError
from millrace.train import data, state
from millrace.train.checkpoint import Checkpoints
from millrace.train.run import existing_run

if TYPE_CHECKING:
    from millrace.store.store import Store
    from millrace.train.predict import Prediction
from millrace.train.settings import Config


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode with what it was trained on."""

    model: nn.Module
    config: Config
    store: Any
    step: int

    def predict(self, store: Store | None = None, entity: str | int = 0) -> Prediction:
        """Forecasts the rows after the last one of an entity, in the units of the source.

        ``store`` is the one the model was trained on where it is left out, or one that goes on from it: the same features
        and scaling, such as the same store after an append. ``entity`` is a name or a record number.

            model = mr.open_run("runs/heat").model()
            found = model.predict(mr.open_store("sensors"), "s3")
            found.times, found.values          # (horizon,), (horizon, targets); found.targets names the columns
        """
        from millrace.train.predict import predict

        return predict(self, entity, store)


def load_model(run: Path, checkpoint: str = "latest", *, own: str | None = None, store: str | None = None) -> Trained:
    """The model of a run at its ``latest`` or ``best`` checkpoint, on the CPU, whole even if it was saved in shards.

    A run folder may come from elsewhere: a model of one's own, which is code, is only made where ``own`` names it.
    ``store`` says where the store lies if it was moved.
    """
    found = existing_run(run)
    kind = found.config.model.kind
    if ":" in kind and own != kind:
        raise ConfigError(
            f"{run} was trained with {kind!r}, which is code that would be imported and called; if you trust it, name it: "
            f"--model {kind}"
        )
    checkpoints = Checkpoints(run / "checkpoints")
    if checkpoint not in ("latest", "best"):
        raise ConfigError(f"checkpoint {checkpoint!r}; expected latest or best")
    name = checkpoints.named(checkpoint)
    if name is None:
        raise ConfigError(f"{run} has no {checkpoint} checkpoint yet; run millrace train until its first one")
    opened = data.open_pinned(store or found.store, found.fingerprint)
    model = data.build_model(found.config, opened, data.training_view(opened, found.config))
    saved = checkpoints.check(name)
    state.load(checkpoints.folder / name, saved, model, None)
    return Trained(model.eval(), found.config, opened, saved.step)
