"""The text of HTML pages (``--html text``), in its order; nothing is fetched, and no script runs.

The parser is lexbor, through selectolax: it builds the tree that browsers build, also of damaged pages.
The tree is walked without recursion, so its depth does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from millrace.distribution import install_command
from millrace.errors import ConfigError
from millrace.prepare.text.read.records import Bad
from millrace.prepare.text.read.sources import Source

# Not text, text for old browsers, or a copy of an option. In a head, only the title has text.
DROPPED = frozenset(("script", "style", "template", "noscript", "iframe", "noembed", "noframes", "selectedcontent"))
BLOCK_NAMES = """address article aside blockquote body br caption center dd details dialog dir div dl dt fieldset figcaption
figure footer form h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li listing main menu nav ol optgroup option p plaintext
pre search section select summary table tbody textarea tfoot thead title tr ul xmp"""
BLOCKS = frozenset(BLOCK_NAMES.split())  # on lines of their own
CELLS = frozenset(("td", "th"))
AS_IT_IS = frozenset(("pre", "textarea", "listing", "plaintext", "xmp"))  # here spaces and line ends count
SPACES = re.compile("[ \t\n\f\r]+")  # as in HTML: a no-break space is not one
# HTML repeats these in each block that follows until they are closed: 44 kB made a tree of 3 GB. They do
# not affect lines, so their names get a mark, and the parser takes them for unknown elements.
STYLING = re.compile(
    "<(/?(?:a|b|big|code|em|font|i|nobr|s|small|strike|strong|tt|u))(?=[ \t\n\f\r/>])", re.IGNORECASE | re.ASCII
)
MARK = "-\ue000"


def check_library(sources: Iterable[Source]) -> None:
    """Refuses pages where the library is missing, before any work."""
    if any(source.is_page for source in sources):
        _library()


def _library() -> Any:
    try:
        from selectolax import lexbor
    except ImportError as error:
        raise ConfigError(f"--html text needs selectolax; {install_command('html')}") from error
    return lexbor


def tree(page: str) -> Any:
    """The root of a page."""
    library = _library()
    try:  # with scripting, <noscript> is one node
        return library.LexborHTMLParser(STYLING.sub(rf"<\1{MARK}", page), scripting=True).root
    except library.SelectolaxError as error:
        raise Bad(0, f"HTML that cannot be parsed: {error}", page[:1024].encode()) from None


def page_text(page: str) -> str:
    """The text of a page: block elements on lines of their own, no empty lines."""
    lines = _TextLines()
    node = tree(page)
    while node is not None:
        child = None
        if node.is_text_node:
            lines.add(node.text_content.replace(MARK, ""))  # the text of a title may have tags
        elif node.tag not in DROPPED:
            lines.enter(node.tag)
            child = node.first_child
        if child is not None:
            node = child
            continue
        while node is not None:
            if not node.is_text_node and node.tag not in DROPPED:
                lines.leave(node.tag)
            if node.next is not None:
                node = node.next
                break
            node = node.parent
    return lines.text()


class _TextLines:
    """Collects lines of text while a page is walked through."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._line: list[str] = []
        self._as_it_is = 0  # open elements in which spaces count

    def add(self, text: str) -> None:
        self._line.append(text)

    def enter(self, tag: str) -> None:
        if tag in BLOCKS:
            self._end()
        self._as_it_is += tag in AS_IT_IS

    def leave(self, tag: str) -> None:
        if tag in BLOCKS:
            self._end()
        elif tag in CELLS:
            self._line.append(" ")
        self._as_it_is -= tag in AS_IT_IS

    def text(self) -> str:
        self._end()
        return "\n".join(self._lines)

    def _end(self) -> None:
        text = "".join(self._line)
        self._line.clear()
        text = text.strip("\r\n") if self._as_it_is else SPACES.sub(" ", text).strip(" ")
        if text:
            self._lines.append(text)
