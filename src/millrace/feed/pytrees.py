"""Batch and Ragged as pytrees of torch and JAX: the leaves are the columns, and a rebuilt batch keeps its marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millrace.errors import ConfigError
from millrace.feed.batch import MARKS, Batch, num_marked, num_rows, with_marks
from millrace.feed.callers import STACKED
from millrace.ragged import Ragged


class Outline:
    """A batch without its leaves. Outlines with the same column names are equal: a function is traced once for all."""

    def __init__(self, batch: Batch) -> None:
        self.names, self.marks = tuple(batch), dict(batch.__dict__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outline) and self.names == other.names

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return f"Outline({', '.join(self.names)})"

    def batch(self, leaves: Sequence[Any], traced: type | tuple[type, ...]) -> Batch:
        """The batch of these leaves; without marks if they are ``traced`` (any batch), or have another number of rows."""
        parts = [part for leaf in leaves for part in (arrays_of(leaf)[0] if isinstance(leaf, Ragged) else [leaf])]
        has_arrays = any(getattr(part, "ndim", None) is not None for part in parts)  # else shapes, shardings, ...
        is_same = not has_arrays or num_rows(leaves) == num_marked(self.marks)
        keeps = is_same and not any(isinstance(part, traced) for part in parts)
        marks: dict[str, Any] = self.marks if keeps else dict.fromkeys(MARKS)
        return with_marks(dict(zip(self.names, leaves, strict=True)), marks)


def columns_of(batch: Batch) -> tuple[list[Any], Outline]:
    return list(batch.values()), Outline(batch)


def arrays_of(ragged: Ragged) -> tuple[list[Any], None]:
    return [ragged.values, ragged.offsets], None


def _refuse_stacking(batches: Any, *, collate_fn_map: Any = None) -> Any:
    raise ConfigError(STACKED)


_is_known_to_torch = False


def torch_pytrees() -> None:
    """Registers batches and ragged columns with torch, once; its DataLoader then refuses to stack batches."""
    global _is_known_to_torch
    if _is_known_to_torch:
        return
    _is_known_to_torch = True
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx import Proxy
    from torch.utils import _pytree
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map[Batch] = _refuse_stacking

    def with_keys(batch: Batch) -> tuple[list[tuple[Any, Any]], Outline]:
        return [(_pytree.MappingKey(name), value) for name, value in dict.items(batch)], Outline(batch)

    def ragged_with_keys(ragged: Ragged) -> tuple[list[tuple[Any, Any]], None]:
        keys = _pytree.GetAttrKey("values"), _pytree.GetAttrKey("offsets")
        return list(zip(keys, arrays_of(ragged)[0], strict=True)), None

    _pytree.register_pytree_node(
        Batch,
        columns_of,
        lambda leaves, outline: outline.batch(list(leaves), (FakeTensor, Proxy)),
        flatten_with_keys_fn=with_keys,
    )
    _pytree.register_pytree_node(
        Ragged, arrays_of, lambda arrays, _: Ragged.trusted(*arrays), flatten_with_keys_fn=ragged_with_keys
    )
