"""Out of memory, on a GPU or the CPU: how it is recognised, and the error with its remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from millrace.errors import TrainError, reason


def is_out_of_memory(error: BaseException) -> bool:
    """Goes by the type of the error. Only the CPU allocator of torch has none: its RuntimeError is known by its name."""
    has_type = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return has_type or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in reason(error))


@contextlib.contextmanager
def memory_for(doing: str, remedy: str, **context: Any) -> Iterator[None]:
    """Turns a lack of memory in the block into a ``TrainError`` that says where it happened and what helps."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainError(f"out of memory {doing}; {remedy}, then run the same command again", **context) from error
