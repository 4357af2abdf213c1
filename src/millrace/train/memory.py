"""What a training state weighs, part by part, and what a GPU says of itself."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

# Dense bf16 products per second by the vendors' data sheets, for MFU.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "V100": 125e12}


def memory_by_part(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Bytes of this rank: parameters, gradients, optimiser state."""
    parameters = list(model.parameters())
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
    return {
        "parameters": sum(map(_bytes, parameters)),
        "gradients": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(map(_bytes, state)),
    }


def _bytes(tensor: Tensor) -> int:
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.numel() * local.element_size())


def peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def gpu_facts(device: torch.device) -> dict[str, float]:
    """Memory at its highest, and the utilisation where NVML is installed."""
    if device.type != "cuda":
        return {}
    facts = {"gpu_memory": float(torch.cuda.max_memory_allocated(device))}
    with contextlib.suppress(Exception):  # no NVML, which is an extra of its own, or a GPU that does not tell (MIG)
        facts["gpu_utilization"] = torch.cuda.utilization(device) / 100
    return facts
