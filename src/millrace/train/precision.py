"""Number formats: where autocast lowers them, and fp16's gradient scaler with the steps it skips."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from millrace.errors import ConfigError
from millrace.feed.batch import Batch

LOWERED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """How a run computes: ``fp32``, ``bf16`` or ``fp16`` by autocast over fp32 weights, ``fp64`` for checks."""

    def __init__(self, name: str, device: torch.device) -> None:
        if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ConfigError(f"train.precision = 'bf16', but {torch.cuda.get_device_name(device)} has none; take fp16")
        self.name, self.device = name, device
        self.scaler = GradScaler(device.type, enabled=name == "fp16")
        self.dtype = torch.float64 if name == "fp64" else torch.float32
        self.skipped = 0

    def cast(self, model: nn.Module) -> nn.Module:
        """Floats in the precision of the weights; integers and complex numbers stay what they are."""
        return model.double() if self.name == "fp64" else model.float()

    def to_device(self, batch: Batch) -> Batch:
        """The batch where the model is, its floats in the model's precision."""
        return Batch(
            {name: self._moved(value) for name, value in batch.items()},
            positions=batch.positions, samples=batch.samples, valid=batch.valid,
        )  # fmt: skip

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            return value.to(self.device)
        # A copy on the CPU, on torch's own alignment: products of unaligned matrices may differ in their last bit.
        return value.to(self.device, self.dtype, copy=self.device.type == "cpu")

    def autocast(self) -> Any:
        lowered = LOWERED.get(self.name)
        if lowered is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=lowered)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimiser's step, unless fp16 gradients overflowed: then it is skipped and counted."""
        if not self.scaler.is_enabled():
            optimizer.step()
            return
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before

    def state(self) -> dict[str, Any]:
        return {"scaler": self.scaler.state_dict(), "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.skipped = int(state["skipped"])
