"""Arrow arrays of a batch, as the reader of tables needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.prepare.table.read.schema import is_number, logical
from millrace.ragged import Array


def is_alike(one: Any, other: Any) -> bool:
    """Whether columns of both types are read the same way; --widen may have made them differ in width or unit."""
    from pyarrow import types as t

    families = (is_number, t.is_timestamp)
    return one == other or t.is_null(one) or t.is_null(other) or any(is_(one) and is_(other) for is_ in families)


def without_empty_texts(table: Any) -> Any:
    """A CSV file cannot tell an empty text from none: as a key or a category it is null."""
    import pyarrow
    from pyarrow import compute

    for k, field in enumerate(table.schema):
        if field.type == pyarrow.string():
            texts = compute.if_else(
                compute.equal(table.column(k), ""), pyarrow.scalar(None, field.type), table.column(k)
            )
            table = table.set_column(k, field, texts)
    return table


def flatten(column: Any) -> Any:
    return column.combine_chunks() if hasattr(column, "combine_chunks") else column


def null_rows(arrays: Mapping[str, Any], row: int | None = None) -> Any:
    """A mask of the rows where one of them is null (or not a number); None where none is."""
    import pyarrow

    found = None
    for array in arrays.values():
        mask = None
        if pyarrow.types.is_floating(array.type):
            mask = ~np.isfinite(array.to_numpy(zero_copy_only=False))
            mask = mask if mask.any() else None
        elif array.null_count:
            mask = array.is_null().to_numpy(zero_copy_only=False)
        if mask is not None:
            found = mask if found is None else found | mask
    return found if row is None else found is not None and bool(found[row])


def as_texts(array: Any) -> Any:
    import pyarrow

    if pyarrow.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array if logical(array.type) == pyarrow.string() else array.cast(pyarrow.string())


def encode_texts(array: Any) -> tuple[list[str], Array]:
    """(distinct texts, code of each row, -1 for null)."""
    import pyarrow

    if not pyarrow.types.is_dictionary(array.type):
        array = array.dictionary_encode()  # then only the distinct ones become text
    codes = array.indices
    if codes.null_count:
        codes = codes.fill_null(-1)
    return as_texts(array.dictionary).to_pylist(), codes.to_numpy(zero_copy_only=False).astype(np.int32, copy=False)
