"""For code that already has a DataLoader: a map-style ``Dataset`` over a view, an ``IterableDataset`` over a feed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from millrace.distribution import install_command

try:
    import torch
    from torch.utils.data import Dataset as TorchDataset
    from torch.utils.data import IterableDataset as TorchIterableDataset
    from torch.utils.data import get_worker_info
    from torch.utils.data._utils.collate import default_collate_fn_map
except ImportError as error:
    raise ImportError(f"millrace.torch needs torch; {install_command('torch')}") from error

from millrace.errors import ConfigError
from millrace.feed.batch import Batch
from millrace.feed.callers import check_dataset
from millrace.feed.feed import Feed
from millrace.feed.passes import Passes
from millrace.feed.place.host import tensor_converter
from millrace.ragged import Ragged
from millrace.view.view import View


class Item(dict[str, Any]):
    """One sample that knows the batch it was gathered with: then collating a whole batch copies nothing."""

    def __init__(self, values: dict[str, Any], batch: dict[str, Any] | None = None, row: int = 0) -> None:
        super().__init__(values)
        self.batch, self.row = batch, row

    def __reduce__(self) -> tuple[Any, ...]:
        return Item, (dict(self),)


class Dataset(TorchDataset[Item]):
    """A view as a map-style dataset. A DataLoader's batch is gathered in one call, through ``__getitems__``.

    The DataLoader shuffles and divides it, and cannot resume exactly. ``Feed`` can.
    """

    def __init__(self, view: View) -> None:
        self.view = view

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, sample: int) -> Item:
        return Item(self.view[int(sample)])

    def __getitems__(self, samples: Sequence[int]) -> list[Item]:
        batch = self.view[np.asarray(samples, np.int64)]
        return [Item({name: value[row] for name, value in batch.items()}, batch, row) for row in range(len(samples))]


def collate_items(items: Sequence[Item], *, collate_fn_map: Any = None) -> Batch:
    """A batch of items: the arrays they were gathered in if they are all of it, else stacked."""
    whole = items[0].batch
    in_order = whole is not None and all(item.batch is whole and item.row == row for row, item in enumerate(items))
    if whole is not None and in_order and len(items) == len(next(iter(whole.values()))):
        return _as_tensors(Batch(whole))
    return Batch({name: _stack([item[name] for item in items]) for name in items[0]})


def _stack(values: list[Any]) -> Any:
    arrays = [np.asarray(value) for value in values]
    if arrays[0].dtype == object or arrays[0].dtype.kind == "U":
        return values
    if len({array.shape for array in arrays}) == 1:
        return torch.from_numpy(np.stack(arrays))
    offsets = np.cumsum([0, *(len(array) for array in arrays)])
    return Ragged(np.concatenate(arrays), offsets).map(torch.from_numpy)


# Torch documents this way to add a type: a plain DataLoader then needs no collate_fn.
default_collate_fn_map[Item] = collate_items
_as_tensors = tensor_converter()


class IterableDataset(TorchIterableDataset[Batch]):
    """A feed, or its passes, for ``DataLoader(dataset, batch_size=None)`` without workers: the feed has its own.

    It has the state of the feed. torchdata's ``StatefulDataLoader`` saves and restores it.
    """

    def __init__(self, feed: Feed | Passes) -> None:
        self.feed = feed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        if worker is not None:
            raise ConfigError(
                f"num_workers={worker.num_workers}: every worker would deliver every batch of the feed; set "
                "num_workers=0, and give the feed transform= and workers=, which run beside the training loop"
            )
        self._check()
        return iter(self.feed)

    def __len__(self) -> int:
        self._check()  # Lightning asks for the length first, and hides later errors
        return len(self.feed)

    def _check(self) -> None:
        check_dataset(is_repeated=isinstance(self.feed, Passes) and self.feed.is_repeated)

    def state_dict(self) -> dict[str, Any]:
        return self.feed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.feed.load_state_dict(state)
