"""The columns that a part stores beside its tokens: a file each, since documents come by the million."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from millrace.prepare.parts import part_folder
from millrace.prepare.spill import map_array
from millrace.ragged import Array

RECLAIMED = ("tokens.bin", "mask.bin")  # needed for shards alone; the others say where documents are
COLUMNS = {
    "hash": np.dtype(("<u8", 2)),
    "source": np.dtype("<i4"),
    "offset": np.dtype("<i8"),
    "length": np.dtype("<i8"),  # tokens, with the end
    "size": np.dtype(("<i8", 2)),  # bytes and characters; only where documents may still be dropped
    "goes_on": np.dtype(bool),  # whether it is another piece of the one before; only where documents are cut
}


def part_column(folder: str | Path, key: str, column: str) -> Array:
    """A column of all documents of a part."""
    dtype = COLUMNS[column]
    values = map_array(part_folder(folder, key) / f"{column}.bin", dtype.base)
    return values.reshape(-1, *dtype.shape)
