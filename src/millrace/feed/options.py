"""What a feed may be asked for: everything that cannot be is refused when it is made."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

from millrace.errors import ConfigError
from millrace.feed.batch import check_names, check_rename
from millrace.feed.iteration import DEVICES
from millrace.feed.line import LAST
from millrace.feed.world import check_given
from millrace.order.orders import MAX_POSITION, Sequential
from millrace.ragged import as_integer

if TYPE_CHECKING:
    from millrace.feed.feed import Feed

MOST_AHEAD = 4096  # batches kept ready, and threads that make them: more of them are memory and nothing else


def check_options(feed: Feed, workers: int | None) -> None:
    if feed.epochs is not None and not 1 <= feed.epochs <= MAX_POSITION // feed.order.n:
        raise ConfigError(
            f"epochs={feed.epochs}; expected 1 or more within 2^63 - 1 positions, or None for an endless feed"
        )
    if feed.device.split(":")[0] not in DEVICES:
        raise ConfigError(f"device={feed.device!r}; expected one of {', '.join(DEVICES)}")
    for name, value in (("depth", feed.depth), ("workers", 1 if workers is None else workers)):
        if not 1 <= as_integer(name, value) <= MOST_AHEAD:
            raise ConfigError(f"{name}={value}; expected 1 to {MOST_AHEAD}")
    if not 0 <= feed.seed < 1 << 64:
        raise ConfigError(f"seed={feed.seed}; expected 0 to 2^64 - 1")
    if feed.last not in LAST:
        raise ConfigError(f"last={feed.last!r}; expected one of {', '.join(LAST)}")
    if feed.stop is not None and feed.line(0, feed.stop).num_batches == 0:
        raise ConfigError(f"last='drop' leaves no batch of {feed.batch} in {feed.stop:,} samples; lower batch")
    check_given(*feed.given, feed.batch)
    _check_transform(feed.transform)
    names = [field.name for field in feed.view.fields]
    check_names(names)
    check_rename(feed.rename, names if feed.transform is None else None)


def _check_transform(transform: Any) -> None:
    """Refuses one that cannot be called with a batch and an rng, where its signature says so."""
    if transform is None:
        return
    if not callable(transform):
        raise ConfigError(f"transform={transform!r} cannot be called; expected a function of (batch, rng)")
    try:
        taken = inspect.signature(transform)
    except (ValueError, TypeError):  # of C, without a signature
        return
    try:
        taken.bind(None, None)
    except TypeError:
        name = getattr(transform, "__name__", type(transform).__name__)
        raise ConfigError(f"transform {name!r} takes {taken}; a transform takes (batch, rng)") from None


def warn_of_batch(feed: Feed) -> None:
    """A batch of more samples than there are is padded, or holds some twice; few people want that."""
    is_evaluation = feed.epochs == 1 and isinstance(feed.order, Sequential)  # every sample once; valid marks the rest
    if feed.batch > feed.order.n and not is_evaluation:
        warnings.warn(
            f"batch={feed.batch} is larger than the view, which has {feed.order.n:,} samples: "
            "batches are padded, or hold a sample more than once; lower batch",
            UserWarning,
            stacklevel=3,
        )
