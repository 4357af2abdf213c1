"""Checks the options of a feed when it is constructed."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import TYPE_CHECKING, Any

from millrace.errors import ConfigError
from millrace.feed.batch import check_names, check_rename
from millrace.feed.line import LAST
from millrace.feed.processes.job import check_job
from millrace.feed.remote.record import check_queue
from millrace.feed.tier import check_tier
from millrace.order.orders import MAX_POSITION, Order, Sequential, share
from millrace.ragged import as_integer
from millrace.view.view import View

if TYPE_CHECKING:
    from millrace.feed.feed import Feed

DEVICES = ("cpu", "numpy", "cuda")  # also "cuda:1"
PROCESSES = (False, True, "auto", "forkserver", "spawn")
MAX_BYTES = 1 << 47  # what a process can address
MAX_AHEAD = 4096  # batches kept ready, and threads: more would only take memory


def check_view(view: Any) -> None:
    if not hasattr(view, "fields"):
        raise ConfigError(
            f"a feed reads a view, not {type(view).__name__}; make one: mr.Windows(store, ...), mr.Blocks(store, ...) or "
            "mr.Records(store)"
        )


def check_line(view: View, order: Order, batch: int) -> None:
    if len(view) == 0:
        why = view.why_empty() if hasattr(view, "why_empty") else f"{view!r}"
        raise ConfigError(f"the view has no samples: {why}; lower its lengths or choose another split")
    if order.n != len(view):
        raise ConfigError(f"the order is over {order.n} samples, the view has {len(view)}; make it Shuffled(len(view))")
    if as_integer("batch", batch) < 1:
        raise ConfigError(f"batch={batch}; expected 1 or more samples")
    num_bytes = sum(math.prod(n or 0 for n in field.shape) * field.dtype.itemsize for field in view.fields) * batch
    if num_bytes > MAX_BYTES:
        raise ConfigError(f"batch={batch} takes {num_bytes:,} bytes, more than any memory; lower batch, pad or lengths")


def check_options(feed: Feed, workers: int | None) -> None:
    if feed.epochs is not None and not feed.order.has_epochs:
        raise ConfigError(f"epochs={feed.epochs} of a mixture: its sources have epochs of their own; leave epochs out")
    if feed.epochs is not None and not 1 <= feed.epochs <= MAX_POSITION // feed.order.n:
        raise ConfigError(f"epochs={feed.epochs}; expected 1 or more, within 2^63 - 1 positions, or None for no end")
    if feed.device.split(":")[0] not in DEVICES:
        raise ConfigError(f"device={feed.device!r}; expected one of {', '.join(DEVICES)}")
    for name, value in (("depth", feed.depth), ("workers", 1 if workers is None else workers)):
        if not 1 <= as_integer(name, value) <= MAX_AHEAD:
            raise ConfigError(f"{name}={value}; expected 1 to {MAX_AHEAD}")
    if not 0 <= feed.seed < 1 << 64:
        raise ConfigError(f"seed={feed.seed}; expected 0 to 2^64 - 1")
    if feed.last not in LAST:
        raise ConfigError(f"last={feed.last!r}; expected one of {', '.join(LAST)}")
    if feed.budget is not None and feed.queue is not None:
        raise ConfigError(
            "queue= with max_rows=: tickets ask for positions in a row, bins have others; use processes=True"
        )
    if feed.budget is not None and feed.last == "short":
        raise ConfigError("last='short' with max_rows=: batches differ in size anyway; use last='pad' or 'drop'")
    if feed.budget is None and feed.stop is not None and feed.line(0, feed.stop).num_batches == 0:
        raise ConfigError(f"last='drop' leaves no batch of {feed.batch} in {feed.stop:,} samples; lower batch")
    rank, world = feed.rank_option
    if (rank is None) != (world is None):
        raise ConfigError(f"rank={rank}, world={world}; give both or neither")
    if rank is not None and world is not None:
        share(feed.batch, rank, world)
    _check_function("transform", "(batch, rng)", feed.transform)
    _check_function("decode", "(record, rng)", feed.decode)
    if not any(feed.processes is known or feed.processes == known for known in PROCESSES):
        raise ConfigError(f"processes={feed.processes!r}; expected True, False, 'auto', 'forkserver' or 'spawn'")
    check_tier(feed)
    if feed.uses_processes:
        check_job(feed)
    if feed.queue is not None:
        check_queue(feed)
    names = [field.name for field in feed.view.fields]
    check_names(names)
    check_rename(feed.rename, names if feed.transform is None and feed.decode is None else None)


def check_ranks(feed: Feed, rank: int, world: int) -> None:
    """Refuses ranks that a feed cannot serve, when they are known."""
    share(feed.batch, rank, world)
    if feed.last == "short" and world > 1:
        raise ConfigError(f"last='short' with {world} ranks leaves some without a last batch; use last='pad'")


def _check_function(name: str, takes: str, function: Any) -> None:
    """Refuses a transform or decode whose signature cannot take two arguments."""
    if function is None:
        return
    if not callable(function):
        raise ConfigError(f"{name}={function!r} cannot be called; expected a function of {takes}")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # written in C, without a signature
        return
    try:
        signature.bind(None, None)
    except TypeError:
        own = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(f"{name} {own!r} takes {signature}; a {name} takes {takes}") from None


def warn_large_batch(feed: Feed) -> None:
    """Warns if a batch has more samples than the view: it is padded or holds some twice, which few people want."""
    is_evaluation = feed.epochs == 1 and isinstance(feed.order, Sequential)  # every sample once; valid marks them
    if feed.batch > feed.order.n and not is_evaluation:
        message = f"batch={feed.batch} is larger than the view, which has {feed.order.n:,} samples"
        warnings.warn(
            f"{message}: batches are padded, or hold a sample more than once; lower batch", UserWarning, stacklevel=3
        )


def warn_padded_training(feed: Feed, samples: int, framework: str) -> None:
    """Warns once, on one rank, if a framework trains on a padded batch that nobody chose by ``last=``."""
    if not feed.is_last_open or feed.budget is not None or samples % feed.batch == 0 or feed.rank != 0:
        return
    feed.is_last_open, real = False, samples % feed.batch
    warnings.warn(
        f"{samples:,} samples do not fill batches of {feed.batch}: the last one holds {real} samples and {feed.batch - real} "
        f"repeats of the first of them, and {framework} takes a step on it; give the feed last='drop', or last='pad' to keep it",
        UserWarning,
        stacklevel=3,
    )
