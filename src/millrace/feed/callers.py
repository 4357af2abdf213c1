"""Refuses frameworks that could not be exact with the loader they got, and names the right one.

Frameworks read ahead, rebuild loaders and restore only what they know, but do not say so. So we look at the frames that
lead to ``iter()``, once per iterator. Only the frame that asks for the iterator counts, not its callers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from millrace.errors import ConfigError

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
FIT, EPOCH, COMBINED = ".loops.fit_loop", ".loops.training_epoch_loop", ".utilities.combined_loader"
EVALUATIONS = (".loops.evaluation_loop", ".loops.prediction_loop")
LOADERS = ("torch.utils.data", "torchdata")
STACKED = (
    "the DataLoader would stack whole batches of the feed into larger ones; give it batch_size=None. "
    "With the Trainer of transformers use millrace.transformers.FeedTrainer"
)
DISPATCHED = (
    "Accelerate reads a DataLoader one batch ahead, and sends rank 0's share to all ranks; loop over "
    "millrace.accelerate.Loader(feed.by_epoch()). With the Trainer of transformers use millrace.transformers.FeedTrainer"
)
NO_TRAINER = (
    "the Trainer of transformers takes samples by number, and a feed gives whole batches in its order; use "
    "millrace.transformers.FeedTrainer(model, args, train_dataset=feed.by_epoch()), with the same arguments"
)
NOT_RESTORED = "an iterator cannot be restored by Lightning; give it feed.by_epoch() itself, without iter()"
AGAIN = "Lightning iterates over a validation loader again and again; give it feed.by_epoch(repeat=True)"
# (who asks, for what) -> why not
REFUSALS = {
    ("lightning", "feed"): "Lightning reads ahead if a loader has no length; give it feed.by_epoch()",
    ("lightning", "dataset"): "Lightning may restore no DataLoader; give it feed.by_epoch() itself, without DataLoader",
    ("lightning", "repeat"): "by_epoch(repeat=True) repeats the first epoch, to evaluate; train with feed.by_epoch()",
    ("lightning", "iterator"): NOT_RESTORED,
    ("lightning evaluation", "iterator"): NOT_RESTORED,
    ("lightning evaluation", "feed"): AGAIN,
    ("lightning evaluation", "passes"): AGAIN,
} | {("accelerate", loader): DISPATCHED for loader in ("feed", "passes", "repeat", "dataset", "repeated dataset")}
PASSED_ON = ("millrace", *LOADERS)  # they iterate for their caller


def _frames() -> Iterator[tuple[str, FrameType]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame
        frame = frame.f_back


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


class Asker(NamedTuple):
    """Who asks for an iterator; ``name`` is empty for anybody without a key in ``REFUSALS``."""

    name: str = ""
    fit: Any = None  # Lightning's fit loop, if it asks
    is_setup: bool = False  # before its first epoch


def _asker() -> Asker:
    if not any(name in sys.modules for name in (*LIGHTNING, "accelerate")):
        return Asker()
    frames = list(_frames())
    # A user's dataset passes on what it reads, as ours does: then the reader of the DataLoader asks.
    through = next((k for k, (module, _) in enumerate(frames) if _is_in(module, LOADERS)), 0)
    frames = [(module, frame) for module, frame in frames[through:] if not _is_in(module, PASSED_ON)]
    asks = frames[0][0] if frames else ""
    if _is_in(asks, ("accelerate",)):
        return Asker("accelerate")
    if not _is_in(asks, LIGHTNING):
        return Asker()
    for module, frame in frames:
        if module.endswith(EVALUATIONS):
            return Asker("lightning evaluation")
        if module.endswith((EPOCH, FIT)):
            is_trial = not asks.endswith(COMBINED)  # Lightning tries whether it can be iterated
            fit = None if is_trial else frame.f_locals["self"].trainer.fit_loop
            return Asker("lightning", fit, module.endswith(FIT))
    return Asker("lightning")


def check_caller(loader: str) -> Asker:
    """Refuses a loader that whoever asks cannot read exactly: feed, passes, repeat, dataset or iterator."""
    asks = _asker()
    message = REFUSALS.get((asks.name, loader))
    if message is None:
        return asks
    if asks.fit is not None:
        asks.fit._data_fetcher = None  # Lightning would ask it for a length, fail, and hide this error
    raise ConfigError(message)


def check_trainer() -> None:
    """Refuses the Trainer of transformers when it asks for the length of its dataset: that is while it is constructed."""
    library: Any = sys.modules.get("transformers.trainer")
    for module, frame in _frames() if library is not None else ():
        if not _is_in(module, ("millrace", "transformers")):
            return
        asks = frame.f_locals.get("self")
        if isinstance(asks, library.Trainer):
            if type(asks).get_train_dataloader is library.Trainer.get_train_dataloader:
                raise ConfigError(NO_TRAINER)
            return  # a FeedTrainer, or a class with a loader of its own


def check_restore(batch: int, counted: int, is_within: bool) -> None:
    """Refuses another batch size within an epoch: Lightning goes on counting its batches."""
    if is_within and counted != batch and _asker().name == "lightning":
        raise ConfigError(
            f"this pass was begun with batch={counted}, and Lightning goes on counting its batches; resume with "
            f"batch={counted}, not {batch}, or from the checkpoint of an epoch's end"
        )


def check_dataset(is_repeated: bool) -> None:
    """Refuses readers of an ``IterableDataset`` that would stack, dispatch, or never restore its batches."""
    readers = (frame.f_locals.get("self") for module, frame in _frames() if module.startswith("torch.utils.data"))
    if any(getattr(reader, "auto_collation", False) is True for reader in readers):
        raise ConfigError(STACKED)
    check_caller("repeated dataset" if is_repeated else "dataset")
