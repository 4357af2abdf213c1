"""Folders of images: each file is a record, and the folder it lies in is its class.

A source is a folder, not a file: a plan of a million files would be large, and slow to compare.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from millrace.errors import ConfigError, SourceError
from millrace.prepare.engines import alive
from millrace.prepare.files import printable
from millrace.prepare.records.formats import images
from millrace.prepare.records.formats.format import CHUNK_BYTES, Chunk, Format, Outline, Reading, Source
from millrace.prepare.records.formats.members import FILE_BYTES, folder_source, top_folder
from millrace.prepare.records.options import RecordOptions
from millrace.prepare.runs import offsets_of
from millrace.ragged import Array, Int64s
from millrace.store.layout import Column

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}


class ImageFolder(Format):
    """Images in class folders."""

    name = "imagefolder"
    endings = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
    expected = "images: jpg, png, webp, bmp, gif, tiff"

    def sources(self, files: Sequence[Source], options: RecordOptions) -> tuple[list[Source], list[str]]:
        """The folders, by the class that they are. A class is the first folder below the one that was given."""
        groups: dict[tuple[str, str], list[Source]] = {}
        for file in files:
            own = printable(_class_of(file.folders, file.location, file.split))
            groups.setdefault((file.split or "", own), []).append(file)
        numbers = {name: k for k, name in enumerate(sorted({name for _, name in groups}, key=os.fsencode))}
        found = []
        for (_, name), members in groups.items():
            path = top_folder(members[0]) or name
            found.append(folder_source(path, members, self.name, numbers[name]))
        return found, []

    def outline(self, source: Source, options: RecordOptions) -> Outline:
        if options.decode is not None:
            images.pillow()
            image = Column("uint8", (options.decode, options.decode, 3), per="record")
        else:
            image = Column("uint8", axis="image")
        columns = {"image": image, "label": Column("int64", per="record"), "key": Column("string", per="record")}
        ends = np.cumsum([size + FILE_BYTES for size in source.sizes])
        firsts = np.searchsorted(ends, np.arange(0, ends[-1], options.part_bytes), side="left")
        edges = np.unique([*firsts, len(ends)]).tolist()
        starts = np.concatenate(([0], ends))
        pieces = [(a, b, int(starts[b] - starts[a])) for a, b in pairwise(edges)]
        return Outline(columns, pieces)

    def narrow(self, source: Source, start: int, stop: int) -> Source:
        mine = {name: getattr(source, name)[start:stop] for name in ("members", "sizes", "keys")}
        return msgspec.structs.replace(source, **mine)

    def chunks(self, source: Source, start: int, stop: int, reading: Reading) -> Iterator[Chunk]:
        ends = np.cumsum(source.sizes)
        first = 0
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + CHUNK_BYTES, side="right")))
            yield self._chunk(source, first, last, reading)
            alive(bytes=int(ends[last - 1]) - before, records=last - first)
            first = last

    def class_names(self, sources: Sequence[Source]) -> list[str]:
        """The names of the labels."""
        named = {
            source.label: printable(_class_of(source.folders, source.members[0], source.split)) for source in sources
        }
        return [named[label] for label in sorted(named)]

    def _chunk(self, source: Source, first: int, last: int, reading: Reading) -> Chunk:
        paths, sizes = source.members[first:last], np.array(source.sizes[first:last], np.int64)
        data, offsets = _read_files(paths, sizes)
        are_good = images.are_images(data, offsets)
        for k in np.flatnonzero(~are_good).tolist():
            what = "it is empty" if not sizes[k] else "its first bytes are those of no image format"
            reading.refuse(printable(paths[k]), "", what)
        options = reading.options
        if options.check or options.decode is not None:
            pixels = images.decode_all(data, offsets, are_good, options.decode, paths, reading)
        texts = [key.encode() for key in source.keys[first:last]]
        columns = {
            "image": data if options.decode is None else pixels,
            "label": np.full(last - first, source.label, np.int64),
            "key": np.frombuffer(b"".join(texts), np.uint8),
        }
        edges = {"key": offsets_of(np.array([len(text) for text in texts], np.int64))}
        if options.decode is None:
            edges["image"] = offsets
        whole = Chunk(columns, edges, last - first, lambda k: f"image {source.keys[first + k]!r}")
        return whole.take(are_good, reading.wanted)


def _class_of(folders: Sequence[str], location: str, split: str | None) -> str:
    """The first folder below the one that was given; of a file in that one, its own name."""
    below = folders[split is not None :]
    return below[0] if below else os.path.basename(os.path.dirname(os.path.abspath(location)))


def _read_files(paths: Sequence[str], sizes: Int64s) -> tuple[Array, Int64s]:
    """The bytes of some files one after the other."""
    offsets = offsets_of(sizes)
    data = np.empty(int(offsets[-1]) + 1, np.uint8)  # one more, to see a file that has grown
    view, edges = data.data, offsets.tolist()
    for k, path in enumerate(paths):
        start, stop = edges[k], edges[k + 1]
        try:
            fd = os.open(path, os.O_RDONLY)
            try:
                got = os.readv(fd, [view[start : stop + 1]])
                while start + got < stop and (more := os.readv(fd, [view[start + got : stop]])):
                    got += more
            finally:
                os.close(fd)
        except OSError as error:
            raise SourceError(
                f"{printable(path)!r} cannot be read: {error.strerror}; bring it back, then run again",
                source=printable(path),
            ) from error
        if got != stop - start:
            raise SourceError(
                f"{printable(path)!r} changed while it was prepared: {got:,} bytes, planned {stop - start:,}; run the same "
                "command again",
                source=printable(path),
            )
    return data[:-1], offsets


def split_of(folders: Sequence[str], path: str) -> str:
    """The split that the first folder of a file names (``--split folder``)."""
    if not folders or folders[0].lower() not in SPLITS:
        found = repr(folders[0]) if folders else "none"
        raise ConfigError(
            f"--split folder: the first folder of {path!r} is {found}; expected one of {', '.join(SPLITS)}"
        )
    return SPLITS[folders[0].lower()]
