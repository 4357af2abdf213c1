"""ROOT: TTree and RNTuple with flat and jagged branches, read by uproot as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError, MillraceError, SourceError
from millrace.prepare.inflate import max_bytes
from millrace.prepare.records.formats.arrow_columns import arrow, batch_chunks, free_lengths, outline_columns
from millrace.prepare.records.formats.format import (
    CHUNK_BYTES,
    SAMPLE,
    Chunk,
    Format,
    Outline,
    Reading,
    Source,
    need,
    unreadable,
)
from millrace.prepare.records.options import RecordOptions
from millrace.store.layout import Column

TREES = ("TTree", "TNtuple", "TNtupleD", "ROOT::RNTuple", "ROOT::Experimental::RNTuple")


class Root(Format):
    """Events of ROOT files."""

    name = "root"
    endings = (".root",)
    expected = "ROOT files"

    def outline(self, source: Source, options: RecordOptions) -> Outline:
        with _tree(source, options) as tree:
            count = tree.num_entries
            if not count:
                return Outline({}, [])
            names = _names(tree, options.columns)
            head = _batch(tree, names, 0, min(count, SAMPLE))
            total, most = head.nbytes * count // max(1, len(head)), max_bytes(source, options.max_ratio)
            if total > most:
                raise SourceError(
                    f"{source.path!r} claims {count:,} entries, about {total:,} bytes; if that is right, raise --max-ratio",
                    source=source.path,
                )
            axes = _counted(tree, names)
            columns = {
                name: _on(column, axes) for name, column in outline_columns(head.schema, options.columns).items()
            }
            num_pieces = min(count, max(1, -(-max(source.size, total) // options.part_bytes)))
            edges = _edges(tree, count, num_pieces)
            pieces = [(a, b, max(1, source.size * (b - a) // count)) for a, b in pairwise(edges)]
            lengths = {name: found for name, found in free_lengths(head).items() if name not in axes}
        return Outline(columns, pieces, lengths)

    def chunks(self, source: Source, start: int, stop: int, reading: Reading) -> Iterator[Chunk]:
        with _tree(source, reading.options) as tree:
            names = _names(tree, list(reading.wanted))
            axes = _counted(tree, names)
            batches = _batches(tree, names, start, stop, source)
            for chunk in batch_chunks(batches, start, source.path, _Named(reading)):
                offsets = {axes.get(name, name): found for name, found in chunk.offsets.items()}
                yield Chunk(chunk.columns, offsets, chunk.num_records, chunk.where)


class _Named:
    """The same reading with columns as Arrow has them: a branch is its own axis there."""

    def __init__(self, reading: Reading) -> None:
        self.options, self.detail, self.refuse = reading.options, reading.detail, reading.refuse
        self.wanted: Mapping[str, Column] = {name: _own(name, column) for name, column in reading.wanted.items()}


def _own(name: str, column: Column) -> Column:
    is_inner = column.axis is None or column.axis.endswith(".values")
    return column if is_inner else Column(column.dtype, column.shape, axis=name.partition(".")[0])


def _on(column: Column, axes: dict[str, str]) -> Column:
    """A branch that ROOT counts is on the axis of its counter."""
    return column if column.axis not in axes else Column(column.dtype, column.shape, axis=axes[column.axis])


def _counted(tree: Any, names: Sequence[str]) -> dict[str, str]:
    """Branch -> axis, for those whose lengths another branch counts: nMuon counts the axis Muon, nhits of hits_x hits."""
    found = {}
    for name in names:
        counter = getattr(tree[name], "count_branch", None)
        if counter is not None and counter.name != name:
            own = counter.name
            is_prefixed = own[0] == "n" and (own[1:2].isupper() or name.startswith(own[1:]))
            found[name] = own[1:] if len(own) > 1 and is_prefixed else own.removeprefix("n_")
            if found[name] in names and found[name] != name:
                found[name] = f"{found[name]}.rows"
    return found


@contextmanager
def _tree(source: Source, options: RecordOptions) -> Iterator[Any]:
    uproot = need("uproot", "root", "ROOT")
    need("awkward", "root", "ROOT")
    arrow("ROOT")
    try:
        file = uproot.open(Path(source.location))
    except Exception as error:
        raise unreadable(source, "ROOT", error) from error
    try:
        with file:
            names = {name.partition(";")[0]: None for name, kind in file.classnames().items() if kind in TREES}
            if options.tree is not None and options.tree not in names:
                raise ConfigError(
                    f"--tree {options.tree}: {source.path!r} has no such tree; there are {', '.join(names) or 'none'}"
                )
            if options.tree is None and len(names) != 1:
                found = f"has the trees {', '.join(names)}; say which with --tree" if names else "has no tree"
                raise ConfigError(f"{source.path!r} {found}")
            yield file[options.tree or next(iter(names))]
    except MillraceError:
        raise
    except Exception as error:
        raise unreadable(source, "ROOT", error) from error


def _names(tree: Any, asked: Sequence[str] | None) -> list[str]:
    """The branches at the top that were asked for, also by the name of a field within one."""
    known = list(dict.fromkeys(tree.keys(recursive=False)))
    return [name for name in known if asked is None or any(own == name or own.startswith(f"{name}.") for own in asked)]


def _edges(tree: Any, count: int, num_pieces: int) -> list[int]:
    """Where slices begin; at the edges of clusters, or of baskets where all branches have them."""
    try:
        if hasattr(tree, "cluster_summaries"):  # an RNTuple
            common = [*(int(cluster.num_first_entry) for cluster in tree.cluster_summaries), count]
        else:
            common = tree.common_entry_offsets()
    except Exception:  # noqa: BLE001 - then slices begin anywhere
        common = []
    edges = [k * count // num_pieces for k in range(num_pieces + 1)]
    if len(common) > num_pieces:
        edges = [min(common, key=lambda place: abs(place - edge)) for edge in edges]
    return sorted({0, *edges, count})


def _batches(tree: Any, names: list[str], start: int, stop: int, source: Source) -> Iterator[Any]:
    head = _read(tree, names, start, min(stop, start + SAMPLE), source)
    each = max(1, head.nbytes // max(1, head.num_rows))
    step = max(1, min(CHUNK_BYTES // each, stop - start))
    for first in range(start, stop, step):
        yield _read(tree, names, first, min(stop, first + step), source)


def _read(tree: Any, names: list[str], first: int, last: int, source: Source) -> Any:
    try:
        return _batch(tree, names, first, last)
    except Exception as error:
        raise unreadable(source, f"ROOT in entries {first} to {last}", error) from error


def _batch(tree: Any, names: list[str], first: int, last: int) -> Any:
    awkward = need("awkward", "root", "ROOT")
    array = tree.arrays(names, entry_start=first, entry_stop=last, library="ak")
    table = awkward.to_arrow_table(array, extensionarray=False).combine_chunks()
    return table.to_batches()[0]
