"""For Accelerate: a loader that says where a pass ends and how many rows of the last batch are real.

So ``accelerator.gather_for_metrics`` leaves out padding, and ``accelerator.accumulate`` steps at the end of a pass. Every rank
reads its own share, so ``accelerator.prepare`` changes nothing about it, but ``save_state`` then saves where it stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.distribution import install_command
from millrace.errors import ConfigError
from millrace.feed.batch import Batch, last_span
from millrace.feed.feed import Feed
from millrace.feed.options import warn_padded_training
from millrace.feed.passes import Passes

try:
    import torch
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState
    from torch.utils.data import DataLoader
except ImportError as error:
    raise ImportError(f"millrace.accelerate needs accelerate; {install_command('accelerate')}") from error


class _NoSampler:
    """Where ``skip_first_batches`` looks for the numbers of samples. After ``load_state`` it would skip once more."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        raise ConfigError(
            "skip_first_batches() cannot skip batches of a feed, and need not: after accelerator.prepare(loader) "
            "accelerator.load_state() restores where it stands, so leave it out; to leave batches out of a run call "
            f"feed.skip(batches * {self._batch}). With the Trainer of transformers use millrace.transformers.FeedTrainer"
        )

    def __len__(self) -> int:
        return len(list(self))


class Loader(DataLoaderStateMixin, DataLoader[Batch]):  # type: ignore[misc]
    """A feed or its passes as a loader. ``accelerator.prepare`` notes it for ``save_state`` and ``load_state``.

    Its ``dataset`` is the view, whose length is the number of samples. ``accelerator.register_for_checkpointing`` saves
    where it stands too, without ``prepare``.
    """

    framework = "Accelerate"
    # accelerator.prepare() takes DataLoaders alone. One that is prepared already it notes and leaves as it is; of those that
    # are stateful save_state() saves the state.
    _is_accelerate_prepared = True
    use_stateful_dataloader = True

    def __init__(self, feed: Feed | Passes) -> None:
        self.passes = feed
        self.feed: Feed = feed.feed if isinstance(feed, Passes) else feed
        super().__init__(self.feed.view, batch_sampler=_NoSampler(self.feed.batch))  # type: ignore[arg-type]
        self.gradient_state = GradientState()

    def __len__(self) -> int:
        return len(self.passes)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
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
