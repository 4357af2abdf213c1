"""Cleaning of documents: Unicode NFC, line ends, control characters, white space."""

from __future__ import annotations

import re
import unicodedata

# Control characters but tab and newline, and the byte order mark; other line ends become newlines.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
UNUSUAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\u2028\u2029]")
EMPTY_LINES = re.compile("\n{3,}")


def clean(text: str) -> str:
    """The text in NFC, lines ended by one newline, no control characters, single spaces, at most one empty line.

    >>> clean("a\\u0301  b\\t\\r\\n\\r\\n\\r\\n\\x00c ")
    'á b\\n\\nc'
    """
    if UNUSUAL.search(text):
        text = CONTROLS.sub("", LINE_ENDS.sub("\n", text))
    if not text.isascii():
        text = unicodedata.normalize(
            "NFC", text
        )  # after the controls, which may have stood between a letter and its accent
    # Splitting and joining does with white space what a regular expression does at a third of the speed.
    text = "\n".join([" ".join(line.split()) for line in text.split("\n")])
    if "\n\n\n" in text:
        text = EMPTY_LINES.sub("\n\n", text)
    return text.strip()
