"""Where a run tells of itself: lines that stay, and one that is replaced."""

from __future__ import annotations

from typing import Protocol


class Console(Protocol):
    def say(self, text: str) -> None:
        """A line that stays."""

    def show(self, text: str) -> None:
        """The progress line: replaces the one before where it can."""


class Silent:
    """Tells nothing: ranks other than the first, and programs that did not ask."""

    def say(self, text: str) -> None: ...

    def show(self, text: str) -> None: ...
