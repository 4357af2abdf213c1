"""Step: a random change of a batch in two halves, and how steps are put together and run on a device.

``draw`` takes all random numbers on the host, from the rng of the samples. ``apply`` is plain arithmetic that numpy
arrays and torch tensors share. So a GPU gives what the CPU gives, to the last bits of float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.feed.batch import MARKS, Batch
from millrace.feed.rng import Rng
from millrace.ragged import Array

Transform = Callable[[Any, Any], Mapping[str, Any]]


class Step(ABC):
    """A step of a transform: ``step(batch, rng)`` is ``step.apply(batch, step.draw(batch, rng))``.

    ``draw`` returns arrays with one row per sample. ``apply`` gets arrays or tensors and returns the columns it changes.
    """

    def draw(self, batch: Mapping[str, Any], rng: Rng) -> dict[str, Array]:
        return {}

    @abstractmethod
    def apply(self, batch: Mapping[str, Any], drawn: Mapping[str, Array]) -> dict[str, Any]: ...

    def __call__(self, batch: Mapping[str, Any], rng: Rng) -> dict[str, Any]:
        return dict(batch) | self.apply(batch, self.draw(batch, rng))


@dataclass(frozen=True)
class Compose:
    """Steps one after the other, each with new random numbers; functions ``(batch, rng)`` of your own too.

    >>> import numpy as np
    >>> from millrace.augment import Jitter, Scale
    >>> both = Compose([Scale(0.1), Jitter(0.03)])
    >>> both({"x": np.zeros((2, 8, 3), np.float32)}, Rng(7, np.array([40, 41])))["x"].shape
    (2, 8, 3)
    """

    steps: Sequence[Transform]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        for step in self.steps:
            if not callable(step):
                raise ConfigError(f"step {step!r} cannot be called; expected a function of (batch, rng)")

    def __call__(self, batch: Mapping[str, Any], rng: Rng) -> Mapping[str, Any]:
        marks = {name: getattr(batch, name) for name in MARKS} if isinstance(batch, Batch) else None
        for step in self.steps:
            batch = step(batch, rng)
            if marks is not None and not isinstance(batch, Batch):
                batch = Batch(batch, **marks)
        return batch


def on_device(batch: Batch, transform: Transform, *, seed: int = 0) -> Batch:
    """Runs a transform where the tensors of a batch are, as ``Feed(transform=..., seed=seed)`` would on the host."""
    marks = {name: getattr(batch, name) for name in MARKS}
    if marks["positions"] is None:
        raise ConfigError(
            "this batch has lost its positions, which the random numbers follow; use it as the feed gave it"
        )
    return Batch(dict(transform(batch, Rng(seed, marks["positions"]))), **marks)


def like(drawn: Array, column: Any) -> Any:
    """Drawn numbers as the column is: on its device, and floats in its type."""
    is_float = drawn.dtype.kind == "f"
    if isinstance(column, np.ndarray):
        return drawn.astype(column.dtype) if is_float else drawn
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(drawn, np.float32 if is_float else None))
    return tensor.to(column.device, column.dtype if is_float else tensor.dtype, non_blocking=True)


def where(condition: Any, one: Any, other: Any) -> Any:
    if isinstance(condition, np.ndarray):
        return np.where(condition, one, other)
    import torch

    return torch.where(condition, one, other)


def beside(drawn: Array, column: Any) -> Any:
    """One number per sample as ``like``, with as many axes as the column."""
    return like(drawn.reshape(len(drawn), *[1] * (column.ndim - 1)), column)


def column_of(batch: Mapping[str, Any], name: str, *, axes: int | None = None, floats: bool = False) -> Any:
    """A column that a step changes, checked."""
    if name not in batch:
        raise ConfigError(f"the batch has no {name!r}; it has {', '.join(batch)}: give column=")
    column = batch[name]
    if not hasattr(column, "shape") or (axes is not None and column.ndim != axes):
        found = list(column.shape) if hasattr(column, "shape") else type(column).__name__
        raise ConfigError(f"{name!r} is {found}; expected an array" + ("" if axes is None else f" of {axes} axes"))
    is_float = column.dtype.kind == "f" if isinstance(column, np.ndarray) else column.is_floating_point()
    if floats and not is_float:
        raise ConfigError(f"{name!r} is {column.dtype}; expected floats: decode to float32")
    return column


def check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={value}; expected 0 to 1")
