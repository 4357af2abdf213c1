"""What commands about training share: the JSON at the end of a run, and the extras they need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError


def summary(run: Path, stopped_by: int) -> dict[str, Any]:
    """What a program wants to know of a run that has ended."""
    from millrace.train.checkpoint import Checkpoints
    from millrace.train.metrics import read_metrics

    lines, checkpoints = read_metrics(run), Checkpoints(run / "checkpoints")
    latest, best = checkpoints.named("latest"), checkpoints.named("best")
    last = {key: next((line[key] for line in reversed(lines) if key in line), None) for key in ("loss", "val_loss")}
    step = 0 if latest is None else checkpoints.read(latest).step
    return {"run": str(run), "step": step, **last, "latest": latest, "best": best, "stopped_by": stopped_by}


@contextlib.contextmanager
def training_extras() -> Iterator[None]:
    """Around imports of the trainer: says which extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise ConfigError(f"this needs {error.name}: pip install 'millrace[torch]'") from error
