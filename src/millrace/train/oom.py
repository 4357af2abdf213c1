"""Out of memory, on a GPU or the CPU: recognised, and said with what to do about it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from millrace.errors import TrainError

# Only CUDA's own allocator has an error class; these are RuntimeErrors.
SIGNS = ("DefaultCPUAllocator: can't allocate", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


@contextlib.contextmanager
def memory_for(doing: str, remedy: str, **context: Any) -> Iterator[None]:
    """Turns a lack of memory in the body into a ``TrainError`` that says where and what helps."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainError(f"out of memory {doing}; {remedy}, then run the same command again", **context) from error
