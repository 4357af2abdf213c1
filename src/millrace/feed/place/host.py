"""Batches in the memory of the host: numpy arrays, or tensors over the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from millrace.distribution import install_command
from millrace.errors import ConfigError
from millrace.feed.batch import Batch
from millrace.feed.pytrees import torch_pytrees
from millrace.feed.stages import Ahead, Counters, closed_error
from millrace.ragged import Ragged, is_numeric, shared, tensor_maker

Convert: TypeAlias = Callable[[Batch], Batch]


class Host:
    """Batches as they come, or as ``convert`` changes them."""

    def __init__(self, ahead: Ahead[Batch], convert: Convert | None) -> None:
        self._ahead, self._convert = ahead, convert
        self.ready: list[Batch] = []  # stays empty
        self.stream = 0
        self.current: Callable[[], int] = int

    def take(self, batch: int) -> Batch:
        found = self._ahead.take(batch)
        if found is None:
            raise closed_error()
        return found if self._convert is None else self._convert(found)

    def report(self) -> Counters:
        return Counters()

    def close(self) -> None:
        self._ahead.close()


def tensor_converter() -> Convert:
    """Turns the arrays of a batch into tensors over the same memory; text stays as it is."""
    try:
        tensor = tensor_maker()
    except ImportError as error:
        raise ConfigError(f'device="cpu" delivers torch tensors, and torch is not installed; {install_command("torch")}, '
                          'or take device="numpy"') from error  # fmt: skip
    torch_pytrees()

    def convert(batch: Batch) -> Batch:
        offsets = shared(tensor)
        for name, value in dict.items(batch):
            if is_numeric(value):
                batch[name] = tensor(value)
            elif isinstance(value, Ragged):
                batch[name] = Ragged.trusted(tensor(value.values), offsets(value.offsets))
        return batch

    return convert
