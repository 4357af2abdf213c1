"""The names of sources in a store: counted from the folder they share, however their paths were typed."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence

from millrace.errors import ConfigError
from millrace.prepare.files import printable
from millrace.prepare.text.read.sources import STDIN, Source
from millrace.prepare.text.recipe import FROM_ROOT, NAMES, TextBase


def names_in_store(sources: Sequence[Source], existing: TextBase | None) -> tuple[list[str], str | None]:
    """Their names, and the folder they count from; None where files are named as they were given.

    An append does as its store does: it counts from the same folder, also with ``..``, or uses the paths as given.
    """
    if existing is not None and existing.manifest.meta.get(NAMES) != FROM_ROOT:
        return [source.path for source in sources], None
    stored_root = None if existing is None else existing.root()
    root = stored_root or _common_folder(sources)
    names = [_name(source, root) for source in sources]
    known = set() if existing is None or stored_root is not None else set(existing.sources.values or ())
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise ConfigError(f"two sources would be called {twice!r} in the store; rename one of the files")
    if again := next((name for name in names if name in known), None):
        raise ConfigError(
            f"the store already has a source {again!r}, and without provenance.json nobody knows whether it is the same file; "
            "copy provenance.json back; rename the file only if it is another one"
        )
    return names, root


def _common_folder(sources: Sequence[Source]) -> str:
    """The folder that holds all files, directly or below it."""
    folders = [os.path.dirname(os.path.abspath(source.location)) for source in sources if source.path != STDIN]
    try:
        return os.path.commonpath(folders) if folders else ""
    except ValueError:  # on different drives
        return ""


def _name(source: Source, root: str) -> str:
    if source.path == STDIN:
        return STDIN
    path = os.path.abspath(source.location)
    with contextlib.suppress(ValueError):  # on another drive
        path = os.path.relpath(path, root) if root else path
    return printable(path.replace(os.sep, "/"))
