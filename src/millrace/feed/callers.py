"""Who is about to iterate a feed: a loop that could not be exact with what it was given is refused, with the line that is.

Frameworks read ahead, rebuild loaders and restore only what they know; none of them says so to the loader. So the frames that
lead to ``iter()`` are looked at, once per iterator. Only who asks for the iterator counts, not who called him.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from millrace.errors import ConfigError

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
FIT, EPOCH = ".loops.fit_loop", ".loops.training_epoch_loop"
EVALUATIONS = (".loops.evaluation_loop", ".loops.prediction_loop")
PASSED_ON = ("millrace", "torch.utils.data", "torchdata")  # they iterate for somebody else


def _frames() -> Iterator[tuple[str, FrameType]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame
        frame = frame.f_back


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _framework() -> tuple[str | None, Any]:
    """Which one asks: lightning, lightning evaluation, accelerate, or None for anybody else; and Lightning's loop."""
    frames = [(module, frame) for module, frame in _frames() if not _is_in(module, PASSED_ON)]
    asks = frames[0][0] if frames else ""
    if _is_in(asks, ("accelerate",)):
        return "accelerate", None
    if not _is_in(asks, LIGHTNING):
        return None, None
    for module, frame in frames:
        if module.endswith(EVALUATIONS):
            return "lightning evaluation", None
        if module.endswith((EPOCH, FIT)):
            return "lightning", frame.f_locals.get("self")
    return "lightning", None


def is_past_epoch() -> bool:
    """Whether Lightning asks for a batch though it has had all of this epoch, as it does when it goes on from an epoch's end with
    ``max_steps``; it would take that one and leave the rest of the pass."""
    return bool(getattr(_framework()[1], "_is_training_done", False))


def check_feed(feed: Any) -> None:
    """Refuses Lightning what it would read wrongly: it reads ahead of a loader without a length, and passes twice over another."""
    asks = _framework()[0] if any(name in sys.modules for name in LIGHTNING) else None
    if asks == "lightning" and feed.epochs is None:
        raise ConfigError(
            "Lightning reads one batch ahead of an endless feed, so its checkpoints would be a batch too far; give it "
            "feed.by_epoch()"
        )
    if asks == "lightning evaluation":
        raise ConfigError(
            "Lightning passes over a validation loader again and again, and a feed goes on; give it "
            "feed.by_epoch(repeat=True), every pass of which is the whole first epoch"
        )


def check_restore(batch: int, is_within: bool, state: Mapping[str, Any]) -> None:
    """Refuses what Lightning would go on with wrongly: it counts batches and epochs by itself."""
    asks, loop = _framework() if any(name in sys.modules for name in LIGHTNING) else (None, None)
    counted = state.get("batch", batch)
    if asks == "lightning" and is_within and counted != batch:
        raise ConfigError(
            f"this pass was begun with batch={counted}, and Lightning goes on counting its batches; resume with "
            f"batch={counted}, not {batch}, or from the checkpoint of an epoch's end"
        )
    limits = getattr(loop, "max_epochs", None), getattr(loop, "max_steps", None)
    has_ended = getattr(getattr(getattr(loop, "epoch_loop", None), "batch_progress", None), "is_last_batch", False)
    if asks == "lightning" and has_ended and all(limit not in (None, -1) for limit in limits):
        raise ConfigError(
            f"with max_epochs={limits[0]} and max_steps={limits[1]} Lightning counts an epoch too many where it resumes from an "
            "epoch's end, and stops early; give it one of the two"
        )


def check_dataset(is_repeated: bool) -> None:
    """Refuses what would stack, dispatch, or never restore the batches of an ``IterableDataset``."""
    readers = (frame.f_locals.get("self") for module, frame in _frames() if module.startswith("torch.utils.data"))
    if any(getattr(reader, "auto_collation", False) is True for reader in readers):
        raise ConfigError(
            "the DataLoader would stack whole batches of the feed into larger ones; give it batch_size=None, or transformers' "
            "Trainer the feed itself by millrace.transformers.FeedTrainer"
        )
    asks = _framework()[0]
    if asks == "accelerate":
        raise ConfigError(
            "Accelerate reads a DataLoader one batch ahead, and sends rank 0's share to all ranks; give the loop "
            "feed.by_epoch() itself (each rank then reads its share), and transformers' Trainer by "
            "millrace.transformers.FeedTrainer"
        )
    if asks == "lightning" and not is_repeated:
        raise ConfigError(
            "Lightning does not restore a DataLoader where an epoch ended; give it feed.by_epoch() itself, which needs no "
            "DataLoader"
        )
