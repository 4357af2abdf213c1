"""TensorBoard, if it is installed: it gets the numbers of metrics.jsonl, and never stops a run."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


class Board:
    """Writes numbers to ``RUN/tensorboard``. If TensorBoard is missing it does nothing; if it fails it says so once."""

    def __init__(self, run: Path, *, step: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._writer: Any = None
        with self._harmless():
            if importlib.util.find_spec("tensorboard") is not None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        with self._harmless():
            for name, value in values.items():
                if self._writer is not None and isinstance(value, (int, float)):
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with self._harmless():
            if self._writer is not None:
                self._writer.close()

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
            self._writer = None
            self._say(
                f"note: TensorBoard fails ({type(error).__name__}: {error}), the run goes on without it; install it again, or set "
                "train.tensorboard = false"
            )
