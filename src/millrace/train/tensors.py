"""Named tensors as safetensors files, written in pieces by write(2): a full disk is an error, and memory stays small."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from millrace.store import platform

PIECE = 16 << 20
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes and syncs a new safetensors file; returns the xxh3 of its bytes."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    state = xxhash.xxh3_64()
    fd = platform.create(path)
    try:
        for data in (len(text).to_bytes(8, "little"), text):
            state.update(data)
            platform.write(fd, data, path)
        for tensor in tensors.values():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            view = memoryview(flat.numpy().data)
            for start in range(0, len(view), PIECE):
                state.update(view[start : start + PIECE])
                platform.write(fd, view[start : start + PIECE], path)
        platform.sync(fd, path)
    finally:
        os.close(fd)
    return state.hexdigest()


def read_tensors(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Every tensor of a file, each in its own memory."""
    with safe_open(path, framework="pt", device=device) as file:
        # Clones have torch's alignment: products of unaligned matrices may differ in their last bit.
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no mapping


def hash_file(path: Path) -> str:
    state = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            state.update(piece)
    return state.hexdigest()
