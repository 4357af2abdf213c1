"""Are two stores the same, byte for byte? The oracle of every fault test.

A store that was killed, resumed, or written by several processes must equal an undisturbed one in every file
but ``provenance.json``, which says when and by what command it was made.
"""

from __future__ import annotations

import hashlib
import os


def tree_digest(path: str | os.PathLike[str]) -> dict[str, str]:
    """Relative path -> sha256 of everything below a folder but its ``provenance.json``.

    Folders are listed too (their name ends with ``/``), so that an empty one left behind is a difference.
    """
    root = os.fspath(path)
    found: dict[str, str] = {}
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in [*folders, *files]:
            full = os.path.join(folder, name)
            relative = os.path.relpath(full, root)
            if os.path.islink(full):
                found[relative] = f"link to {os.readlink(full)}"
            elif os.path.isdir(full):
                found[f"{relative}/"] = "folder"
            elif relative != "provenance.json":
                with open(full, "rb") as file:
                    found[relative] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def assert_same_store(left: str | os.PathLike[str], right: str | os.PathLike[str]) -> None:
    """Raises ``AssertionError`` naming every file that only one has, or that differs."""
    one, other = tree_digest(left), tree_digest(right)
    if not one:
        raise AssertionError(f"{left} holds nothing; expected a store")
    problems = [f"only in {left}: {name}" for name in one if name not in other]
    problems += [f"only in {right}: {name}" for name in other if name not in one]
    problems += [f"differs: {name}" for name in one if name in other and one[name] != other[name]]
    if problems:
        raise AssertionError(f"{left} and {right} are not the same store\n  " + "\n  ".join(problems))
