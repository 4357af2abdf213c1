"""How much disk a preparation of a table will need."""

from __future__ import annotations

import numpy as np

from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.read.sources import Survey
from millrace.prepare.table.write.shards import layout_columns

CELL_BYTES = 8  # of a number in a CSV file with its separator, about
EXPANSION = 4  # of compressed CSV files, about


def estimate(found: Survey, options: TableOptions) -> tuple[int, int]:
    """Bytes of disk that are likely needed, and that are needed for certain: every row as it was read, and as it is stored."""
    schema, role = found.schema, found.schema.role
    columns = layout_columns(options, schema)
    stored = sum(column.item_bytes for column in columns.values() if column.axis is not None)
    read = np.dtype(schema.raw_dtype).itemsize * len(role.features) + 8 + 4 * len(role.categorical)
    used = [found.sources[number] for number in sorted({unit.source for part in found.parts for unit in part})]
    texts = [source.file for source in used if source.format == "csv"]
    text = sum(file.size * (EXPANSION if file.path.lower().endswith((".gz", ".zst")) else 1) for file in texts)
    likely = (found.num_rows + text // (CELL_BYTES * len(role.needed))) * (read + stored)
    keeps_all = (
        not options.where and options.transform is None and options.on_error == "stop" and options.min_rows == 1
        and options.duplicates == "error" and not any(options.policy(name)[0] == "drop" for name in role.features)
    )  # fmt: skip
    return likely, found.num_rows * (read + stored) if keeps_all else 0
