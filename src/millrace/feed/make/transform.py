"""Batches that a user's transform makes from other batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from millrace.errors import ConfigError, StageFailed, reason
from millrace.feed.batch import Batch, Marks, check_names
from millrace.feed.line import Line
from millrace.feed.rng import Rng
from millrace.feed.stages import Counters, Make, failures
from millrace.meter.usage import worked_s

Transform: TypeAlias = Callable[[Batch, Any], Mapping[str, Any]]


class TransformMake:
    """Runs the transform on the batches of another ``Make``, with random numbers that follow the position."""

    def __init__(
        self, source: Make[Batch], transform: Transform, line: Line, seed: int, note: Callable[..., None] | None = None
    ) -> None:
        self._source, self._transform, self._line, self._seed, self._note = source, transform, line, seed, note
        self._function_s = 0.0

    def make(self, batch: int) -> Batch:
        given = self._source.make(batch)
        if self._note is not None:
            self._note("transform")
        # A copy, because the transform may change the marks of the batch it is given.
        marks = Marks.of(given)
        began = worked_s()
        try:
            result = self._transform(given, Rng(self._seed, marks.positions))
            _check_result(result, marks.size)
        except failures(self._note) as error:
            positions, samples, _ = marks.arrays()
            # A share of padding alone holds the first sample of the global batch; one of empty bins holds none.
            real = len(positions) > 0 and positions[0] >= 0
            first = int(positions[0]) if real else self._line.first_position(batch)
            raise StageFailed(
                f"the transform raised at position {first} (samples {samples[:4]}...): {reason(error)}",
                stage="transform", position=first,
            ) from error  # fmt: skip
        took_s = worked_s() - began
        self._function_s += took_s  # no call between read and write: threads take turns by the GIL
        items = dict.items(result) if isinstance(result, dict) else result.items()
        return Batch({str(name): value for name, value in items}, marks=marks)

    @property
    def function_s(self) -> float:
        """Seconds in the functions of the user so far, over all threads."""
        return self._function_s + getattr(self._source, "function_s", 0.0)

    def report(self) -> Counters:
        return self._source.report()._replace(function_s=self.function_s)


def _check_result(result: Any, num_samples: int) -> None:
    if not isinstance(result, Mapping):
        raise ConfigError(f"it returned {type(result).__name__}; expected a mapping of arrays")
    check_names(list(result))
    for name, value in result.items():
        if not hasattr(value, "__len__") or len(value) != num_samples:
            rows = len(value) if hasattr(value, "__len__") else "no"
            raise ConfigError(f"it returned {rows} rows in {name!r}; expected {num_samples}, one per sample")
