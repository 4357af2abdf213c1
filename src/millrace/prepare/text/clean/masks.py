"""Loss masks: which characters of a document count, as its record says, and which of its tokens do for that."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from millrace.ragged import Array, Int64s

FORMS = "expected a list of [start, end) pairs of characters, or true or false for all or none of the text"


class Masked(bytes):
    """A document with the stretches of it that count: (n, 2) places of bytes, in order and apart."""

    spans: Int64s

    def __new__(cls, text: bytes, spans: Int64s) -> Masked:
        self = super().__new__(cls, text)
        self.spans = spans
        return self

    def identity(self) -> bytes:
        """As of plain documents, with the mask in the second half: the split goes by the first, which is the text's."""
        text = xxhash.xxh3_128_digest(bytes(self))
        return text[:8] + xxhash.xxh3_64_digest(text[8:] + self.spans.astype("<i8").tobytes())


def masked(text: str, value: Any) -> Masked:
    """The document with what its mask says; ValueError says what is wrong with it."""
    if isinstance(value, (bool, np.bool_)):
        value = [[0, len(text)]] if value else []
    if not isinstance(value, list):
        raise ValueError(f"it is {_shown(value)}; {FORMS}")
    merged: list[list[int]] = []
    for start, stop in sorted(_pair(pair, len(text)) for pair in value):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(stop, merged[-1][1])
        elif start < stop:
            merged.append([start, stop])
    places = merged if text.isascii() else _in_bytes(text, merged)
    return Masked(text.encode(), np.array(places, np.int64).reshape(-1, 2))


def _pair(pair: Any, length: int) -> tuple[int, int]:
    is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
    if not is_pair or not all(isinstance(n, int) and not isinstance(n, bool) for n in pair):
        raise ValueError(f"it holds {_shown(pair)}; {FORMS}")
    if not 0 <= pair[0] <= pair[1] <= length:
        raise ValueError(
            f"it holds {_shown(pair)}; expected places in order within the {length} characters of the text"
        )
    return pair[0], pair[1]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _in_bytes(text: str, spans: list[list[int]]) -> list[list[int]]:
    found, at, done = [], 0, 0
    for start, stop in spans:
        first = done + len(text[at:start].encode())
        done = first + len(text[start:stop].encode())
        at = stop
        found.append([first, done])
    return found


def token_mask(spans: Int64s, starts: Int64s, stops: Int64s) -> npt.NDArray[np.uint8]:
    """1 for tokens of which some byte counts; one that stands for no byte is asked for the byte it stands before."""
    if not len(spans):
        return np.zeros(len(starts), np.uint8)
    before = np.concatenate(([0], np.cumsum(spans[:, 1] - spans[:, 0])))

    def counting(places: Int64s) -> Array:
        """How many bytes that count lie before each place."""
        last = np.searchsorted(spans[:, 0], places, side="right") - 1
        inside = np.minimum(places, spans[last, 1]) - spans[last, 0]
        return np.where(last < 0, 0, before[last] + inside)

    return (counting(np.maximum(stops, starts + 1)) > counting(starts)).astype(np.uint8)


def ends_counting(document: Masked) -> bool:
    """Whether the end-of-document token counts: where the last character does."""
    return bool(len(document.spans)) and int(document.spans[-1, 1]) == len(document)
