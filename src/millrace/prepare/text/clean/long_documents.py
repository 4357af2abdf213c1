"""Cleans long documents by blocks: 60 MiB may need 240 as a ``str``, and gigabytes as a list of words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from millrace.prepare.text.clean.characters import clean_block
from millrace.text.documents import Documents, measure
from millrace.text.words import character_start

BLOCK, STEP = 1 << 20, 64 << 10
# A text may be cut between two of these: they are no white space, and NFC does not join them.
PLAIN = (
    "[!-~\u00c0-\u024f\u0400-\u045f\u0620-\u064a\u0e01-\u0e30\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
    "\U0001f300-\U0001faff\U00020000-\U0002ebef]"
)
PLACES = re.compile(f"(?<={PLAIN})(?={PLAIN})")


def clean_long(document: bytes) -> bytes:
    """``clean`` of a document; UnicodeDecodeError where it is not utf-8, with a place within some block."""
    cleaned = bytearray()
    needs_space = False  # before more words of the same line
    for block, ends_in_space in blocks(document):
        text = clean_block(block)
        if text:
            if needs_space and cleaned and not cleaned.endswith(b"\n") and not text.startswith(b"\n"):
                cleaned += b" "
            cleaned += text[_num_extra(cleaned, text) :]
            needs_space = False
        needs_space |= ends_in_space
    while cleaned.endswith(b"\n"):
        del cleaned[-1:]
    return bytes(cleaned)


def _num_extra(before: bytearray, after: bytes) -> int:
    """How many newlines at the start of ``after`` go: a text may be followed by two, and begins with none."""
    newlines = len(after) - len(after.lstrip(b"\n"))
    there = 2 if not before or before.endswith(b"\n\n") else int(before.endswith(b"\n"))
    return max(0, there + newlines - 2)


def blocks(document: bytes) -> Iterator[tuple[bytes, bool]]:
    """Blocks of about a megabyte to clean one by one, and whether each ends in a space within a line."""
    start = 0
    while start < len(document):
        stop, ends_in_space = _cut(document, start)
        yield document[start:stop], ends_in_space
        start = stop


def _cut(document: bytes, start: int) -> tuple[int, bool]:
    for first in range(start + BLOCK - STEP, len(document) - STEP, STEP):
        for end, is_space in ((b"\n", False), (b" ", True)):
            place = document.rfind(end, first, first + STEP)
            if place >= 0:
                return place + 1, is_space
        begin = character_start(document, first)
        match = PLACES.search(document[begin : character_start(document, first + STEP)].decode(errors="replace"))
        if match is not None:
            return begin + len(match.string[: match.start()].encode()), False
    return len(document), False


def num_characters(document: bytes) -> int:
    """Characters of valid utf-8."""
    return int(measure(Documents.of([document]))[1][0])
