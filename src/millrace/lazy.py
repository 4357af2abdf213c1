"""What loads or is computed when first used: attachments, and ``cached_property`` without a lock.

An attachment is something a lower layer offers and an upper layer makes, such as ``store.tokenizer``. The package names
its maker when it is imported, so that no layer has to know one above it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

_makers: dict[str, tuple[str, str]] = {}


def attach(name: str, module: str, maker: str) -> None:
    """Says which function makes the attachment ``name``; its module is imported when it is first asked for."""
    _makers[name] = module, maker


def attachment(name: str) -> Callable[..., Any]:
    """The function that makes an attachment."""
    module, maker = _makers[name]
    return getattr(import_module(module), maker)  # type: ignore[no-any-return]


if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property:  # noqa: N801 - it stands in for functools.cached_property
        """Computes a value on first use and keeps it in the instance's ``__dict__``.

        Python 3.11's own holds one lock per class. A child forked while another thread computes a property would wait
        for that lock for ever. Computing a value twice is harmless: each is a pure function.
        """

        def __init__(self, function: Any) -> None:
            self.func, self.__doc__ = function, function.__doc__
            self.attrname: str | None = None

        def __set_name__(self, owner: type, name: str) -> None:
            self.attrname = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value
