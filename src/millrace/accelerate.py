"""For Accelerate: a loader that says where a pass ends and how many rows of the last batch are real.

So ``accelerator.gather_for_metrics`` leaves out padding, and ``accelerator.accumulate`` steps at the end of a pass. Do not
``prepare`` it: every rank reads its own share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.errors import ConfigError
from millrace.feed.batch import Batch, last_span
from millrace.feed.feed import Feed
from millrace.feed.options import warn_padded_training
from millrace.feed.passes import Passes
from millrace.view.view import View

try:
    import torch
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState
except ImportError as error:
    raise ImportError("millrace.accelerate needs accelerate; pip install 'millrace[accelerate]'") from error


class Loader(DataLoaderStateMixin):  # type: ignore[misc]
    """A feed or its passes as a loader; register it by ``accelerator.register_for_checkpointing``."""

    framework = "Accelerate"

    def __init__(self, feed: Feed | Passes) -> None:
        self.passes = feed
        self.feed: Feed = feed.feed if isinstance(feed, Passes) else feed
        self.gradient_state = GradientState()

    @property
    def dataset(self) -> View:
        """Its length is the number of samples."""
        return self.feed.view

    def __len__(self) -> int:
        return len(self.passes)

    def __iter__(self) -> Iterator[Batch]:
        self._check_shares()
        self._warn_padded()
        self.begin()
        try:
            for batch in self.passes:
                if (span := last_span(batch)) is not None:
                    self.end_of_dataloader, self.remainder = True, span[1] - span[0]
                yield batch
        finally:
            self.end()

    def _warn_padded(self) -> None:
        """Loops that evaluate switch gradients off, or repeat a pass."""
        feed, is_repeated = self.feed, isinstance(self.passes, Passes) and self.passes.is_repeated
        if is_repeated or not torch.is_grad_enabled():
            return
        in_pass = feed.order.n if isinstance(self.passes, Passes) else (feed.stop or feed.position) - feed.position
        warn_padded_training(feed, in_pass, self.framework)

    def _check_shares(self) -> None:
        """Refuses unequal shares in an evaluation: they could not be gathered."""
        batch, world = self.feed.batch, self.feed.world
        if isinstance(self.passes, Passes) and self.passes.is_repeated and batch % world:
            raise ConfigError(
                f"batch={batch} is no multiple of the {world} ranks, and evaluation gathers equal shares; "
                f"take batch={max(1, batch // world) * world}"
            )

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.passes, Passes):
            self.passes.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return self.passes.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes.load_state_dict(state)
