"""Samples chosen again from how they were chosen: what ``from_spec`` asks for, attached in ``millrace/__init__.py``."""

from __future__ import annotations

from typing import Any

from millrace.errors import ConfigError
from millrace.selections.folds import fold_part
from millrace.selections.splits import split_part
from millrace.view.bitmap import Bitmap
from millrace.view.view import View

_KINDS = {"random": split_part, "fold": fold_part}


def chosen_again(view: View, by: dict[str, Any]) -> Bitmap:
    """The samples of a view that ``by`` of a subset's spec describes."""
    kind = by.get("split")
    if kind not in _KINDS:
        raise ConfigError(f"a subset was chosen by {kind!r}; expected one of {', '.join(_KINDS)}: upgrade millrace")
    return _KINDS[kind](view, by)
