"""``RUN/metrics.jsonl``: one object per line, steps from 1; ``loss`` on training lines, ``val_loss`` on evaluation lines.

Numbers have full precision, so that two runs can be compared bit for bit. On resume the file is cut to the whole lines up
to the checkpoint's step: what was logged after it will be done again.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.errors import TrainError

NAME = "metrics.jsonl"


class Metrics:
    """Writes the lines of a run; TensorBoard gets the same numbers where it is installed and wanted."""

    def __init__(self, run: Path, *, step: int, tensorboard: bool) -> None:
        self._file = open(run / NAME, "a+b")  # noqa: SIM115 - closed by close()
        _cut(self._file, run / NAME, step)
        self._board: Any = None
        if tensorboard and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n")
        self._file.flush()  # into the kernel's hands: a killed process loses nothing of it
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _cut(file: Any, path: Path, step: int) -> None:
    """Leaves the whole lines of steps up to ``step``; lines are in the order of steps."""
    file.seek(0)
    end = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        try:
            if json.loads(line)["step"] > step:
                break
        except (ValueError, KeyError, TypeError) as error:
            raise TrainError(f"{path} is damaged at byte {end} ({error}); move it away and run again") from error
        end += len(line)
    file.truncate(end)
    file.seek(0, 2)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The whole lines of a run."""
    data = (run / NAME).read_bytes() if (run / NAME).exists() else b""
    return [json.loads(line) for line in data.split(b"\n")[:-1]]
