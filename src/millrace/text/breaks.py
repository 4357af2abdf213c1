"""Cuts a long document into sections that, encoded one by one, give the ids of the whole.

Encoders need many times the memory of their input: Hugging Face's 140 bytes for every byte, tiktoken's 50
for one long word. A cut is tried between words, and the encoder itself proves it: the text around it has
the same ids cut and uncut. Tokenizers look no further, since they split text into words first, or merge
over short distances. Where there is no such place, ``words.py`` finds the words of known patterns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from millrace.errors import SourceError
from millrace.text.documents import Documents
from millrace.text.words import character_start, words_of

SECTION_BYTES = 1 << 20
WHOLE_BYTES = 4 << 20  # text without a place to cut that is still encoded at once
AROUND = 512  # characters on either side on which a cut is proven
TRIES = 64  # places tried in each stretch of text
NEAR_BYTES = 1 << 13  # looked at first
# Between words, at a space or a line end, or before a mark: wherever the tokenizer splits.
PLACES = re.compile(r"(?<=\w) (?=\w)|(?<=\S)\n(?=\S)|(?<=[^\W_])(?=[.,;:!?。、，！？])")

Encode = Callable[[list[str]], Sequence[Sequence[int]]]


class Section(NamedTuple):
    """Bytes [start, stop) of a document; between two sections may be text that makes no token."""

    start: int
    stop: int
    is_word: bool = False  # one word, which may be too long to encode at once


class Uncuttable(SourceError):
    """A document has no place to cut it; ``offset`` is the first byte that is left."""


def is_long(num_bytes: int) -> bool:
    """Whether so many bytes are more than one section."""
    return num_bytes > SECTION_BYTES + SECTION_BYTES // 4


def any_long(documents: Documents) -> bool:
    return is_long(int(documents.lengths.max(initial=0)))


def cut(document: bytes, encode: Encode, pattern: str | None = None) -> Iterator[Section]:
    """Sections of about a megabyte; ``pattern`` splits words in the tokenizer, where that is known."""
    start = 0
    while is_long(len(document) - start):
        place = _first_proven(document, start + SECTION_BYTES, encode)
        words = words_of(pattern) if place is None else None
        word_end = None if words is None else words.next(document, start, SECTION_BYTES)
        if word_end is not None:
            yield Section(start, *word_end)
            start = word_end[0]
            continue
        stop, after = place or _later(document, start, encode)
        yield Section(start, stop)
        start = after
    if start < len(document) or start == 0:
        yield Section(start, len(document))


def _later(document: bytes, start: int, encode: Encode) -> tuple[int, int]:
    """The end of a section that is longer than usual, and the start of the next."""
    for at in range(start + 2 * SECTION_BYTES, min(len(document), start + WHOLE_BYTES), SECTION_BYTES):
        place = _first_proven(document, at, encode)
        if place is not None:
            return place
    if len(document) - start <= WHOLE_BYTES:
        return len(document), len(document)
    raise Uncuttable(
        f"its text has no place in {WHOLE_BYTES} bytes to cut it for the tokenizer; break it into lines or words, or cut "
        "such documents (--max-document 4MiB --long-documents split)",
        offset=start,
    )


def _first_proven(document: bytes, at: int, encode: Encode) -> tuple[int, int] | None:
    """The first proven cut in the text from ``at`` on: the end of one section and the start of the next."""
    near = _proven_within(document, at, min(NEAR_BYTES, SECTION_BYTES), encode)  # most texts have one there
    return _proven_within(document, at, SECTION_BYTES, encode) if near is None else near


def _proven_within(document: bytes, at: int, size: int, encode: Encode) -> tuple[int, int] | None:
    first = character_start(document, max(0, at - 4 * AROUND))
    last = character_start(document, at + size + 4 * AROUND)
    text = document[first:last].decode()
    begin = len(document[first : character_start(document, at)].decode())
    for match in islice(PLACES.finditer(text, begin, max(begin, len(text) - AROUND)), TRIES):
        for stop, start in ((match.start(),) * 2, (match.end(),) * 2, match.span()):
            if _is_cut(text, stop, start, encode):
                return first + len(text[:stop].encode()), first + len(text[:start].encode())
    return None


def _is_cut(text: str, stop: int, start: int, encode: Encode) -> bool:
    before, after = text[max(0, stop - AROUND) : stop], text[start : start + AROUND]
    whole, left, right = encode([text[max(0, stop - AROUND) : start + AROUND], before, after])
    return list(whole) == [*left, *right]
