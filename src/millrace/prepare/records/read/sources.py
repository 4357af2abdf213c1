"""Finds the files of records, guesses their format, and finds out what all of them hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from millrace.errors import ConfigError, SourceError
from millrace.prepare.files import InputFile, describe_file, find_files, printable
from millrace.prepare.kind import Context
from millrace.prepare.records.formats.format import Format, Outline, Source, named
from millrace.prepare.records.formats.imagefolder import SPLITS, split_of
from millrace.prepare.records.formats.known import FORMATS, by_ending, format_of, guess
from millrace.prepare.records.options import RecordOptions
from millrace.prepare.records.read.schema import Schema, build_schema

MAX_SLICES = 4096  # of a part


class Slice(NamedTuple):
    """A range of one source."""

    source: Source
    start: int
    stop: int


class Survey(NamedTuple):
    """All that is known before records are read."""

    format: Format
    sources: list[Source]
    schema: Schema
    detail: bytes
    classes: dict[str, tuple[str, ...]]
    parts: list[tuple[Slice, ...]]
    weights: list[int]  # bytes of each part
    notes: list[str]


def survey(paths: Sequence[str], exclude: Sequence[str], context: Context, options: RecordOptions) -> Survey:
    """Finds files and compares what they hold: a column of another type is refused before any work."""
    kind, files, notes = _find(paths, exclude, context, options)
    options.check_format(kind.name)
    every, more = kind.sources(files, options)
    if any(source.members for source in every):  # each file is a record
        fresh = context.new_files(files)
        sources = every if len(fresh) == len(files) else _labelled_alike(kind, every, kind.sources(fresh, options)[0])
    else:
        sources = context.new_files(every)
    outlines = [(source, _outline(kind, source, options)) for source in context.watched(sources, len(sources))]
    empty = [source.path for source, outline in outlines if not outline.pieces]
    used = [(source, outline) for source, outline in outlines if outline.pieces]
    if not used:
        raise SourceError(f"no record is in {empty[0]!r} or any other file; give files with records", source=empty[0])
    if empty:
        notes.append(f"{empty[0]!r}{f' and {len(empty) - 1:,} more' if len(empty) > 1 else ''}: no record is in it")
    align = getattr(kind, "align", None)
    if align is not None:
        used = list(zip([source for source, _ in used], align([outline for _, outline in used]), strict=True))
    notes += next((outline.notes for _, outline in used if outline.notes), ())  # other files are alike
    schema, shared = build_schema(used, options, is_loose=kind.is_loose)
    details = [outline.detail for _, outline in used]
    unify = getattr(kind, "unify", None)
    detail = unify(details) if unify is not None else details[0]
    parts, weights = _cut(used, kind, options.part_bytes)
    classes = _classes(kind, every, used, schema)
    return Survey(kind, sources, schema, detail, classes, parts, weights, [*notes, *more, *shared])


def _outline(kind: Format, source: Source, options: RecordOptions) -> Outline:
    with named(source, kind.name):
        return kind.outline(source, options)


def _find(
    paths: Sequence[str], exclude: Sequence[str], context: Context, options: RecordOptions
) -> tuple[Format, list[Source], list[str]]:
    asked = None if options.format is None else format_of(options.format)
    endings = None if asked is None else asked.endings

    def is_known(path: str) -> bool:
        if any(f".lance{os.sep}{own}{os.sep}" in path for own in ("_deletions", "_indices")):
            return False  # belongs to a table
        return by_ending(path) is not None if endings is None else path.lower().endswith(endings)

    expected = asked.expected if asked is not None else f"records: {', '.join(FORMATS)}"
    places: Any = {"avoid": context.own_folders, "stage": context.sources}
    found = find_files(
        paths, is_known, expected, **places, exclude=exclude, describe=_describe, count_found=context.count_found
    )
    name = options.format or guess([file.path for file in found.files])
    notes = list(found.notes)
    if options.format is None:
        notes.insert(0, f"these are {name} files; if they are not, say so with --format")
    split = options.split_folders
    known = InputFile.__struct_fields__
    files = [
        Source(
            **{field: getattr(file, field) for field in known}, format=name,
            split=split_of(file.folders, file.path) if split else None,
        )
        for file in found.files
    ]  # fmt: skip
    if not split and (tops := _like_splits(found.files)):
        notes.append(f"the folders {', '.join(tops)} are not taken as splits; if they are, give --split folder")
    return format_of(name), files, notes


def _like_splits(files: Sequence[InputFile]) -> list[str]:
    """The first folders, where all of several are called as splits are."""
    tops = sorted({file.folders[0] if file.folders else "" for file in files})
    return tops if len(tops) > 1 and all(top.lower() in SPLITS for top in tops) else []


def _describe(path: str, expected: str, status: os.stat_result) -> InputFile:
    """An image is known by size and time alone: to open each of a million files twice would take long."""
    if not path.lower().endswith(format_of("imagefolder").endings):
        return describe_file(path, expected, status)
    return InputFile(printable(path), status.st_size, status.st_mtime_ns, "", path)


def _cut(
    used: Sequence[tuple[Source, Outline]], kind: Format, part_bytes: int
) -> tuple[list[tuple[Slice, ...]], list[int]]:
    """Parts of about equal size; a part holds slices of one split."""
    parts: list[tuple[Slice, ...]] = []
    weights: list[int] = []
    slices: list[Slice] = []
    weight = 0
    for source, outline in used:
        for start, stop, size in outline.pieces:
            is_full = weight + size > part_bytes or len(slices) >= MAX_SLICES
            if slices and (is_full or slices[0].source.split != source.split):
                parts.append(tuple(slices))
                weights.append(weight)
                slices, weight = [], 0
            slices.append(Slice(kind.narrow(source, start, stop), start, stop))
            weight += size
    parts.append(tuple(slices))
    return parts, [*weights, weight]


def _labelled_alike(kind: Format, every: Sequence[Source], fresh: Sequence[Source]) -> list[Source]:
    """The sources that are left of all that were given, with the numbers that their classes have among all."""
    named = getattr(kind, "class_names", None)
    if named is None:
        return list(fresh)
    numbers = {name: k for k, name in enumerate(named(every))}
    return [msgspec.structs.replace(source, label=numbers[named([source])[0]]) for source in fresh]


def _classes(
    kind: Format, every: Sequence[Source], used: Sequence[tuple[Source, Outline]], schema: Schema
) -> dict[str, tuple[str, ...]]:
    """By column of the store: the names of its numbers. Files that disagree are refused."""
    found: dict[str, tuple[str, ...]] = {}
    first: dict[str, str] = {}
    for source, outline in used:
        for column, names in outline.classes.items():
            if column not in schema.names:
                continue
            own = schema.names[column]
            if found.setdefault(own, tuple(names)) != tuple(names):
                raise ConfigError(f"the classes of {column!r} in {source.path!r} differ from those in {first[own]!r}")
            first.setdefault(own, source.path)
    named = getattr(kind, "class_names", None)
    if named is not None and "label" in schema.names:
        found[schema.names["label"]] = tuple(named(every))
    return found


def slice_identity(piece: Slice) -> list[object]:
    """What a slice is, whatever the others are."""
    source = piece.source
    plain = {name: getattr(source, name) for name in source.__struct_fields__ if name not in ("location", "members")}
    return [msgspec.to_builtins(plain), piece.start, piece.stop]
