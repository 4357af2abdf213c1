"""What the commands ``train``, ``generate`` and ``forecast`` share: their options, and loading a trained model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

from typer import Argument, Option

from millrace.errors import ConfigError

RunFolder = Annotated[str, Argument(metavar="RUN", help="The run folder, as given to millrace train --run.")]
Checkpoint = Annotated[str, Option(help="Which checkpoint to use: latest or best.")]
MovedStore = Annotated[str | None, Option(help="Path of the run's store, if it was moved.")]
OwnModel = Annotated[
    str | None,
    Option(metavar="MODULE:CALLABLE", help="Your own model of the run, if you trust its code."),
]


@contextlib.contextmanager
def training_extras() -> Iterator[None]:
    """Around imports of the trainer: names the extra that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise ConfigError(f"this needs {error.name}: pip install 'millrace[torch]'") from error


def load_trained(run: str, checkpoint: str, model: str | None, store: str | None) -> Any:
    """The trained model of a run folder."""
    from pathlib import Path

    from millrace.train.open_run import load_model

    with training_extras():
        return load_model(Path(run), checkpoint, own=model, store=store)
