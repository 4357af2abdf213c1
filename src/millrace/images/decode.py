"""ImageDecode: the image of a record, decoded, cropped, scaled, flipped and normalised into the array of its batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from millrace.errors import ConfigError, MillraceError, SourceError
from millrace.images.crops import DRAWS, Centre, Random, Whole
from millrace.images.read import BadImage, Image, module_of, read_header
from millrace.images.resize import Box, Three, resize
from millrace.ragged import Array

SHRINKS = (8, 4, 2)  # what JPEG can be decoded at: an eighth, a quarter, half of its size


@dataclass(frozen=True)
class ImageDecode:
    """What ``mr.images.decode(...)`` returns, for ``Feed(decode=...)``; it may be pickled.

    A result is a function of the bytes, the seed and the position. It is the same in any thread, process and batch, but
    libraries differ in the last bit of some pixels: so ``library`` is chosen once, and goes with the object.
    """

    column: str
    size: tuple[int, int]
    crop: Random | Centre | Whole
    flip: float
    factors: tuple[Three, Three]
    dtype: str
    layout: str
    on_error: str
    library: str
    exif: bool
    max_pixels: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return (3, *self.size) if self.layout == "chw" else (*self.size, 3)

    def __call__(self, record: Mapping[str, Any], rng: Any) -> dict[str, Any]:
        """One record."""
        if self.on_error == "skip":
            raise ConfigError("on_error='skip' marks rows of a batch; call it in a feed, or give on_error='replace'")
        out = np.empty(self.shape, self.dtype)
        is_good = self._fill(record, rng.uniform(DRAWS).tolist(), out)
        return self.columns(record, out, np.bool_(is_good))

    def decode_batch(
        self,
        records: Mapping[str, Any],
        rng: Any,
        new_array: Callable[..., Array],
        at: Callable[[int], None],
        skip: Callable[[int], None],
    ) -> dict[str, Any]:
        """All records of a batch, each into its place of one array; see ``feed/make/decode.py``."""
        draws = rng.uniform(DRAWS)
        count = len(draws)
        out = new_array(self.column, (count, *self.shape), np.dtype(self.dtype))
        are_good = np.ones(count, bool)
        values = {name: records[name] for name in (self.column, "key") if name in records}
        for row in range(count):
            at(row)
            record = {name: value[row] for name, value in values.items()}
            are_good[row] = self._fill(record, draws[row].tolist(), out[row])
            if self.on_error == "skip" and not are_good[row]:
                skip(row)
        return self.columns(records, out, are_good)

    def columns(self, given: Mapping[str, Any], image: Any, is_good: Any) -> dict[str, Any]:
        """The columns of a batch or record with its images in their place."""
        found = {name: image if name == self.column else value for name, value in given.items()}
        return found | {f"{self.column}_ok": is_good} if self.on_error == "replace" else found

    def _fill(self, record: Mapping[str, Any], draws: Sequence[float], out: Array) -> bool:
        try:
            self.decode_into(out, record[self.column], draws)
        except KeyError as error:
            raise ConfigError(f"the records have no column {self.column!r}; they have {', '.join(record)}") from error
        except BadImage as error:
            self.refuse(record, error)
            out[...] = 0
            return False
        return True

    def refuse(self, record: Mapping[str, Any], error: BadImage, where: str = "") -> None:
        """Raises, or warns that the image of a record is replaced."""
        name = f" {record['key']!r}" if isinstance(record.get("key"), str) else ""
        if self.on_error == "stop":
            remedy = "leave it out when you prepare the store, or give on_error='replace' or 'skip'"
            raise SourceError(f"the image{name}{where} cannot be read: {error}; {remedy}") from error
        mark = "valid of the batch" if self.on_error == "skip" else f"{self.column}_ok"
        warnings.warn(f"an image cannot be read and is replaced by zeros; {mark} marks it", stacklevel=3)

    def decode_into(self, out: Array, data: Array, draws: Sequence[float]) -> None:
        """One image of these bytes; ``draws`` are its ``DRAWS`` random numbers of [0, 1)."""
        image = self.header(data)
        box = self.crop.box(image.height, image.width, self.size, draws)
        height, width = self.size
        shrink = next((by for by in SHRINKS if box.height >= height * by and box.width >= width * by), 1)
        pixels = image.pixels(shrink)
        if pixels.shape[:2] != (image.height, image.width):  # its pixels are squares of `shrink`; the last are cut
            top, left = box.top / shrink, box.left / shrink
            rows, columns = (
                min(box.height / shrink, pixels.shape[0] - top),
                min(box.width / shrink, pixels.shape[1] - left),
            )
            box = Box(top, left, rows, columns)
        is_planar, is_flipped = self.layout == "chw", draws[0] < self.flip
        resize(pixels, box, out, planar=is_planar, flip=is_flipped, factors=self.factors)

    def header(self, data: Array) -> Image:
        """The image in these bytes, not decoded yet; one that claims too many pixels is refused."""
        image = read_header(data, self.library, self.exif)
        if image.height * image.width > self.max_pixels:
            raise BadImage(
                f"it has {image.width:,} x {image.height:,} pixels, more than max_pixels={self.max_pixels:,}"
            )
        return image

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Refuses a process in which the library of the others is missing: it would give other pixels."""
        self.__dict__.update(state)
        try:
            module_of(self.library)
        except MillraceError as error:
            raise ConfigError(f"{error}; the process that made this decode had it") from error

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        flip = f", flipped with probability {self.flip:g}" if self.flip else ""
        return f"<decode of {self.column!r} to {self.dtype} {shape} by {self.library} {version(self.library)}: {self.crop}{flip}>"
