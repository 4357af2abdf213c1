"""Strings from data on their way to a person: a terminal, a page or a log.

A name of a column, a file or a worker may hold anything. Raw, an escape sequence rewrites the screen, a newline forges a
line, and bidirectional marks turn a message around. All messages of errors and all lines of commands pass ``printable``.
"""

from __future__ import annotations

import os
import re
import shlex

LINES = "\n\t"  # what texts of several lines keep


def printable(text: str, keep: str = "") -> str:
    """The text on one line, with characters that cannot be printed as escapes; those in ``keep`` stay.

    >>> printable("a\\x1b[2Jb\\u202ec\\n")
    'a\\\\x1b[2Jb\\\\u202ec\\\\n'
    """
    if text.isprintable():  # as nearly every text is
        return text
    return "".join(letter if letter.isprintable() or letter in keep else repr(letter)[1:-1] for letter in text)


def quoted(word: str) -> str:
    """A word of a command, quoted for a shell; printable whatever it holds.

    >>> quoted("a.csv"), quoted("my file"), quoted("my\\nfile")
    ('a.csv', "'my file'", "$'my\\\\x0afile'")
    """
    if word.isprintable():
        return shlex.quote(word)
    plain = re.compile(rb"[ -&(-\[\]-~]")  # ASCII but for ' and \
    letters = (chr(byte) if plain.match(bytes([byte])) else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(letters)}'"
