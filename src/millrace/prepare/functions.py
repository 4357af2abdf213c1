"""A user's own function, named as ``module:function`` on the command line or in a configuration."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from millrace.errors import ConfigError, reason


def load_function(name: str | None, option: str) -> Callable[..., Any] | None:
    """The function. Modules of the current folder come first, as under ``python -m``.

    Its module may raise anything when it is imported; that is one line, with the place in the user's file.
    """
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    if not all(module.split(".")) or not attribute:
        raise ConfigError(f"{option} {name!r}; expected module:function, with the whole name of the module")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option} {name!r} cannot be loaded: {error}; check the name, and where it lies") from error
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = (
            "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        )  # which it names itself
        raise ConfigError(f"{option} {name!r} cannot be loaded: {reason(error)}{place}; correct it") from error
    if not callable(function):
        raise ConfigError(f"{option} {name!r} is {type(function).__name__}; expected a function")
    return function  # type: ignore[no-any-return]


def source_digest(name: str, option: str) -> str | None:
    """The hash of the file that a function is written in, which shows changes; None if there is no such file."""
    function = load_function(name, option)
    module = sys.modules.get(getattr(function, "__module__", None) or name.partition(":")[0])
    try:
        return xxhash.xxh3_128_hexdigest(Path(getattr(module, "__file__", None) or "").read_bytes())
    except OSError:
        return None


_loaded: dict[str, str | None] = {}


def loaded_digest(name: str, option: str) -> str | None:
    """As ``source_digest``, when this process first asked: a worker that lives long keeps what it has imported."""
    if name not in _loaded:
        _loaded[name] = source_digest(name, option)
    return _loaded[name]
