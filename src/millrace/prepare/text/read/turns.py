"""Workers take turns with what needs much memory: Parquet of long rows, since pyarrow holds whole pages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from millrace.prepare.engines import alive
from millrace.prepare.runs import parquet_footer
from millrace.prepare.text.read.sources import Source, SourceSlice, arrow

HEAVY_GROUP, HEAVY_ROW = 64 << 20, 1 << 20  # bytes of a row group, and of a row on average


def is_heavy(source: Source, piece: SourceSlice) -> bool:
    """Whether this is a row group of long rows. A file that cannot be read is left for the reader to report."""
    if source.format != "parquet" or source.problem is not None:
        return False
    pyarrow = arrow(source)
    try:
        group = parquet_footer(source)[0].row_group(piece.start)
    except (pyarrow.ArrowException, OSError):
        return False
    return bool(group.total_byte_size > max(HEAVY_GROUP, HEAVY_ROW * group.num_rows))


@contextlib.contextmanager
def take_turn(path: Path) -> Iterator[None]:
    """Lets in one process at a time, where the system has flock; a lock dies with its process."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                alive()
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield
