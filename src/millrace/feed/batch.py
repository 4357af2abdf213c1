"""Batch: what the training loop receives."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError
from millrace.ragged import Array, Int64s, Ragged, moved, pinned, shared


class Marks(NamedTuple):
    """Positions, samples and validity of a batch as the core wrote them; arrays are made when a loop asks for one."""

    memory: bytes
    total: int  # samples of all batches in the memory
    size: int  # samples of this one
    first: int = 0  # the first of them

    @classmethod
    def of(cls, batch: Batch) -> Marks:
        """Those of a batch; a later change of its arrays does not change them."""
        known = batch.__dict__.get("_marks")
        if known is not None:
            return known  # type: ignore[no-any-return]
        arrays = [np.asarray(getattr(batch, name), dtype) for name, dtype in MARKS.items()]
        padded = (array.tobytes() + bytes(aligned(array.nbytes) - array.nbytes) for array in arrays)
        return cls(b"".join(padded), len(arrays[0]), len(arrays[0]))

    @property
    def positions(self) -> Int64s:
        """Read-only."""
        return np.frombuffer(self.memory, np.int64, self.size, self.first * 8)

    def arrays(self) -> list[Array]:
        arrays, begin = [], 0
        for dtype in MARKS.values():
            arrays.append(np.frombuffer(self.memory, dtype, self.size, begin + self.first * dtype.itemsize).copy())
            begin += aligned(self.total * dtype.itemsize)
        return arrays


class Name(str):
    """A column's name that carries the marks of its batch, as ``Batch.items`` gives it.

    Frameworks rebuild a batch as ``type(batch)({name: f(value) for name, value in batch.items()})``: the marks go along.
    """

    __slots__ = ("marks",)
    marks: dict[str, Any]


class Items(ItemsView[str, Any]):
    """The columns of a batch, under names that carry its marks."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        batch: Any = self._mapping  # type: ignore[attr-defined]
        for key, value in dict.items(batch):
            name = Name(key)
            name.marks = batch.__dict__
            yield name, value


class Batch(dict[str, Any]):
    """A dict of arrays (or tensors) by name. ``batch.x`` is ``batch["x"]``.

    A column may have any name. Of one that is also an attribute, such as ``values`` or ``positions``, ``batch["values"]`` is
    the column and ``batch.values`` the attribute.

    The marks ``positions``, ``samples`` and ``valid`` are numpy arrays on the host: which samples it holds. Padding rows
    have -1, -1 and False. If a framework rebuilds a batch with another number of rows, its marks are None.
    """

    positions: Int64s | None
    samples: Int64s | None
    valid: Array | None

    def __init__(
        self, values: Any = (), *, positions: Int64s | None = None, samples: Int64s | None = None,
        valid: Array | None = None, marks: Marks | None = None,
    ) -> None:  # fmt: skip
        super().__init__(values)
        if marks is not None:
            self._marks = marks
            return
        self.positions, self.samples, self.valid = positions, samples, valid
        if known := [name.marks for name in self if type(name) is Name]:
            self._rebuild(known[0] if positions is None else {})

    def _rebuild(self, marks: dict[str, Any]) -> None:
        """Takes plain names, and the marks that the names carried, if the number of rows is the same."""
        values = {str(name): value for name, value in dict.items(self)}
        self.clear()
        self.update(values)
        rows = num_rows(values.values())
        if rows is not None and rows == num_marked(marks):
            self.__dict__.clear()
            self.__dict__ |= marks

    def items(self) -> Items:  # type: ignore[override]
        return Items(self)

    def __getattr__(self, name: str) -> Any:
        if name in MARKS:
            return self._look_at(name)
        if name == "__jax_array__":  # which JAX looks for on what is no pytree; it replaces the message of a TypeError
            raise ConfigError("JAX takes a Batch as a pytree only after `import millrace.jax`; add that import")
        if name.startswith("__"):  # Python and numpy look for these, and would take a column for a method
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the batch has no {name!r}; it has {', '.join(self)}") from None

    def _look_at(self, mark: str) -> Any:
        """Several threads may look at once: each finds the same arrays, and a mark set before stays."""
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
        count = num_marked(self.__dict__)
        return count if count is not None else len(next(iter(self.values()))) if self else 0

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """The same batch with its columns as tensors on a device; text and the marks stay on the host."""
        return self._mapped(lambda value: moved(value, device, non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch with its columns as tensors in pinned memory."""
        return self._mapped(pinned)

    def _mapped(self, function: Callable[[Any], Any]) -> Batch:
        """Columns of one axis share their offsets afterwards too."""
        once = shared(function)
        columns = {
            name: value.map(once) if isinstance(value, Ragged) else once(value) for name, value in dict.items(self)
        }
        return with_marks(columns, self.__dict__)

    def micro(self, count: int) -> list[Batch]:
        """``count`` contiguous slices, as views, for gradient accumulation."""
        total = self.num_samples
        if not 1 <= count <= total:
            raise ConfigError(f"micro({count}) of a batch of {total}; expected 1 to {total} parts")
        if count == 1:
            return [self.__copy__()]
        ends = [part * total // count for part in range(count + 1)]
        return [part_of(self, slice(first, last)) for first, last in pairwise(ends)]

    def __copy__(self) -> Batch:
        return with_marks(self, self.__dict__)

    def __reduce__(self) -> tuple[Any, ...]:
        return with_marks, (dict(self), dict(self.__dict__))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {_describe(value)}" for name, value in dict.items(self))
        return f"<Batch of {self.num_samples}: {fields}>"


def with_marks(values: Mapping[str, Any], marks: Mapping[str, Any]) -> Batch:
    """A batch of these columns with all marks of another, as its ``__dict__`` holds them."""
    batch = Batch.__new__(Batch)
    batch.update(values)
    batch.__dict__.update(marks)
    return batch


def part_of(batch: Batch, rows: slice) -> Batch:
    """Some samples of a batch, as views."""
    marks = {name: None if (mark := getattr(batch, name)) is None else mark[rows] for name in MARKS}
    return Batch({name: value[rows] for name, value in dict.items(batch)}, **marks)


def last_span(batch: Batch) -> tuple[int, int] | None:
    """The positions [first, last) of a last batch, over all ranks; None for any other batch."""
    return batch.__dict__.get("_span")


def rename_columns(batch: Batch, rename: Mapping[str, str]) -> Batch:
    """The same batch with other names for some of its columns."""
    check_rename(rename, list(batch))
    return with_marks({rename.get(name, name): value for name, value in dict.items(batch)}, batch.__dict__)


def num_marked(marks: dict[str, Any]) -> int | None:
    """The number of samples that the marks describe."""
    if "_marks" in marks and "positions" not in marks:
        return int(marks["_marks"].size)
    positions = marks.get("positions")
    return None if positions is None else len(positions)


def num_rows(values: Iterable[Any]) -> int | None:
    """Rows of the first column that has any."""
    for value in values:
        array = value.offsets if isinstance(value, Ragged) else value
        if getattr(array, "ndim", None):
            return len(array) - isinstance(value, Ragged)
    return None


MARKS = {"positions": np.dtype(np.int64), "samples": np.dtype(np.int64), "valid": np.dtype(bool)}
ALIGN = 256  # of columns in a slot, as in core.h


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def check_names(names: Mapping[str, Any] | list[str]) -> None:
    """Any text is a column's name. One that is also an attribute of Batch is reached as an item only."""
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"a batch has column {name!r}; names are strings")


def check_rename(rename: Mapping[str, str], names: list[str] | None) -> None:
    """Refuses names that are no text, or that would hide a column. ``names`` are its columns, if known."""
    check_names(list(rename.values()))
    if names is None:
        return
    if unknown := [name for name in rename if name not in names]:
        raise ConfigError(f"rename={rename!r} names {unknown[0]!r}; the batch has {', '.join(names)}")
    results = [rename.get(name, name) for name in names]
    if twice := [name for name in results if results.count(name) > 1]:
        raise ConfigError(f"rename={rename!r} gives two columns the name {twice[0]!r}; choose another")


def _describe(value: Any) -> str:
    if isinstance(value, Ragged):
        return f"ragged of {len(value.values)} rows"
    return f"{getattr(value, 'dtype', type(value).__name__)}{list(np.shape(value))}"
