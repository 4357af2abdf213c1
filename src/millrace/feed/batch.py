"""Batch: what the training loop receives."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.ragged import Array, Int64s, Ragged


class Batch(dict[str, Any]):
    """A dict of arrays (or tensors) by name, with the positions and samples they are.

    ``positions``, ``samples`` and ``valid`` are numpy arrays on the host; padding rows of a last batch have
    -1, -1 and False. ``batch.x`` is ``batch["x"]``. Frameworks may rebuild it from any mapping.
    """

    positions: Int64s | None
    samples: Int64s | None
    valid: Array | None

    def __init__(
        self,
        values: Any = (),
        *,
        positions: Int64s | None = None,
        samples: Int64s | None = None,
        valid: Array | None = None,
    ) -> None:
        super().__init__(values)
        self.positions, self.samples, self.valid = positions, samples, valid

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the batch has no {name!r}; it has {', '.join(self)}") from None

    @property
    def num_samples(self) -> int:
        """Rows of the batch, padding included."""
        if self.positions is not None:
            return len(self.positions)
        return len(next(iter(self.values()))) if self else 0

    def micro(self, count: int) -> list[Batch]:
        """``count`` contiguous slices, as views, for gradient accumulation."""
        total = self.num_samples
        if not 1 <= count <= total:
            raise ConfigError(f"micro({count}) of a batch of {total}; expected 1 to {total} parts")
        ends = [part * total // count for part in range(count + 1)]
        return [self._part(slice(first, last)) for first, last in pairwise(ends)]

    def _part(self, rows: slice) -> Batch:
        marks = {name: None if (mark := getattr(self, name)) is None else mark[rows] for name in MARKS}
        return Batch({name: value[rows] for name, value in self.items()}, **marks)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {_describe(value)}" for name, value in self.items())
        return f"<Batch of {self.num_samples}: {fields}>"


MARKS = ("positions", "samples", "valid")


def check_names(names: Mapping[str, Any] | list[str]) -> None:
    """Refuses columns that would hide an attribute of Batch."""
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"a batch has column {name!r}; names are strings")
        if name in MARKS or hasattr(Batch, name):
            raise ConfigError(
                f"a batch cannot have a column named {name!r}, which Batch uses itself; rename the column"
            )


def _describe(value: Any) -> str:
    if isinstance(value, Ragged):
        return f"ragged of {len(value.values)} rows"
    return f"{getattr(value, 'dtype', type(value).__name__)}{list(np.shape(value))}"
