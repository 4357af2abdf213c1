"""How fast a run goes, what it waits for, and how much memory it takes: the numbers beside the loss."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from millrace.feed.batch import Batch
from millrace.meter.usage import GpuUsage, Usage
from millrace.train.dist import World

# Dense bf16 products per second by the vendors' data sheets, for MFU.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "V100": 125e12}


class Pace:
    """Clocks around the steps of this rank. ``facts`` covers the steps since its last call; ``batch`` is global."""

    def __init__(self, model: nn.Module, world: World, last: int, batch: int) -> None:
        self._model, self._device, self._last, self._batch = model, world.device, last, batch
        name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
        self._peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
        self.restart()

    def restart(self) -> None:
        self._start = self._last_call = time.perf_counter()
        self._wait_s = self._flops = self.data_s = 0.0
        self._steps = self._tokens = self._all_steps = 0
        self._usage = Usage.read()

    @property
    def is_first_step(self) -> bool:
        return self._all_steps == 1

    def wait_begins(self, behind_s: float) -> None:
        self._wait_start = time.perf_counter() - behind_s

    def wait_ends(self, batch: Batch, behind_s: float) -> None:
        """Counts the time since ``wait_begins`` as waiting for data; growth of ``behind_s`` was the GPU's."""
        waited_s = time.perf_counter() - behind_s - self._wait_start
        self._wait_s, self.data_s = self._wait_s + waited_s, self.data_s + waited_s
        self._steps += 1
        self._all_steps += 1
        x: Any = batch.get("x")
        self._tokens += x.shape[1:].numel() * self._batch if x is not None and not x.is_floating_point() else 0
        self._flops += self._model.flops(batch) if hasattr(self._model, "flops") else 0.0  # type: ignore[operator]

    @property
    def seconds(self) -> float:
        """Since ``restart``, without pauses."""
        return time.perf_counter() - self._start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clocks within the block: evaluations and saves are no steps."""
        self._sync()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._sync()
            pause_s = time.perf_counter() - start
            self._start, self._last_call = self._start + pause_s, self._last_call + pause_s

    def _sync(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def facts(self, step: int, skipped: int | None) -> dict[str, Any]:
        """The numbers for metrics.jsonl about the steps since the last call; rates are over all ranks."""
        self._sync()
        now = time.perf_counter()
        seconds = max(now - self._last_call, 1e-9)
        facts: dict[str, Any] = {
            "step_s": seconds / max(self._steps, 1),
            "samples_per_s": self._steps * self._batch / seconds,
            "wait": min(1.0, self._wait_s / seconds),
        }
        if self._tokens:
            facts["tokens_per_s"] = self._tokens / seconds
        if self._peak is not None and self._flops:
            facts["mfu"] = self._flops / seconds / self._peak
        if skipped is not None:
            facts["skipped"] = skipped
        usage = Usage.read()
        facts |= usage.rates(self._usage) | _gpu_facts(self._device)
        self._usage = usage
        facts["eta_s"] = (now - self._start) / max(self._all_steps, 1) * (self._last - step)
        self._last_call, self._wait_s, self._flops = now, 0.0, 0.0
        self._steps = self._tokens = 0
        return facts

    def line(self, step: int, loss: float, facts: Mapping[str, Any]) -> str:
        """The progress line."""
        unit = "tokens" if "tokens_per_s" in facts else "samples"
        parts = [f"step {step:,}/{self._last:,}", f"loss {loss:.4f}", f"{facts[f'{unit}_per_s']:,.0f} {unit}/s"]
        verdict = f" ({facts['verdict']})" if "verdict" in facts else ""
        parts.append(f"data wait {facts['wait']:.1%}{verdict}")
        if "mfu" in facts:
            parts.append(f"MFU {facts['mfu']:.1%}")
        if "gpu_utilization" in facts:
            parts.append(f"GPU {facts['gpu_utilization']:.0%}")
        if "gpu_memory" in facts:
            parts.append(f"{facts['gpu_memory'] / 2**30:.1f} GiB")
        if facts.get("skipped"):
            parts.append(f"{facts['skipped']:.0f} steps skipped")
        return ", ".join([*parts, f"{duration(facts['eta_s'])} left"])


def duration(seconds: float) -> str:
    """A duration in the unit that a person would use.

    >>> [duration(seconds) for seconds in (0.2, 90, 1579, 36_000, 400_000)]
    ['0 s', '90 s', '26 min', '10.0 h', '4.6 days']
    """
    for limit, unit, length, digits in ((120, "s", 1, 0), (7200, "min", 60, 0), (172_800, "h", 3600, 1)):
        if seconds < limit:
            return f"{seconds / length:.{digits}f} {unit}"
    return f"{seconds / 86_400:.1f} days"


def memory_by_part(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Bytes of this rank: parameters, gradients, optimiser state."""
    parameters = list(model.parameters())
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
    gradients = [p.grad for p in parameters if p.grad is not None]
    parts: dict[str, list[Any]] = {"parameters": parameters, "gradients": gradients, "optimizer": state}
    local = {name: [t.to_local() if isinstance(t, DTensor) else t for t in tensors] for name, tensors in parts.items()}
    return {name: sum(t.numel() * t.element_size() for t in tensors) for name, tensors in local.items()}


def _gpu_facts(device: torch.device) -> dict[str, float]:
    """The highest memory use, and what NVML says where it is installed."""
    if device.type != "cuda":
        return {}
    facts = {"gpu_memory": float(torch.cuda.max_memory_allocated(device))}
    usage = GpuUsage.read(device.index or 0)
    return facts if usage is None else facts | {k: v for k, v in asdict(usage).items() if v is not None}
