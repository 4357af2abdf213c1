"""Long documents, a block at a time: a text of 60 MiB may need 240 as a ``str``, and gigabytes as a list of its words."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

import numpy as np

from millrace.native import core
from millrace.prepare.text.clean.characters import clean_block, is_utf8
from millrace.text.breaks import is_long
from millrace.text.tokenizer import measured
from millrace.text.words import character

__all__ = ["blocks", "check_utf8", "clean_long", "is_long", "num_characters"]

BLOCK, STEP = 1 << 20, 64 << 10
# Between two of these a text may be cut: they are no white space, and do not join with what stands before them in NFC.
PLAIN = (
    "[!-~\u00c0-\u024f\u0400-\u045f\u0620-\u064a\u0e01-\u0e30\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
    "\U0001f300-\U0001faff\U00020000-\U0002ebef]"
)
PLACES = re.compile(f"(?<={PLAIN})(?={PLAIN})")


def clean_long(document: bytes) -> bytes:
    """``clean`` of a document; UnicodeDecodeError where it is not utf-8, at a place within some block."""
    found = bytearray()
    is_apart = False  # by a space from the words to come, if those are of the same line
    for block, ends_in_space in blocks(document):
        text = clean_block(block)
        if text:
            if is_apart and found and not found.endswith(b"\n") and not text.startswith(b"\n"):
                found += b" "
            found += text[_too_many(found, text) :]
            is_apart = False
        is_apart |= ends_in_space
    while found.endswith(b"\n"):
        del found[-1:]
    return bytes(found)


def _too_many(before: bytearray, after: bytes) -> int:
    """How many newlines at the start of ``after`` are too many: two may follow a text, none stand before it."""
    newlines = len(after) - len(after.lstrip(b"\n"))
    there = 2 if not before or before.endswith(b"\n\n") else int(before.endswith(b"\n"))
    return max(0, there + newlines - 2)


def blocks(document: bytes) -> Iterator[tuple[bytes, bool]]:
    """Blocks of about a megabyte that can be cleaned one by one, and whether they end within a line, in a space."""
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
        begin = character(document, first)
        match = PLACES.search(document[begin : character(document, first + STEP)].decode(errors="replace"))
        if match is not None:
            return begin + len(match.string[: match.start()].encode()), False
    return len(document), False


def check_utf8(document: bytes) -> None:
    """UnicodeDecodeError where it is not utf-8, at a place within some block."""
    if core and is_utf8(document, 0, len(document)):
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(document), BLOCK):
        decoder.decode(document[start : start + BLOCK], final=start + BLOCK >= len(document))


def num_characters(document: bytes) -> int:
    """Of valid utf-8: bytes that go on with a character are none of their own."""
    if core:
        return int(measured([document])[1][0])
    data = np.frombuffer(document, np.int8)
    return sum(int((data[start : start + BLOCK] >= -64).sum()) for start in range(0, len(data), BLOCK))
