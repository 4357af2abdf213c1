"""Patterns of ``--exclude``: files and folders of the input to leave out."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


class Exclude:
    """Glob patterns; ``*`` and ``**`` also match ``/``.

    A pattern is compared with the path as it is shown, with the name of the file, and with its path below the folder
    that was given. A folder that matches is left out with everything in it.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        # By pattern, what it matched: path -> whether it is a folder.
        self._found: dict[str, dict[str, bool]] = {pattern: {} for pattern in patterns}

    def matches(self, path: str, below: Sequence[str], *, is_folder: bool = False) -> bool:
        """Whether to leave out a path; ``below`` are its parts below the folder or pattern that was given."""
        if not self._found or (is_folder and not below):
            return False
        pattern = next((pattern for pattern in self._found if _matches(pattern, path, below)), None)
        if pattern is not None:
            self._found[pattern][path] = is_folder
        return pattern is not None

    def notes(self) -> list[str]:
        """How much each pattern left out. One that matched nothing may be a mistake."""
        return [
            f"--exclude {pattern!r} left out {_counted(list(found.values()))}"
            if found
            else f"--exclude {pattern!r} matches no file; check the pattern"
            for pattern, found in self._found.items()
        ]


def _matches(pattern: str, path: str, below: Sequence[str]) -> bool:
    plain = pattern.removeprefix("./").removesuffix("/").removeprefix("**/")
    names = [path, path.removeprefix("./"), "/".join(below), *below[-1:]]
    # Its folders too: a pattern such as ``d/**`` finds files without asking for their folders.
    names += ["/".join(below[:k]) for k in range(1, len(below))] + list(below[:-1])
    return any(fnmatchcase(name, form) for name in names for form in {pattern, plain})


def _counted(are_folders: list[bool]) -> str:
    counts = ((are_folders.count(False), "file"), (are_folders.count(True), "folder"))
    return " and ".join(f"{count:,} {noun}{'s' * (count != 1)}" for count, noun in counts if count)
