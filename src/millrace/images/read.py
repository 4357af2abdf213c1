"""Compressed images as RGB pixels, by simplejpeg, torchvision or Pillow, which decode without the GIL.

Pillow reads what the others do not: PNG, WebP, GIF (the first frame), BMP, TIFF, and JPEG in CMYK or with flaws. Grey
becomes three equal channels, 16 bits become 8, transparency is left out.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import struct
import threading
from functools import cache
from typing import Any, Protocol

import numpy as np

from millrace.distribution import install_command
from millrace.errors import ConfigError, MillraceError
from millrace.ragged import Array

LIBRARIES = {"simplejpeg": "simplejpeg", "torchvision": "torchvision.io", "pillow": "PIL.Image"}  # the fastest first
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # Pillow knows some that start programs
KEPT_BYTES = 64 << 20  # of a thread's memory for pixels
ORIENTATION = 0x0112  # the tag in EXIF


class BadImage(MillraceError):
    """Bytes that are no whole image."""


class Image(Protocol):
    """An image whose header was read. ``height`` and ``width`` are those of the upright image."""

    height: int
    width: int
    turn: int  # the orientation in its EXIF, 1 if it stands upright
    is_plain: bool  # a JPEG of usual colours, which any decoder of JPEG reads

    def pixels(self, shrink: int) -> Array:
        """(H, W, 3) uint8, about 1/``shrink`` of the size if the format can do that. Valid until the thread reads another."""


@cache
def module_of(library: str) -> Any:
    try:
        found = importlib.import_module(LIBRARIES[library])
        if library == "torchvision":  # it may be there without its images, or for another torch
            importlib.import_module("torch").ops.image.decode_jpeg  # noqa: B018
        return found
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        remedy = "pip install torchvision" if library == "torchvision" else install_command("images")
        raise ConfigError(f"images need {library}, which is not installed; {remedy}") from error


def fastest() -> str:
    """The fastest library that is installed."""
    for library in LIBRARIES:
        with contextlib.suppress(ConfigError):
            module_of("pillow")  # for what the others cannot read
            module_of(library)
            return library
    raise ConfigError(f"images need Pillow, and simplejpeg to be fast; {install_command('images')}")


def read_header(data: Array, library: str, exif: bool) -> Image:
    """The image in these bytes, or these pixels as an image; a record may also be one row of pixels."""
    if data.ndim >= 3:
        return Pixels(data[0] if data.ndim == 4 and len(data) == 1 else data)
    if library == "simplejpeg" and len(data) > 2 and data[0] == 0xFF and data[1] == 0xD8:
        # What it refuses may have flaws that do no harm: Pillow says.
        with contextlib.suppress(ValueError):
            return Jpeg(data, exif)
    return (ByTorchvision if library == "torchvision" else ByPillow)(data, exif)


class Pixels:
    """An image that is pixels already."""

    turn, is_plain = 1, False

    def __init__(self, pixels: Array) -> None:
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
            raise BadImage(f"pixels are {pixels.dtype}{list(pixels.shape)}; expected uint8 (height, width, 3)")
        self._pixels = pixels
        self.height, self.width = pixels.shape[:2]

    def pixels(self, shrink: int) -> Array:
        return np.ascontiguousarray(self._pixels)


class Jpeg:
    """A JPEG by simplejpeg."""

    def __init__(self, data: Array, exif: bool) -> None:
        self._data, self._exif = data, exif
        self._library = module_of("simplejpeg")
        self._height, self._width, space, _ = self._library.decode_jpeg_header(data)
        if space not in ("YCbCr", "RGB", "Gray"):
            raise ValueError(f"a JPEG in {space}")
        self.turn, self.is_plain = _orientation(data.data) if exif else 1, space != "RGB"
        self.height, self.width = (self._height, self._width)[:: -1 if self.turn > 4 else 1]

    def pixels(self, shrink: int) -> Array:
        height, width = -(-self._height // shrink), -(-self._width // shrink)
        memory = _memory(height * width * 3)
        try:
            found = self._library.decode_jpeg(self._data, "RGB", min_height=height, min_width=width, buffer=memory)
        except ValueError:
            return ByPillow(self._data, self._exif).pixels(shrink)
        return upright(found, self.turn)


class ByPillow:
    """An image of any of the formats, by Pillow."""

    def __init__(self, data: Array, exif: bool) -> None:
        self._data = data
        with _pillow_errors():
            self._image = module_of("pillow").open(io.BytesIO(data.tobytes()), formats=FORMATS)
        self.turn = 1
        if exif:
            with contextlib.suppress(Exception):  # EXIF that cannot be read says nothing
                self.turn = int(self._image.getexif().get(ORIENTATION, 1))
        width, height = self._image.size
        self.height, self.width = (width, height) if self.turn in (5, 6, 7, 8) else (height, width)
        is_usual = self._image.mode in ("RGB", "L") and self._image.info.get("adobe_transform") != 0
        self.is_plain = self._image.format == "JPEG" and is_usual

    def pixels(self, shrink: int) -> Array:
        image = self._image
        with _pillow_errors():
            image.draft("RGB", (image.size[0] // shrink, image.size[1] // shrink))  # does nothing unless it is a JPEG
            if image.mode.startswith("I"):  # 16 bits
                found = np.asarray(image).astype(np.int64) >> 8
                found = np.repeat(np.clip(found, 0, 255).astype(np.uint8)[:, :, None], 3, axis=2)
            else:
                found = np.asarray(image.convert("RGB"))
        return upright(found, self.turn)


class ByTorchvision(ByPillow):
    """A JPEG whose pixels torchvision decodes, where all of them are needed; it cannot decode a part of the size."""

    def pixels(self, shrink: int) -> Array:
        if shrink > 1 or not self.is_plain:
            return super().pixels(shrink)
        library, torch = module_of("torchvision"), importlib.import_module("torch")
        try:
            found = library.decode_jpeg(torch.from_numpy(np.array(self._data)), library.ImageReadMode.RGB)
        except RuntimeError:  # Pillow says what is wrong, or reads it in spite of a flaw
            return super().pixels(shrink)
        return upright(found.permute(1, 2, 0).numpy(), self.turn)


@contextlib.contextmanager
def _pillow_errors() -> Any:
    """What Pillow raises for bad bytes, of which there are many kinds, as one."""
    try:
        yield
    except (ConfigError, MemoryError, AttributeError, NameError):  # not about the bytes
        raise
    except Exception as error:
        said = str(error).partition(" <_io")[0] or type(error).__name__
        raise BadImage(said) from error


_LOCAL = threading.local()


def _memory(num_bytes: int) -> Array:
    """Memory of this thread, used again: the system takes long to hand out so much each time."""
    memory: Array | None = getattr(_LOCAL, "memory", None)
    if memory is None or len(memory) < num_bytes:
        memory = np.empty(num_bytes, np.uint8)
        if num_bytes <= KEPT_BYTES:
            _LOCAL.memory = memory
    return memory


def upright(pixels: Array, turn: int) -> Array:
    """The pixels as EXIF says they are to be seen."""
    if turn in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    pixels = pixels[:: -1 if turn in (3, 4, 7, 8) else 1, :: -1 if turn in (2, 3, 6, 7) else 1]
    return np.ascontiguousarray(pixels)


def _orientation(data: memoryview) -> int:
    """The orientation in the EXIF of a JPEG, 1 if there is none."""
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker, size = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if marker == 0xE1 and bytes(data[at + 4 : at + 10]) == b"Exif\0\0":
            with contextlib.suppress(struct.error):
                return _exif_orientation(bytes(data[at + 10 : at + 2 + size]))
            return 1
        if marker == 0xDA or 0xC0 <= marker <= 0xC2:  # the image begins
            return 1
        at += 2 + size
    return 1


def _exif_orientation(exif: bytes) -> int:
    order = ">" if exif[:2] == b"MM" else "<"
    (at,) = struct.unpack_from(f"{order}I", exif, 4)
    (count,) = struct.unpack_from(f"{order}H", exif, at)
    for entry in range(count):
        tag, _, _, value = struct.unpack_from(f"{order}HHIH", exif, at + 2 + 12 * entry)
        if tag == ORIENTATION:
            return value if 1 <= value <= 8 else 1
    return 1
