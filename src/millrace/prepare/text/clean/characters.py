"""Cleans documents: Unicode NFC, line ends, control characters, white space."""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from millrace.native import core
from millrace.text.documents import Documents

# Control characters but tab and newline, and the byte order mark; other line ends become newlines.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
UNUSUAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\u2028\u2029]")
EMPTY_LINES = re.compile("\n{3,}")
BLOCK = 1 << 20  # bytes that are decoded at once
# The kinds of characters beyond ASCII, for the core; a number up to 240 is the combining class of a mark.
NUM_POINTS = 0x20000  # code points with a kind; that of the first is for all above
LEFT, MOST_CLASS, JOINING, DROPPED, NEWLINE, BLANK, PLAIN = 0, 240, 251, 252, 253, 254, 255  # as in clean.c
MANY_BYTES = 1 << 16  # skipped by the core before the tables are made


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
    """The same of a part of a document; it may have any number of empty lines, also at its ends."""
    if UNUSUAL.search(text):
        text = CONTROLS.sub("", LINE_ENDS.sub("\n", text))
    if not text.isascii():
        # Controls go first: one may have been between a letter and its accent.
        text = unicodedata.normalize("NFC", text)
    # Three times as fast as a regular expression.
    return "\n".join([" ".join(line.split()) for line in text.split("\n")])


def clean_block(block: bytes) -> bytes:
    """The same of a part as bytes, at most one empty line in it; UnicodeDecodeError where it is invalid."""
    # Between two full stops, white space at the ends of the block counts as inside a text.
    return clean_documents(Documents.of([b"." + block + b"."]))[0][1:-1].strip(b" ")


def is_utf8_core(data: bytes, first: int, last: int) -> bool:
    return bool(core.is_utf8(data, first, last))


def is_utf8_python(data: bytes, first: int, last: int) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(first, last, BLOCK):
            decoder.decode(data[start : min(start + BLOCK, last)], final=start + BLOCK >= last)
    except UnicodeDecodeError:
        return False
    return True


def clean_core(documents: Documents) -> Documents:
    made = tables() if tables.cache_info().currsize else None
    cleaned, skipped = _run_core(documents, None if made is None else made[0])
    if not skipped:
        return cleaned
    _skipped["bytes"] += sum(len(documents[k]) for k in skipped)
    if made is None and _skipped["bytes"] >= MANY_BYTES:
        made = tables()
        cleaned, skipped = _run_core(documents, made[0])
    texts = [documents[k].decode() for k in skipped]
    return _insert(
        cleaned, skipped, [clean(text).encode() for text in texts] if made is None else _to_nfc(texts, made[1])
    )


def _to_nfc(texts: Sequence[str], table: bytes) -> Sequence[bytes]:
    """``clean`` of texts that NFC may change. After NFC, the core can clean nearly all of them."""
    normal = Documents.of([unicodedata.normalize("NFC", text).encode() for text in texts])
    cleaned, skipped = _run_core(normal, table)
    return _insert(cleaned, skipped, [clean(texts[k]).encode() for k in skipped])


_skipped: Counter[str] = Counter()  # by the core, in this process


def _run_core(documents: Documents, table: bytes | None) -> tuple[Documents, list[int]]:
    """Clean documents, and the numbers of those that the core skipped, which are empty."""
    text, starts, stops, skipped = core.clean_documents(documents.arrays, table)
    starts, stops = np.frombuffer(starts, np.int64), np.frombuffer(stops, np.int64)
    return Documents(text, starts, stops, documents.offsets, None, documents.piece_of), skipped


def _insert(documents: Documents, numbers: list[int], texts: Sequence[bytes]) -> Documents:
    """The documents with these texts for those of these numbers."""
    if not numbers:
        return documents
    more = Documents.of(texts)
    starts, stops = documents.starts.copy(), documents.stops.copy()
    first = len(documents.text)
    starts[numbers], stops[numbers] = more.starts + first, more.stops + first
    return Documents(documents.text + more.text, starts, stops, documents.offsets, None, documents.piece_of)


@lru_cache(maxsize=1)
def tables() -> tuple[bytes, bytes]:
    """The kinds of characters for the core: in any text, and in a text that is in NFC.

    A text is in NFC if NFC changes none of its characters and joins none with the one before, and its
    marks are in the order of their classes.
    """
    characters = list(map(chr, range(NUM_POINTS)))
    anywhere = np.fromiter(map(unicodedata.combining, characters), np.uint8, NUM_POINTS)
    anywhere[anywhere == 0] = PLAIN
    for point, decomposed in enumerate(map(unicodedata.decomposition, characters)):
        if decomposed and not decomposed.startswith("<"):
            if not unicodedata.is_normalized("NFC", characters[point]):
                anywhere[point] = LEFT
            for second in decomposed.split()[1:]:  # the second of two that become one
                anywhere[int(second, 16)] = LEFT
    anywhere[0x1100:0x1200] = LEFT  # letters that a rule joins to Hangul
    normal = np.where(anywhere <= MOST_CLASS, np.uint8(JOINING), anywhere)
    for table, beyond in ((anywhere, LEFT), (normal, PLAIN)):
        table[np.fromiter(map(str.isspace, characters), bool, NUM_POINTS)] = BLANK
        table[0x80:0xA0] = table[0xFEFF] = DROPPED
        table[[0x85, 0x2028, 0x2029]] = NEWLINE
        table[0xD800:0xE000] = LEFT
        table[0] = beyond
    return anywhere.tobytes(), normal.tobytes()


def clean_python(documents: Documents) -> Documents:
    texts = [clean(document.decode()).encode() for document in documents]
    return Documents.of(texts, documents.offsets, None, documents.piece_of)


# Whether data[first:last] is utf-8, and ``clean`` of each document; UnicodeDecodeError where one is invalid.
is_utf8 = is_utf8_core if core else is_utf8_python
clean_documents = clean_core if core else clean_python
