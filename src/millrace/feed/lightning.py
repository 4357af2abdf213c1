"""Makes the counters of Lightning's fit loop and our loaders agree: Lightning counts batches and epochs by itself.

``LastBatch`` says whether Lightning has used the batch it took last: a checkpoint saved within a step does not count it.
``settle`` corrects Lightning's counters after a checkpoint. With any loader, they are right only for checkpoints saved at
some moments. The attributes used here are those of lightning 2.6.
"""

from __future__ import annotations

from typing import Any

from millrace.errors import ConfigError, MillraceError


class LastBatch:
    """The batch that Lightning took last, by its own count of batches."""

    def __init__(self, fit: Any) -> None:
        self._batches = fit.epoch_loop.batch_progress.total
        self._taken_at: int | None = None

    def take(self) -> None:
        self._taken_at = self._batches.processed

    @property
    def is_unused(self) -> bool:
        """Whether that batch was taken, but not used to its end."""
        return bool(self._taken_at == self._batches.processed)


def join(fit: Any, loader: Any, is_setup: bool) -> LastBatch:
    """Prepares a pass that Lightning's fit loop is about to read, after a checkpoint or not.

    ``is_setup``: before its first epoch. Later a short loader may begin again within an epoch that was resumed.
    """
    try:
        passes = _passes_of(fit._combined_loader.flattened)
        if not any(each is loader for each in passes):
            raise ConfigError(
                "Lightning reads this loader through another one, and restores only what it knows; give it feed.by_epoch() "
                "itself, without DataLoader or a dataset of your own"
            )
        _check_loop(fit, passes)
        if is_setup and loader is passes[0]:
            for each in passes:
                each.ended_epoch = None  # it belongs to another run
            if fit.is_resuming:
                settle(fit)
        is_within = loader.next_start % loader.feed.order.n and loader.feed.is_within_epoch
        if is_setup and not fit.is_resuming and is_within:
            raise ConfigError(
                "this loader stands within an epoch, and Lightning counts whole epochs; do not call load_state_dict, but "
                "resume by trainer.fit(..., ckpt_path=...)"
            )
    except MillraceError:
        fit._data_fetcher = None  # Lightning would ask it for a length, fail, and hide this error
        raise
    return LastBatch(fit)


def reads_whole(fit: Any, loader: Any) -> bool:
    """Whether ``limit_train_batches`` leaves Lightning all batches of a loader."""
    limits = zip(fit._combined_loader.flattened, fit._combined_loader.limits, strict=True)
    return any(each is loader and limit >= len(loader) for each, limit in limits)


def _check_loop(fit: Any, passes: list[Any]) -> None:
    """Refuses options of Lightning that it cannot combine with our loaders."""
    if not hasattr(fit, "is_resuming"):
        raise ConfigError("this Lightning is older than 2.6 and resumes in another way; pip install 'lightning>=2.6'")
    if type(fit._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
        raise ConfigError("Lightning cannot count dataloader_iter; write training_step(batch, batch_idx)")
    if fit.trainer.overfit_batches > 0:
        raise ConfigError(
            "overfit_batches= wants the same batches in every epoch, but every pass has its own order; train on a few "
            "samples: mr.Feed(mr.Subset(view, range(100)), ...).by_epoch()"
        )
    feeds = [id(loader.feed) for loader in passes]
    if len(set(feeds)) < len(feeds):
        raise ConfigError("two train loaders read the same feed, and would end each other; give each its own feed")


def _passes_of(loaders: list[Any]) -> list[Any]:
    return [loader for loader in loaders if hasattr(loader, "end_epoch")]


def settle(fit: Any) -> None:
    """Makes counters and loaders agree after a checkpoint: the batches that were processed were used, and no others.

    An epoch is over when its last batch was processed. An epoch that a run left early (``max_steps``) goes on.
    """
    epochs, loop, batches = fit.epoch_progress, fit.epoch_loop, fit.epoch_loop.batch_progress
    epoch, batch = epochs.current, batches.current
    is_over = batches.is_last_batch and batch.ready == batch.processed
    is_left = epoch.ready == epoch.processed and batch.processed > 0 and not is_over
    is_within = is_left or epoch.started > epoch.processed
    loaders = _restore(fit, needs_states=is_within and batch.processed > 0)
    for count in (epochs.total, epoch):
        count.processed -= is_left
        count.completed = count.processed
        count.ready = count.started = count.processed + is_within
    if is_within:
        _settle_batches(loop, is_over, is_rolled_back=is_left or batch.ready != batch.processed)
    fit._restarting = loop.restarting = is_within  # the loop's setter would ask for max_steps
    for loader in loaders:
        is_used_up = fit._combined_loader._mode == "max_size" and not loader.feed.is_within_epoch
        if is_over or (is_within and batch.processed and is_used_up) or (not is_within and epoch.processed):
            loader.end_epoch(epoch.processed if is_within else None)


def _settle_batches(loop: Any, is_over: bool, is_rolled_back: bool) -> None:
    """Sets the counters as Lightning saves them after a step, or after an epoch's last validation: it can resume there."""
    batches = loop.batch_progress
    is_open = is_rolled_back or batches.current.completed < batches.current.processed
    for count in (batches.total, batches.current):
        count.ready = count.started = count.processed
        count.completed = count.processed - (is_open and not is_over)
    if is_rolled_back:
        batches.is_last_batch = False
        loop._batches_that_stepped -= not loop._should_accumulate()  # it will be counted when the loop starts


def _restore(fit: Any, needs_states: bool) -> list[Any]:
    """The passes among Lightning's loaders, with their states: Lightning restores none where an epoch has ended."""
    states, fit._combined_loader_states_to_load = fit._combined_loader_states_to_load, []
    stateful = [loader for loader in fit._combined_loader.flattened if hasattr(loader, "load_state_dict")]
    passes = _passes_of(stateful)
    for loader, state in zip(stateful, states, strict=False):
        if loader in passes:
            loader.load_state_dict(state)
    if needs_states and not all(loader.feed.is_restored for loader in passes):
        raise ConfigError(
            "the checkpoint was saved within an epoch and holds no state of feed.by_epoch(); resume one that was saved "
            "with it, or at the end of an epoch"
        )
    return passes
