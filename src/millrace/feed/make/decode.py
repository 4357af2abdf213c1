"""Decodes the records of a batch one by one with the user's function, and joins the results to columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from millrace.errors import ConfigError, StageFailed, reason
from millrace.feed.batch import MARKS, Batch, check_names
from millrace.feed.line import Line
from millrace.feed.make.slots import Slots
from millrace.feed.rng import RecordRng, Rng
from millrace.feed.stages import Counters, Make, failures
from millrace.meter.usage import worked_s
from millrace.ragged import Array, Ragged

Decode: TypeAlias = Callable[[dict[str, Any], Any], Mapping[str, Any]]


class BatchDecode(Protocol):
    """A decode that fills the arrays of a whole batch itself, which saves the copy that joins its results."""

    def decode_batch(
        self,
        records: Mapping[str, Any],
        rng: Rng,
        new_array: Callable[..., Array],
        at: Callable[[int], None],
        skip: Callable[[int], None],
    ) -> Mapping[str, Any]:
        """The columns of the batch. ``rng`` gives each row the numbers that its record alone would get.

        ``new_array(name, shape, dtype)`` is memory of the feed. ``at(row)`` must be called before each record.
        ``skip(row)`` says that a row counts for nothing: ``valid`` of the batch is then False there.
        """


class DecodeMake:
    """Runs ``decode(record, rng)`` on every sample of the batches of another ``Make``, or a ``BatchDecode`` on each batch.

    Results of one shape are stacked. Results that differ in their first axis become a ``Ragged``, and so does what
    ``Ragged.one(rows)`` returns, whatever its length.
    """

    def __init__(
        self,
        source: Make[Batch],
        decode: Decode,
        line: Line,
        seed: int,
        note: Callable[..., None] | None = None,
        *,
        slots: int = 1,
    ) -> None:
        self._source, self._decode, self._line, self._seed, self._note = source, decode, line, seed, note
        self._slots = Slots(slots)
        self._function_s = 0.0

    def make(self, batch: int) -> Batch:
        given = self._source.make(batch)
        began = worked_s()
        made = self._decoded(batch, given)
        took_s = worked_s() - began
        self._function_s += took_s  # no call between read and write: threads take turns by the GIL
        return made

    def _decoded(self, batch: int, given: Batch) -> Batch:
        marks = {name: getattr(given, name).copy() for name in MARKS}
        if hasattr(self._decode, "decode_batch"):
            return self._make_whole(batch, given, marks, self._decode)
        if not len(marks["positions"]):
            return Batch(self._empty_columns(batch, marks), **marks)
        results = []
        for row, position in enumerate(marks["positions"]):
            record = {name: value[row] for name, value in dict.items(given)}
            try:
                results.append(self._decode_one(row, record, int(position)))
            except failures(self._note) as error:
                raise self._failed(batch, marks, row, error) from error
        try:
            columns = {name: _join(name, [result[name] for result in results]) for name in _names(results)}
        except _Different as error:
            raise self._failed(batch, marks, error.row, error) from error
        return Batch(columns, **marks)

    def _decode_one(self, row: int, record: dict[str, Any], position: int) -> Mapping[str, Any]:
        if self._note is not None:
            self._note("decode", row)
        return _checked(self._decode(record, RecordRng(self._seed, position)))

    def _empty_columns(self, batch: int, marks: dict[str, Any]) -> dict[str, Any]:
        """Columns without rows, where all bins of this rank are empty: those of the first sample of the global batch."""
        position = self._line.first_position(batch)
        sample = int(self._line.order.samples(np.array([position]))[0])
        try:
            result = self._decode_one(0, self._line.view[sample], position)
        except failures(self._note) as error:
            raise self._failed(batch, marks, 0, error) from error
        return {name: _join(name, [result[name]])[:0] for name in _names([result])}

    def _make_whole(self, batch: int, given: Batch, marks: dict[str, Any], decode: BatchDecode) -> Batch:
        row = 0

        def at(next_row: int) -> None:
            nonlocal row
            row = next_row
            if self._note is not None:
                self._note("decode", row)

        def skip(row: int) -> None:
            marks["valid"][row] = False

        rng = Rng.of_records(self._seed, marks["positions"])
        try:
            with self._slots.take() as slot:
                columns = _checked(decode.decode_batch(dict(dict.items(given)), rng, slot.array, at, skip))
        except failures(self._note) as error:
            raise self._failed(batch, marks, row, error) from error
        check_names(list(columns))
        return Batch(columns, **marks)

    def _failed(self, batch: int, marks: dict[str, Any], row: int, error: BaseException) -> StageFailed:
        real = row < len(marks["positions"]) and marks["positions"][row] >= 0  # padding repeats the first sample
        position = int(marks["positions"][row]) if real else self._line.first_position(batch)
        sample = int(self._line.order.samples(np.array([position]))[0])
        cause = f"ConfigError: {error}" if isinstance(error, _Different) else reason(error)
        return StageFailed(
            f"decode raised at position {position} (sample {sample}): {cause}",
            stage="decode", position=position, sample=sample,
        )  # fmt: skip

    @property
    def function_s(self) -> float:
        """Seconds in the functions of the user so far, over all threads."""
        return self._function_s + getattr(self._source, "function_s", 0.0)

    def report(self) -> Counters:
        return self._source.report()._replace(function_s=self.function_s)


class _Different(ConfigError):
    """A result that cannot be joined to those before it."""

    row: int


def _checked(result: Any) -> Mapping[str, Any]:
    if not isinstance(result, Mapping):
        raise ConfigError(f"it returned {type(result).__name__}; expected a mapping of names to arrays")
    return result


def _names(results: list[Mapping[str, Any]]) -> list[str]:
    names = list(results[0])
    check_names(names)
    for row, result in enumerate(results):
        if set(result) != set(names):
            raise _Different(f"it returned {', '.join(result)}; the samples before it {', '.join(names)}", row=row)
    return names


def _join(name: str, values: list[Any]) -> Any:
    if all(isinstance(value, str) for value in values):
        return values
    is_ragged = isinstance(values[0], Ragged)
    arrays = [np.asarray(value.values if isinstance(value, Ragged) else value) for value in values]
    first = arrays[0]
    for row, (value, array) in enumerate(zip(values, arrays, strict=True)):
        is_like = array.dtype == first.dtype and array.ndim == first.ndim and array.shape[1:] == first.shape[1:]
        if not is_like or isinstance(value, Ragged) != is_ragged:
            raise _Different(
                f"{name!r} is {array.dtype}{list(array.shape)}, and {first.dtype}{list(first.shape)} in the samples before "
                "it; only the first axis may differ",
                row=row,
            )
    if not is_ragged and all(array.shape == first.shape for array in arrays):
        return np.stack(arrays)
    offsets = np.concatenate(([0], np.cumsum([len(array) for array in arrays])))
    return Ragged.trusted(np.concatenate(arrays), offsets.astype(np.int64))
