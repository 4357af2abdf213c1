"""Prepare, store and feed datasets larger than memory, exactly and at memory speed.

Names load when first used: ``import millrace`` itself imports neither torch, pyarrow nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from millrace.distribution import __version__ as __version__
from millrace.lazy import attach

# name -> module that defines it; this is the public surface, checked by tests/test_surface.py
_NAMES = {
    "Batch": "feed.batch",
    "BlockShuffled": "order.orders",
    "Blocks": "view.blocks",
    "Column": "store.layout",
    "Concat": "view.compose",
    "Feed": "feed.feed",
    "Mixture": "feed.mixture",
    "MixtureOrder": "order.mixture",
    "Cuts": "store.manifest",
    "Packed": "view.packed",
    "Ragged": "ragged",
    "Records": "view.records",
    "Sequential": "order.orders",
    "Shuffled": "order.orders",
    "Spans": "ragged",
    "Store": "store.store",
    "StoreWriter": "store.writer",
    "Subset": "view.compose",
    "View": "view.view",
    "Warmup": "feed.warmup",
    "Windows": "view.windows",
    "balanced": "feed.mixture",
    "cu_seqlens": "view.packed",
    "export": "exports.export",
    "from_arrays": "store.memory",
    "from_pandas": "store.memory",
    "from_spec": "view.spec",
    "k_fold": "selections.folds",
    "open_run": "train.open_run",
    "open_store": "store.open",
    "prepare_records": "prepare.records.records",
    "prepare_table": "prepare.table.table",
    "prepare_text": "prepare.text.text",
    "random_split": "selections.splits",
    "sorted_by": "selections.sort",
    "pull": "store.remote.pull",
    "push": "store.remote.push",
    **dict.fromkeys(
        (
            "ConfigError", "FeedError", "LeaseLost", "MillraceError", "QueueError", "QueueUnreachable", "ResumeMismatch",
            "SourceError", "StageFailed", "StoreCorrupt", "StoreError", "StoreLocked", "StoreNotFound", "StoreTooNew",
            "StoreUnreachable", "StoreWriteFailed", "TrainError",
        ),
        "errors",
    ),
}  # fmt: skip

_PACKAGES = ("augment", "images")  # whose names are used as mr.images.decode

__all__ = sorted([*_NAMES, "__version__"])

# What a store gets from the layers above it: the package joins them, since no layer knows one above.
attach("tokenizer", "millrace.text.load", "stored_tokenizer")
attach("selection", "millrace.selections.recipe", "chosen_again")
attach("scaling", "millrace.scaling.apply", "StoreScaling")

if TYPE_CHECKING:
    from millrace import augment as augment
    from millrace import images as images
    from millrace.errors import ConfigError as ConfigError
    from millrace.errors import FeedError as FeedError
    from millrace.errors import LeaseLost as LeaseLost
    from millrace.errors import MillraceError as MillraceError
    from millrace.errors import QueueError as QueueError
    from millrace.errors import QueueUnreachable as QueueUnreachable
    from millrace.errors import ResumeMismatch as ResumeMismatch
    from millrace.errors import SourceError as SourceError
    from millrace.errors import StageFailed as StageFailed
    from millrace.errors import StoreCorrupt as StoreCorrupt
    from millrace.errors import StoreError as StoreError
    from millrace.errors import StoreLocked as StoreLocked
    from millrace.errors import StoreNotFound as StoreNotFound
    from millrace.errors import StoreTooNew as StoreTooNew
    from millrace.errors import StoreUnreachable as StoreUnreachable
    from millrace.errors import StoreWriteFailed as StoreWriteFailed
    from millrace.errors import TrainError as TrainError
    from millrace.exports.export import export as export
    from millrace.feed.batch import Batch as Batch
    from millrace.feed.feed import Feed as Feed
    from millrace.feed.mixture import Mixture as Mixture
    from millrace.feed.mixture import balanced as balanced
    from millrace.feed.warmup import Warmup as Warmup
    from millrace.order.mixture import MixtureOrder as MixtureOrder
    from millrace.order.orders import BlockShuffled as BlockShuffled
    from millrace.order.orders import Sequential as Sequential
    from millrace.order.orders import Shuffled as Shuffled
    from millrace.prepare.records.records import prepare_records as prepare_records
    from millrace.prepare.table.table import prepare_table as prepare_table
    from millrace.prepare.text.text import prepare_text as prepare_text
    from millrace.ragged import Ragged as Ragged
    from millrace.ragged import Spans as Spans
    from millrace.selections.folds import k_fold as k_fold
    from millrace.selections.sort import sorted_by as sorted_by
    from millrace.selections.splits import random_split as random_split
    from millrace.store.layout import Column as Column
    from millrace.store.manifest import Cuts as Cuts
    from millrace.store.memory import from_arrays as from_arrays
    from millrace.store.memory import from_pandas as from_pandas
    from millrace.store.open import open_store as open_store
    from millrace.store.remote.pull import pull as pull
    from millrace.store.remote.push import push as push
    from millrace.store.store import Store as Store
    from millrace.store.writer import StoreWriter as StoreWriter
    from millrace.train.open_run import open_run as open_run
    from millrace.view.blocks import Blocks as Blocks
    from millrace.view.compose import Concat as Concat
    from millrace.view.compose import Subset as Subset
    from millrace.view.packed import Packed as Packed
    from millrace.view.packed import cu_seqlens as cu_seqlens
    from millrace.view.records import Records as Records
    from millrace.view.spec import from_spec as from_spec
    from millrace.view.view import View as View
    from millrace.view.windows import Windows as Windows


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"millrace.{name}")
    if name not in _NAMES:
        raise AttributeError(f"module 'millrace' has no attribute {name!r}")
    value = getattr(import_module(f"millrace.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
