"""The formats there are, and which one a set of files has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from millrace.errors import ConfigError, did_you_mean
from millrace.prepare.records.formats.format import Format

# In the order of help; a module is imported when its format is used.
FORMATS = {
    "imagefolder": "imagefolder:ImageFolder",
    "webdataset": "webdataset:WebDataset",
    "hdf5": "hdf5:Hdf5",
    "root": "root:Root",
    "parquet": "parquet:Parquet",
    "arrow": "arrow_files:ArrowFiles",
    "jsonl": "jsonl:JsonLines",
    "npz": "npy:NumpyFiles",
    "mds": "mds:Mds",
    "litdata": "litdata:LitData",
    "datasets": "arrow_files:ArrowFiles",
    "lance": "lance:Lance",
}
ITERABLE = "iterable"  # records that Python gives


@cache
def format_of(name: str) -> Format:
    """The format of this name."""
    if name not in FORMATS:
        raise ConfigError(f"--format {name!r}{did_you_mean(name, FORMATS)}; expected one of {', '.join(FORMATS)}")
    module, _, found = FORMATS[name].partition(":")
    made: Format = getattr(import_module(f"millrace.prepare.records.formats.{module}"), found)()
    return made


def by_ending(path: str) -> str | None:
    """The format that the name of a file shows."""
    name = path.lower()
    for endings, own in _endings():
        if name.endswith(endings):
            return own
    return None


@cache
def _endings() -> list[tuple[tuple[str, ...], str]]:
    return [(format_of(own).endings, own) for own in FORMATS]


def guess(paths: Sequence[str]) -> str:
    """The format of these files; where they have several, the user must say which."""
    counts = Counter(own for path in paths if (own := by_ending(path)) is not None)
    if not counts:
        shown = ", ".join(sorted({Path(path).suffix or Path(path).name for path in paths})[:6])
        raise ConfigError(f"no format is known for {shown}; say it with --format: {', '.join(FORMATS)}")
    if len(counts) > 1:
        found = ", ".join(f"{count:,} of {own}" for own, count in counts.most_common())
        raise ConfigError(f"the files are of several formats ({found}); say which with --format, or leave some out")
    return next(iter(counts))
