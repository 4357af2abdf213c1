"""Where a long document may be cut so that its pieces, encoded one by one, give the ids of the whole.

Engines need many times the memory of what they are given at once: Hugging Face's 140 bytes for every byte, tiktoken's
50 for one long word. A cut is tried between words and proven by the engine itself: the text around it has the same ids
cut and uncut. Tokenizers look no further than that: they split text into words before they encode it, or merge over
short distances. Where there is no such place, ``words.py`` says what the words are, if the pattern is one it knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from millrace.errors import SourceError
from millrace.text.words import character, words_of

PIECE_BYTES = 1 << 20
WHOLE_BYTES = 4 << 20  # a stretch without a place to cut that is still encoded at once
AROUND = 512  # characters on either side on which a cut is proven
TRIES = 64  # in each stretch
NEAR_BYTES = 1 << 13  # of a stretch that are looked at first
# Between words, before or at a space or a line end: whichever the tokenizer splits at.
PLACES = re.compile(r"(?<=\w) (?=\w)|(?<=\S)\n(?=\S)|(?<=[^\W_])(?=[.,;:!?。、，！？])")

Encode = Callable[[list[str]], Sequence[Sequence[int]]]


class Piece(NamedTuple):
    """Bytes [start, stop) of a document; between two pieces may stand what makes no token."""

    start: int
    stop: int
    is_word: bool = False  # one word, which may be too long to be encoded at once


class Uncuttable(SourceError):
    """A stretch of a document that is too long to be encoded at once; ``offset`` is its first byte in the document."""


def is_long(document: bytes, start: int = 0) -> bool:
    """Whether what it has from ``start`` on is more than one piece."""
    return len(document) - start > PIECE_BYTES + PIECE_BYTES // 4


def any_long(documents: Sequence[bytes]) -> bool:
    """Whether one of them is: asked once for all, since a chunk has thousands."""
    return is_long(max(documents, key=len, default=b""))


def cut(document: bytes, encode: Encode, pattern: str | None = None) -> Iterator[Piece]:
    """Pieces of about a megabyte; ``pattern`` is what splits words in the tokenizer, where that is known."""
    start = 0
    while is_long(document, start):
        place = _first_proven(document, start + PIECE_BYTES, encode)
        if place is not None:
            yield Piece(start, place[0])
            start = place[1]
            continue
        words = words_of(pattern)
        found = None if words is None else words.next(document, start, PIECE_BYTES)
        if found is None:
            place = _later(document, start, encode)
            yield Piece(start, place[0])
            start = place[1]
        else:
            yield Piece(start, *found)
            start = found[0]
    if start < len(document) or start == 0:
        yield Piece(start, len(document))


def _later(document: bytes, start: int, encode: Encode) -> tuple[int, int]:
    """The end of a piece that is longer than usual, and the start of the next."""
    for at in range(start + 2 * PIECE_BYTES, min(len(document), start + WHOLE_BYTES), PIECE_BYTES):
        place = _first_proven(document, at, encode)
        if place is not None:
            return place
    if len(document) - start <= WHOLE_BYTES:
        return len(document), len(document)
    raise Uncuttable(
        f"there is no place in {WHOLE_BYTES} bytes where its text may be cut for the tokenizer; break it into lines or words, "
        "or cut such documents (--max-document 4MiB --long-documents split)",
        offset=start,
    )


def _first_proven(document: bytes, at: int, encode: Encode) -> tuple[int, int] | None:
    """The end of one piece and the start of the next, the first that is proven in the stretch from ``at`` on."""
    near = _proven_within(document, at, min(NEAR_BYTES, PIECE_BYTES), encode)  # most texts have one there
    return _proven_within(document, at, PIECE_BYTES, encode) if near is None else near


def _proven_within(document: bytes, at: int, size: int, encode: Encode) -> tuple[int, int] | None:
    first, last = character(document, max(0, at - 4 * AROUND)), character(document, at + size + 4 * AROUND)
    text = document[first:last].decode()
    begin = len(document[first : character(document, at)].decode())
    for match in islice(PLACES.finditer(text, begin, max(begin, len(text) - AROUND)), TRIES):
        for stop, start in ((match.start(),) * 2, (match.end(),) * 2, match.span()):
            if _is_cut(text, stop, start, encode):
                return first + len(text[:stop].encode()), first + len(text[:start].encode())
    return None


def _is_cut(text: str, stop: int, start: int, encode: Encode) -> bool:
    before, after = text[max(0, stop - AROUND) : stop], text[start : start + AROUND]
    whole, left, right = encode([text[max(0, stop - AROUND) : start + AROUND], before, after])
    return list(whole) == [*left, *right]
