"""``--cache-dir`` and ``--cache-size``: where commands keep what they read of stores elsewhere."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

from typer import Option

CacheDir = Annotated[
    str | None,
    Option(
        metavar="DIR",
        help="Where files of a store at a URL are kept.",
        show_default="MILLRACE_CACHE, else ~/.cache/millrace",
    ),
]
CacheSize = Annotated[
    str | None, Option(metavar="SIZE", help="The most that they may take, such as 200GB.", show_default="no limit")
]
VARIABLES = {"cache_dir": "MILLRACE_CACHE", "cache_size": "MILLRACE_CACHE_SIZE"}


def with_cache(run: Callable[..., Any]) -> Callable[..., Any]:
    """A command with the two options. Its processes find them in the environment."""

    @functools.wraps(run)
    def command(*args: Any, **options: Any) -> Any:
        given = {variable: options.pop(name) for name, variable in VARIABLES.items()}
        if given["MILLRACE_CACHE_SIZE"] is not None:
            from millrace.store.remote.cache import size_of

            size_of(given["MILLRACE_CACHE_SIZE"])  # refused here rather than where a store is opened
        before = dict(os.environ)
        os.environ.update({variable: value for variable, value in given.items() if value is not None})
        try:
            return run(*args, **options)
        finally:
            for variable in VARIABLES.values():
                os.environ.pop(variable, None)
                os.environ.update({variable: before[variable]} if variable in before else {})

    hints = {**get_type_hints(run, include_extras=True), "cache_dir": CacheDir, "cache_size": CacheSize}
    signature, keyword = inspect.signature(run), inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, keyword, default=None, annotation=hints[name]) for name in VARIABLES]
    own = [parameter.replace(annotation=hints[name]) for name, parameter in signature.parameters.items()]
    command.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    command.__annotations__ = hints
    return command
