"""Refuses frameworks that could not be exact with the loader they got, and names the right one.

Frameworks read ahead, rebuild loaders and restore only what they know, but do not say so. So we look at the frames that
lead to ``iter()``, once per iterator. Only the frame that asks for the iterator counts, not its callers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
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
PASSED_ON = ("millrace", *LOADERS)  # they iterate for their caller


def _frames() -> Iterator[tuple[str, FrameType]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame
        frame = frame.f_back


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


class Asker(NamedTuple):
    """Who asks for an iterator."""

    name: str | None = None  # lightning, lightning evaluation, accelerate; None: anybody else
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


def check_feed() -> None:
    """Refuses a feed itself in Lightning, which reads ahead of an endless feed and iterates again over a finite one."""
    asks = _asker()
    if asks.name == "lightning":
        raise _refused(
            asks,
            "Lightning reads ahead if a loader has no length, and saves what it read; give it feed.by_epoch()",
        )
    if asks.name == "lightning evaluation":
        raise _not_for_evaluation("a feed goes on")
    _check_accelerate(asks)


def check_iterator() -> None:
    """Refuses an iterator as Lightning's loader: it has neither a state nor a second pass."""
    if (_asker().name or "").startswith("lightning"):
        raise ConfigError("an iterator cannot be restored by Lightning; give it feed.by_epoch() itself, without iter()")


def check_passes(is_repeated: bool) -> Asker:
    """Refuses repeated passes in training, and other passes in evaluation; returns who asks."""
    asks = _asker()
    if asks.name == "lightning" and is_repeated:
        raise ConfigError("by_epoch(repeat=True) repeats the first epoch, to evaluate; train with feed.by_epoch()")
    if asks.name == "lightning evaluation" and not is_repeated:
        raise _not_for_evaluation("feed.by_epoch() goes on to the next epoch")
    _check_accelerate(asks)
    return asks


def _check_accelerate(asks: Asker) -> None:
    if asks.name == "accelerate":
        raise ConfigError(
            "Accelerate reads a DataLoader one batch ahead, and sends rank 0's share to all ranks; loop over "
            "millrace.accelerate.Loader(feed.by_epoch()). With the Trainer of transformers use "
            "millrace.transformers.FeedTrainer"
        )


def _refused(asks: Asker, message: str) -> ConfigError:
    if asks.fit is not None:
        asks.fit._data_fetcher = None  # Lightning would ask it for a length, fail, and hide this error
    return ConfigError(message)


def _not_for_evaluation(why: str) -> ConfigError:
    return ConfigError(
        f"Lightning iterates over a validation loader again and again, and {why}; give it feed.by_epoch(repeat=True): "
        "every pass is the whole first epoch"
    )


def check_restore(batch: int, is_within: bool, state: Mapping[str, Any]) -> None:
    """Refuses another batch size within an epoch: Lightning goes on counting its batches."""
    counted = state.get("batch", batch)
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
    asks = _asker()
    _check_accelerate(asks)
    if asks.name == "lightning" and not is_repeated:
        raise _refused(asks, "Lightning may restore no DataLoader; give it feed.by_epoch() itself, without DataLoader")
