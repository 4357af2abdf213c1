"""Batch: what the training loop receives."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError
from millrace.ragged import Array, Int64s, Ragged


class Marks(NamedTuple):
    """Positions, samples and validity of a batch, or of several made together, as the core wrote them in one piece of memory.

    Most loops never look at them, so arrays are made of it when one is asked for.
    """

    memory: bytes
    total: int  # samples of all batches in it
    size: int  # of this one
    first: int = 0

    def arrays(self) -> list[Array]:
        found, begin = [], 0
        for dtype in MARKS.values():
            found.append(np.frombuffer(self.memory, dtype, self.size, begin + self.first * dtype.itemsize).copy())
            begin += aligned(self.total * dtype.itemsize)
        return found


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
        marks: Marks | None = None,
    ) -> None:
        super().__init__(values)
        if marks is None:
            self.positions, self.samples, self.valid = positions, samples, valid
        else:
            self._marks = marks

    def __getattr__(self, name: str) -> Any:
        if name in MARKS:
            return self._look_at(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the batch has no {name!r}; it has {', '.join(self)}") from None

    def _look_at(self, mark: str) -> Any:
        """Threads may look at once: each finds the same arrays, and what was set before stays."""
        own = self.__dict__
        if (marks := own.get("_marks")) is not None:
            for name, array in zip(MARKS, marks.arrays(), strict=True):
                own.setdefault(name, array)
            own.pop("_marks", None)
        if mark not in own:
            raise AttributeError(f"the batch has no {mark!r}")
        return own[mark]

    @property
    def num_samples(self) -> int:
        """Rows of the batch, padding included."""
        marks = self.__dict__.get("_marks")
        if marks is not None and "positions" not in self.__dict__:
            return int(marks.size)
        if self.positions is not None:
            return len(self.positions)
        return len(next(iter(self.values()))) if self else 0

    def micro(self, count: int) -> list[Batch]:
        """``count`` contiguous slices, as views, for gradient accumulation."""
        total = self.num_samples
        if not 1 <= count <= total:
            raise ConfigError(f"micro({count}) of a batch of {total}; expected 1 to {total} parts")
        if count == 1:
            return [self.__copy__()]
        ends = [part * total // count for part in range(count + 1)]
        return [self._part(slice(first, last)) for first, last in pairwise(ends)]

    def __copy__(self) -> Batch:
        made = Batch.__new__(Batch)
        made.update(self)
        made.__dict__ |= self.__dict__
        return made

    def _part(self, rows: slice) -> Batch:
        marks = {name: None if (mark := getattr(self, name)) is None else mark[rows] for name in MARKS}
        return Batch({name: value[rows] for name, value in self.items()}, **marks)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {_describe(value)}" for name, value in self.items())
        return f"<Batch of {self.num_samples}: {fields}>"


MARKS = {"positions": np.dtype(np.int64), "samples": np.dtype(np.int64), "valid": np.dtype(bool)}
ALIGN = 256  # of what lies in a slot, as in core.h


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def check_names(names: Mapping[str, Any] | list[str]) -> None:
    """Refuses columns that would hide an attribute of Batch."""
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"a batch has column {name!r}; names are strings")
        if name in (*MARKS, "_marks") or hasattr(Batch, name):
            raise ConfigError(
                f"a batch cannot have a column named {name!r}, which Batch uses itself; rename the column"
            )


def _describe(value: Any) -> str:
    if isinstance(value, Ragged):
        return f"ragged of {len(value.values)} rows"
    return f"{getattr(value, 'dtype', type(value).__name__)}{list(np.shape(value))}"
