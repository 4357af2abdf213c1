"""Cleaning of documents: Unicode NFC, line ends, control characters, white space."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from millrace.native import core
from millrace.ragged import Array, Int64s
from millrace.text.lump import Lump, for_core, lengths_of

# Control characters but tab and newline, and the byte order mark; other line ends become newlines.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
UNUSUAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\u2028\u2029]")
EMPTY_LINES = re.compile("\n{3,}")
_EMPTY_LINES = re.compile(b"\n{3,}")
# What the core is told of characters beyond ASCII: up to 240 it is the combining class of a mark.
NUM_POINTS = 0x20000  # code points of which it is told; what it is told of the first is for all others
LEFT, MOST_CLASS, JOINING, DROPPED, NEWLINE, BLANK, PLAIN = 0, 240, 251, 252, 253, 254, 255  # as in clean.c
MANY_BYTES = 1 << 16  # of documents that the core has left for which the tables are worth their while


def clean(text: str) -> str:
    """The text in NFC, lines ended by one newline, no control characters, single spaces, at most one empty line.

    >>> clean("a\\u0301  b\\t\\r\\n\\r\\n\\r\\n\\x00c ")
    'á b\\n\\nc'
    """
    text = single_spaces(text)
    if "\n\n\n" in text:
        text = EMPTY_LINES.sub("\n\n", text)
    return text.strip()


def single_spaces(text: str) -> str:
    """The same of a part of a document, which may have any number of empty lines, also at its ends."""
    if UNUSUAL.search(text):
        text = CONTROLS.sub("", LINE_ENDS.sub("\n", text))
    if not text.isascii():
        # After the controls, which may have stood between a letter and its accent.
        text = unicodedata.normalize("NFC", text)
    # Splitting and joining does with white space what a regular expression does at a third of the speed.
    return "\n".join([" ".join(line.split()) for line in text.split("\n")])


def clean_block(block: bytes) -> bytes:
    """The same of a part as bytes, at most one empty line in it; UnicodeDecodeError where it is invalid."""
    # Between two stops, what stands at its ends is white space within a text.
    return clean_all([b"." + block + b"."])[0][1:-1].strip(b" ")


def is_utf8(data: bytes, first: int, last: int) -> bool:
    """Whether ``data[first:last]`` is valid."""
    if core:
        return bool(core.is_utf8(data, first, last))
    try:
        data[first:last].decode()
    except UnicodeDecodeError:
        return False
    return True


def clean_many(data: bytes, starts: Int64s, ends: Int64s) -> Sequence[bytes]:
    """``clean`` of every ``data[starts[k] : ends[k]]``, between which stand line ends; UnicodeDecodeError if one is invalid."""
    if core:
        return clean_all(Lump(data, starts, ends))
    documents, others = _cleaned(data, starts, ends)
    for k in others:
        documents[k] = clean(data[starts[k] : ends[k]].decode()).encode()
    return documents


def clean_all(documents: Sequence[bytes]) -> Sequence[bytes]:
    """``clean`` of each; UnicodeDecodeError if one is invalid."""
    if not core:
        return [clean(document.decode()).encode() for document in documents]
    made = tables() if tables.cache_info().currsize else None
    found = _by_core(documents, None if made is None else made[0])
    if not found.others:
        return found.texts
    _left["bytes"] += sum(len(documents[k]) for k in found.others)
    if made is None and _left["bytes"] >= MANY_BYTES:
        made = tables()
        found = _by_core(documents, made[0])
    left = [documents[k].decode() for k in found.others]
    return found.with_others([clean(text).encode() for text in left] if made is None else _in_nfc(left, made[1]))


def _in_nfc(texts: Sequence[str], table: bytes) -> Sequence[bytes]:
    """``clean`` of texts that NFC may change: after that the core can tell by a look at each character, with few exceptions."""
    found = _by_core([unicodedata.normalize("NFC", text).encode() for text in texts], table)
    return found.with_others([clean(texts[k]).encode() for k in found.others])


_left: Counter[str] = Counter()  # by the core in this process


class _Cleaned(NamedTuple):
    texts: Lump
    others: list[int]  # that are left, and empty among the texts

    def with_others(self, cleaned: Sequence[bytes]) -> Lump:
        """They come behind all."""
        if not self.others:
            return self.texts
        text, starts, stops = self.texts.text, self.texts.starts.copy(), self.texts.stops.copy()
        ends = len(text) + np.cumsum(lengths_of(cleaned))
        starts[self.others], stops[self.others] = ends - lengths_of(cleaned), ends
        return Lump(b"".join((text, *cleaned)), starts, stops)


def _by_core(documents: Sequence[bytes], table: bytes | None) -> _Cleaned:
    text, starts, stops, others = core.cleaned(for_core(documents), table)
    return _Cleaned(Lump(text, np.frombuffer(starts, np.int64), np.frombuffer(stops, np.int64)), others)


@lru_cache(maxsize=1)
def tables() -> tuple[bytes, bytes]:
    """What characters are, to the core: in any text, and in one that is in NFC.

    A text is in NFC if it has no character that NFC changes or may join with the one before, and marks stand in the
    order of their classes.
    """
    characters = list(map(chr, range(NUM_POINTS)))
    found = np.fromiter(map(unicodedata.combining, characters), np.uint8, NUM_POINTS)
    found[found == 0] = PLAIN
    for point, decomposed in enumerate(map(unicodedata.decomposition, characters)):
        if decomposed and not decomposed.startswith("<"):
            if not unicodedata.is_normalized("NFC", characters[point]):
                found[point] = LEFT
            for second in decomposed.split()[1:]:  # of two that become one
                found[int(second, 16)] = LEFT
    found[0x1100:0x1200] = LEFT  # letters of which Hangul is joined, by a rule
    normal = np.where(found <= MOST_CLASS, np.uint8(JOINING), found)
    for table, beyond in ((found, LEFT), (normal, PLAIN)):
        table[np.fromiter(map(str.isspace, characters), bool, NUM_POINTS)] = BLANK
        table[0x80:0xA0] = table[0xFEFF] = DROPPED
        table[[0x85, 0x2028, 0x2029]] = NEWLINE
        table[0xD800:0xE000] = LEFT
        table[0] = beyond
    return found.tobytes(), normal.tobytes()


def _cleaned(data: bytes, starts: Int64s, ends: Int64s) -> tuple[list[bytes], list[int]]:
    """The twin of the core's: documents, but of those that hold more than printable ASCII, tabs and newlines the numbers."""
    first = int(starts[0])
    text = np.frombuffer(data, np.uint8)[first : int(ends[-1])].copy()
    starts, ends = starts - first, ends - first
    others = _unusual(text, starts)
    is_kept = _single_blanks(text)
    text[ends[:-1]], is_kept[ends[:-1]] = 0, True  # a line end that is there to part two documents
    for k in others:
        is_kept[starts[k] : ends[k]] = False
    joined = np.compress(is_kept, text).tobytes()
    documents = [document.strip() for document in joined.split(b"\0")]
    if b"\n\n\n" in joined:
        documents = [_EMPTY_LINES.sub(b"\n\n", some) if b"\n\n\n" in some else some for some in documents]
    return documents, others


def _unusual(text: Array, starts: Int64s) -> list[int]:
    """Documents that hold more than printable ASCII, tabs and newlines."""
    places = np.flatnonzero(((text < 32) & (text != 10) & (text != 9)) | (text >= 127))
    found: list[int] = np.unique(np.searchsorted(starts, places, side="right") - 1).tolist()
    return found


def _single_blanks(text: Array) -> Array:
    """Which bytes stay: of spaces and tabs one between words, which becomes a space, and none at the ends of lines."""
    is_blank = (text == 32) | (text == 9)
    edges = np.flatnonzero(is_blank[1:] != is_blank[:-1]) + 1
    edges = edges[1:] if is_blank[:1].any() else edges
    runs, after = edges[: len(edges) // 2 * 2].reshape(-1, 2).T
    runs = runs[(text[runs - 1] != 10) & (text[after] != 10)]
    is_kept: Array = ~is_blank
    text[runs], is_kept[runs] = 32, True
    return is_kept
