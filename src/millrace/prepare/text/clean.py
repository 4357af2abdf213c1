"""Cleaning of documents: Unicode NFC, line ends, control characters, white space."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from millrace.native import core
from millrace.ragged import Array, Int64s
from millrace.text.kinds import KINDS
from millrace.text.lump import Lump, for_core, lengths_of

# Control characters but tab and newline, and the byte order mark; other line ends become newlines.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
UNUSUAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\u2028\u2029]")
EMPTY_LINES = re.compile("\n{3,}")
_EMPTY_LINES = re.compile(b"\n{3,}")
BLANKS = b" \t\n"
NUM_POINTS = 0x20000  # code points that the core is told of
USUAL = frozenset(kind for kind in KINDS if kind[0] in "LNPS" or kind in ("Cf", "Co"))  # neither blanks nor marks
MANY = 8  # documents of one stretch for which that is worth its while


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
    if core:
        text: bytes
        text, _, _, others = core.cleaned([block], _plain_if_made())
        if not others:
            # The core leaves out the white space at both ends.
            first, last = len(block) - len(block.lstrip(BLANKS)), len(block.rstrip(BLANKS))
            before, behind = (b"\n" * min(2, edge.count(b"\n")) for edge in (block[:first], block[max(first, last) :]))
            return before + text + behind
    return EMPTY_LINES.sub("\n\n", single_spaces(block.decode())).encode()


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
    """``clean`` of every ``data[starts[k] : ends[k]]``, between which stand line ends; UnicodeDecodeError if one is invalid.

    Documents of printable ASCII are done all at once, and where others are many, those of plain characters too.
    """
    if core:
        return _cleaned_by_core(Lump(data, starts, ends))
    documents, others = _cleaned(data, starts, ends)
    for k in others:
        documents[k] = clean(data[starts[k] : ends[k]].decode()).encode()
    return documents


def _cleaned_by_core(documents: Lump) -> Lump:
    table = _plain_if_made()
    found = core.cleaned(for_core(documents), table)
    if table is None and len(found[3]) >= MANY:
        found = core.cleaned(for_core(documents), plain_characters())
    text, others = found[0], found[3]
    starts, stops = np.frombuffer(found[1], np.int64), np.frombuffer(found[2], np.int64)
    if others:  # they come behind all
        more = [clean(documents[k].decode()).encode() for k in others]
        starts, stops, ends = starts.copy(), stops.copy(), len(text) + np.cumsum(lengths_of(more))
        starts[others], stops[others], text = ends - lengths_of(more), ends, b"".join((text, *more))
    return Lump(text, starts, stops)


def _plain_if_made() -> bytes | None:
    return plain_characters() if plain_characters.cache_info().currsize > 0 else None


@lru_cache(maxsize=1)
def plain_characters() -> bytes:
    """1 for each character beyond ASCII that stays as it is, whatever stands beside it.

    It is no white space, no control, and NFC neither changes it nor joins it to another.
    """
    characters = list(map(chr, range(NUM_POINTS)))
    found = np.fromiter(map(USUAL.__contains__, map(unicodedata.category, characters)), bool, NUM_POINTS)
    for point, decomposed in enumerate(map(unicodedata.decomposition, characters)):
        if decomposed and not decomposed.startswith("<"):
            found[point] &= unicodedata.is_normalized("NFC", characters[point])
            for second in decomposed.split()[1:]:  # of two that become one
                found[int(second, 16)] = False
    found[:0x80] = False
    found[0x1100:0x1200] = False  # letters of which Hangul is joined, by a rule
    found[0xFEFF] = False
    return found.tobytes()


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
