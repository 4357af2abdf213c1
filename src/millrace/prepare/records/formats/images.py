"""Bytes of images: whether they are images at all, and decoded to pixels of one size."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.images.crops import DRAWS
from millrace.images.decode import ImageDecode
from millrace.images.options import decode
from millrace.prepare.engines import alive
from millrace.prepare.files import printable
from millrace.prepare.records.formats.format import Reading, need
from millrace.ragged import Array, Int64s

MAX_PIXELS = 1 << 28  # of an image that is decoded: a small file may claim many more
HEADS = (  # of formats, with None for bytes that differ
    (0xFF, 0xD8, 0xFF), (0x89, *b"PNG\r\n\x1a\n"), (*b"RIFF", None, None, None, None, *b"WEBP"), (*b"BM",), (*b"GIF8",),
    (*b"II*\0",), (*b"MM\0*",), (*b"P5",), (*b"P6",),
)  # fmt: skip
HEAD_BYTES = 12
NO_DRAWS = (0.0,) * DRAWS  # nothing is random here


def pillow() -> Any:
    """Pillow's module of images."""
    return need("PIL.Image", "images", "decoding images")


def are_images(data: Array, offsets: Int64s) -> Array:
    """Which of these files begin like an image."""
    lengths = np.diff(offsets)
    places = offsets[:-1, None] + np.arange(HEAD_BYTES)
    is_inside = np.arange(HEAD_BYTES) < lengths[:, None]
    heads = np.where(is_inside, data[np.minimum(places, max(len(data) - 1, 0))] if len(data) else 0, -1)
    found = np.zeros(len(lengths), bool)
    for head in HEADS:
        known = [(k, byte) for k, byte in enumerate(head) if byte is not None]
        found |= np.all([heads[:, k] == byte for k, byte in known], axis=0)
    return found


def decode_all(
    data: Array, offsets: Int64s, are_good: Array, size: int | None, paths: Sequence[str], reading: Reading
) -> Array:
    """All images as (n, size, size, 3); those that cannot be decoded are refused and no longer ``are_good``.

    Without a size they are only checked.
    """
    pixels = np.zeros((len(are_good), size or 0, size or 0, 3), np.uint8)
    into = decoder(size) if size is not None else None
    for k in np.flatnonzero(are_good).tolist():
        own = data[int(offsets[k]) : int(offsets[k + 1])]
        try:
            if into is None:
                check(own)
            else:
                into.decode_into(pixels[k], own, NO_DRAWS)
        except Exception as error:  # noqa: BLE001 - decoders raise many kinds, from OSError to struct.error
            are_good[k] = False
            reading.refuse(printable(paths[k]), "", f"it cannot be decoded: {error}")
        alive()
    return pixels


def decoder(size: int) -> ImageDecode:
    """The shorter side scaled to ``size``, and the centre of the other, as ``mr.images.decode`` does it in a feed.

    By Pillow on every machine: libraries differ in the last bit, and a store has the same bytes wherever it is made.
    """
    pillow()
    return decode(size=size, crop="center", dtype="uint8", layout="hwc", library="pillow", max_pixels=MAX_PIXELS)


def check(data: Array) -> None:
    """Decodes one image, to see that it can be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pillow().open(io.BytesIO(data.data)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"it has {image.width} x {image.height} pixels; at most {MAX_PIXELS:,} are decoded")
            image.load()
