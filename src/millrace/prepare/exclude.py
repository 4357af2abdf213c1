"""Patterns of ``--exclude``: files and folders of the input to leave out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase


class Exclude:
    """Glob patterns; ``*`` and ``**`` also match ``/``.

    A pattern is compared with the path as it is shown, with the name of the file, and with its path below the folder
    that was given. A folder that matches is left out with everything in it.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        # By pattern, what it matched: path -> whether it is a folder.
        self._matches_of: dict[str, dict[str, bool]] = {pattern: {} for pattern in patterns}

    def __bool__(self) -> bool:
        """Whether there are patterns at all."""
        return bool(self._matches_of)

    def matches(self, path: str, below: Sequence[str], *, is_folder: bool = False) -> bool:
        """Whether to leave out a path; ``below`` are its parts below the folder or pattern that was given."""
        if is_folder and not below:
            return False
        pattern = next((pattern for pattern in self._matches_of if _matches(pattern, path, below)), None)
        if pattern is not None:
            self._matches_of[pattern][path] = is_folder
        return pattern is not None

    def notes(self) -> list[str]:
        """How much each pattern left out. One that matched nothing may be a mistake."""
        notes = []
        for pattern, matches in self._matches_of.items():
            counts = Counter("folder" if is_folder else "file" for is_folder in matches.values())
            left = " and ".join(f"{counts[noun]:,} {noun}{'s' * (counts[noun] != 1)}" for noun in sorted(counts))
            how = f"left out {left}" if left else "matches no file; check the pattern"
            notes.append(f"--exclude {pattern!r} {how}")
        return notes


def _matches(pattern: str, path: str, below: Sequence[str]) -> bool:
    plain = pattern.removeprefix("./").removesuffix("/").removeprefix("**/")
    names = [path, path.removeprefix("./"), "/".join(below), *below[-1:]]
    # Its folders too: a pattern such as ``d/**`` finds files without asking for their folders.
    names += ["/".join(below[:k]) for k in range(1, len(below))] + list(below[:-1])
    return any(fnmatchcase(name, form) for name in names for form in {pattern, plain})
