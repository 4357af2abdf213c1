"""Samples chosen again from how they were chosen: what ``from_spec`` asks for, attached in ``millrace/__init__.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.errors import ConfigError
from millrace.ragged import Int64s
from millrace.selections.folds import fold_part
from millrace.selections.sort import sorted_part
from millrace.selections.splits import split_part
from millrace.view.bitmap import Bitmap
from millrace.view.view import View

_KINDS: dict[Any, Callable[[View, dict[str, Any]], Bitmap | Int64s]] = {
    "random": split_part, "fold": fold_part, "sorted": sorted_part,
}  # fmt: skip


def chosen_again(view: View, by: dict[str, Any]) -> Bitmap | Int64s:
    """The samples of a view that ``by`` of a subset's spec describes."""
    kind = by.get("split")
    if kind not in _KINDS:
        raise ConfigError(f"a subset was chosen by {kind!r}; expected one of {', '.join(_KINDS)}: upgrade millrace")
    return _KINDS[kind](view, by)
