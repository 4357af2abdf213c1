"""For JAX: importing this makes ``Batch`` and ``Ragged`` pytrees, for ``jax.jit``, ``jax.tree.map`` and ``device_put``.

JAX takes the arrays of ``Feed(..., device="numpy")`` without a copy. Under ``jax.distributed`` each process gets its share.
"""

from __future__ import annotations

from typing import Any

from millrace.distribution import install_command
from millrace.feed.batch import Batch
from millrace.feed.pytrees import Outline, arrays_of, columns_of
from millrace.ragged import Ragged

try:
    from jax.core import Tracer
    from jax.tree_util import DictKey, GetAttrKey, register_pytree_with_keys
except ImportError as error:
    raise ImportError(f"millrace.jax needs jax; {install_command('jax')}") from error


def _columns_with_keys(batch: Batch) -> tuple[list[tuple[Any, Any]], Outline]:
    return [(DictKey(name), value) for name, value in dict.items(batch)], Outline(batch)


def _arrays_with_keys(ragged: Ragged) -> tuple[list[tuple[Any, Any]], None]:
    return [(GetAttrKey("values"), ragged.values), (GetAttrKey("offsets"), ragged.offsets)], None


register_pytree_with_keys(
    Batch, _columns_with_keys, lambda outline, leaves: outline.batch(list(leaves), Tracer), columns_of
)
register_pytree_with_keys(Ragged, _arrays_with_keys, lambda _, arrays: Ragged.trusted(*arrays), arrays_of)
