"""What to do where a path is no store: ``folder.missing`` asks here, for ``open_store`` and every command.

A source file is answered with the command that makes a store of it, a path that is not there with the nearest one.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter

from millrace.errors import closest, too_long
from millrace.store.ownership import url_in
from millrace.terminal import quoted

PACKED = (".gz", ".zst", ".bz2", ".xz")  # endings that stand behind another
ENDINGS = {
    "table": (".parquet", ".pq", ".csv", ".tsv"),
    "text": (".txt", ".text", ".jsonl", ".ndjson", ".md", ".rst", ".html", ".htm", ".tex", ".py"),
    "archive": (".tar", ".tgz", ".tbz", ".txz", ".zip", ".7z", ".rar"),
    "arrays": (".h5", ".hdf5", ".root", ".npz", ".mat", ".nc", ".pt", ".pth", ".safetensors", ".pkl", ".feather", ".arrow"),
    "image": (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tif", ".tiff", ".webp"),
}  # fmt: skip
KINDS = {ending: kind for kind, endings in ENDINGS.items() for ending in endings}
WHAT = {"table": "a table", "text": "text", "archive": "an archive", "arrays": "a file of arrays", "image": "an image"}


def not_a_store(path: str) -> str:
    """Why a path is no store and what to do, as one sentence that begins with the path."""
    if (url := url_in(path)) is not None:
        return f"{url} is a URL, and a path is expected here; millrace pull brings the store and checks it"
    try:
        os.stat(path)
    except (OSError, ValueError) as error:  # a ValueError for a null byte in it
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return str(too_long(path))
        return f"{path} {_nearest(path)}"
    names = _listing(path) if os.path.isdir(path) else [path]
    if "feed.jsonl" in names:
        return f"{path} is the folder of a run, not a store; give the store, or use: millrace explain RUN --step N"
    kinds = Counter(kind for name in names if (kind := _kind(name)) is not None)
    kind, count = kinds.most_common(1)[0] if kinds else ("", 0)
    if 2 * count > len(names):
        what = WHAT[kind] if os.path.isfile(path) else f"a folder of {kind.removesuffix('s')} files"
        return f"{path} is {what}, not a store; {_remedy(kind, path)}"
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    alone = "; a single data file in it may open by itself" * any(name.endswith((".npy", ".bin")) for name in names)
    has = " (the folder is empty)" if not names else f" (it has {shown}{alone})" if os.path.isdir(path) else ""
    return f"{path} holds no store and no layout that millrace knows{has}; docs/guide/stores.md lists them"


def _listing(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def _kind(name: str) -> str | None:
    stem, ending = os.path.splitext(name.lower())
    if ending in PACKED:
        ending = os.path.splitext(stem)[1]
    return KINDS.get(ending)


def _remedy(kind: str, path: str) -> str:
    source = quoted(path)
    if kind == "table":
        return (
            f"make one with: millrace prepare table {source} --out STORE --entity COLUMN --time COLUMN "
            "(or millrace prepare text, where a column holds documents)"
        )
    if kind == "text":
        return f"make one with: millrace prepare text {source} --out STORE"
    if kind == "archive":
        return "unpack it, then use millrace prepare text or millrace prepare table on what was in it"
    return "read it with its own library and write a store with millrace.StoreWriter (docs/guide/stores.md shows how)"


def _nearest(path: str) -> str:
    """What is near a path that is not there: in the deepest folder of it that is."""
    folder, name = os.path.split(path.rstrip(os.sep))
    below = ""
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        below = os.path.join(name, below)
        folder, name = os.path.split(folder)
    near = closest(name, _listing(folder))
    if near is None:
        return "does not exist; check the path"
    whole = os.path.join(folder, near, below).rstrip(os.sep)
    return f"does not exist; did you mean {whole if os.path.exists(whole) else os.path.join(folder, near)}?"
