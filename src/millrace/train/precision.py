"""Number formats: autocast, and the gradient scaler of fp16 with the steps it skips."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from millrace.errors import ConfigError
from millrace.feed.batch import Batch, with_marks

# Below it fp16 has failed. From the first scale, 65,536, that is 31 skipped steps in a row; gradients up to 1e9 pass.
SMALLEST_SCALE = 2.0**-14
LOWERED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """How a run computes: ``fp32``, ``bf16`` or ``fp16`` by autocast over fp32 weights, ``fp64`` for checks."""

    def __init__(self, name: str, device: torch.device) -> None:
        if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ConfigError(f"train.precision = 'bf16', but {torch.cuda.get_device_name(device)} has none; take fp16")
        self.name, self.device = name, device
        self.scaler = GradScaler(device.type, enabled=name == "fp16")
        self.dtype = torch.float64 if name == "fp64" else torch.float32
        self._skipped = 0
        self._was_skipped = False  # whether the last step was
        self._overflows: list[Tensor] = []  # flags of steps not looked at yet: looking waits for the GPU

    def cast(self, model: nn.Module) -> nn.Module:
        """The model with its floats in the precision of the weights; other numbers stay as they are."""
        return model.double() if self.name == "fp64" else model.float()

    def to_device(self, batch: Batch) -> Batch:
        """The batch on the model's device, with its floats in the model's precision."""
        values = {name: self._moved(value) for name, value in dict.items(batch)}
        return batch if all(values[name] is batch[name] for name in batch) else with_marks(values, batch.__dict__)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            return value.to(self.device)
        # On the CPU a copy with torch's alignment: products of unaligned matrices may differ in their last bit.
        return value.to(self.device, self.dtype, copy=self.device.type == "cpu")

    def autocast(self) -> Any:
        lowered = LOWERED.get(self.name)
        if lowered is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=lowered)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps the optimiser. If fp16 gradients overflowed, the step is skipped and counted."""
        if not self.scaler.is_enabled():
            optimizer.step()
            return
        self.scaler.step(optimizer)
        # The scaler's own flags: the scale shows nothing once it cannot become smaller.
        self._overflows += self.scaler._found_inf_per_device(optimizer).values()
        self.scaler.update()

    @property
    def skipped(self) -> int:
        """The number of skipped steps since the run began."""
        if self._overflows:
            flags = torch.stack(self._overflows).tolist()
            self._overflows.clear()
            self._skipped, self._was_skipped = self._skipped + sum(map(bool, flags)), bool(flags[-1])
        return self._skipped

    @property
    def has_given_up(self) -> bool:
        """Whether the last step was skipped at the smallest scale: no smaller one will help."""
        return self.skipped > 0 and self._was_skipped and self.scaler.get_scale() < SMALLEST_SCALE

    def state(self) -> dict[str, Any]:
        return {"scaler": self.scaler.state_dict(), "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self._skipped, self._was_skipped = int(state["skipped"]), False
        self._overflows.clear()
