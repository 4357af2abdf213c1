"""Loss masks: the characters of a document that count, and from them the tokens that count."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from millrace.ragged import Array, Int64s
from millrace.text.documents import Documents, hash_documents

FORMS = "expected a list of [start, end) pairs of characters, or true or false for all or none of the text"


def parse_mask(text: str, value: Any) -> Int64s:
    """The bytes of a text that its mask says count, (n, 2), in order and apart; ValueError says what is wrong."""
    if isinstance(value, (bool, np.bool_)):
        value = [[0, len(text)]] if value else []
    if not isinstance(value, list):
        raise ValueError(f"it is {_show(value)}; {FORMS}")
    merged: list[list[int]] = []
    for start, stop in sorted(_pair(pair, len(text)) for pair in value):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(stop, merged[-1][1])
        elif start < stop:
            merged.append([start, stop])
    places = merged if text.isascii() else _in_bytes(text, merged)
    return np.array(places, np.int64).reshape(-1, 2)


def hash_masked(documents: Documents) -> bytes:
    """Hashes of documents with masks. The first half is the text's, which decides the split."""
    assert documents.masks is not None
    hashes = hash_documents(documents)
    found = []
    for k in range(len(documents)):
        text = hashes[16 * k : 16 * k + 16]
        spans = documents.masks.of(k).astype("<i8").tobytes()
        found.append(text[:8] + xxhash.xxh3_64_digest(text[8:] + spans))
    return b"".join(found)


def _pair(pair: Any, length: int) -> tuple[int, int]:
    is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
    if not is_pair or not all(isinstance(n, int) and not isinstance(n, bool) for n in pair):
        raise ValueError(f"it holds {_show(pair)}; {FORMS}")
    if not 0 <= pair[0] <= pair[1] <= length:
        raise ValueError(f"it holds {_show(pair)}; expected places in order within the {length} characters of the text")
    return pair[0], pair[1]


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _in_bytes(text: str, spans: list[list[int]]) -> list[list[int]]:
    places, at, done = [], 0, 0
    for start, stop in spans:
        first = done + len(text[at:start].encode())
        done = first + len(text[start:stop].encode())
        at = stop
        places.append([first, done])
    return places


def token_mask(spans: Int64s, starts: Int64s, stops: Int64s) -> npt.NDArray[np.uint8]:
    """1 for tokens with a byte that counts; a token without bytes counts if the next byte does."""
    if not len(spans):
        return np.zeros(len(starts), np.uint8)
    before = np.concatenate(([0], np.cumsum(spans[:, 1] - spans[:, 0])))

    def counting(places: Int64s) -> Array:
        """How many bytes that count are before each place."""
        last = np.searchsorted(spans[:, 0], places, side="right") - 1
        inside = np.minimum(places, spans[last, 1]) - spans[last, 0]
        return np.where(last < 0, 0, before[last] + inside)

    return (counting(np.maximum(stops, starts + 1)) > counting(starts)).astype(np.uint8)


def end_counts(spans: Int64s, num_bytes: int) -> bool:
    """Whether the end-of-document token counts: it does if the last character does."""
    return bool(len(spans)) and int(spans[-1, 1]) == num_bytes
