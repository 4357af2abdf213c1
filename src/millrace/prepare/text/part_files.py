"""What a part keeps of its documents beside their tokens: a file for each column, since they are read by the million."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from millrace.prepare.parts import part_folder
from millrace.prepare.spill import mapped
from millrace.ragged import Array

COLUMNS = {
    "hash": np.dtype(("<u8", 2)),
    "source": np.dtype("<i4"),
    "offset": np.dtype("<i8"),
    "length": np.dtype("<i8"),  # tokens, with the end
    "size": np.dtype(("<i8", 2)),  # bytes and characters; only where documents may yet go
    "goes_on": np.dtype(bool),  # with the one before it, of which it is another piece; only where long ones are cut
}


def file_of(column: str) -> str:
    return f"{column}.bin"


def kept(folder: str | Path, key: str, column: str) -> Array:
    """A column of all documents of a part."""
    dtype = COLUMNS[column]
    values = mapped(part_folder(folder, key) / file_of(column), dtype.base)
    return values.reshape(-1, *dtype.shape)
