"""``cached_property`` without the lock that Python 3.11's has.

That lock is one per class: a child forked while another thread computed a property of any object of the class would
wait for it for ever. Computing a value twice is harmless here, since every one of them is a pure function.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property:  # noqa: N801 - it stands in for functools.cached_property
        """Computes on first use, then lies in the instance's ``__dict__``."""

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
