"""How fast a run goes and what it waits for: samples and tokens per second, share of time waiting for data, MFU, ETA."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from millrace.feed.batch import Batch
from millrace.train.dist import World
from millrace.train.memory import gpu_facts, peak_flops


class Pace:
    """Clocks around the steps of this rank; ``facts`` tells of those since it was last asked. ``batch`` is that of all ranks."""

    def __init__(self, model: nn.Module, world: World, last: int, batch: int) -> None:
        self._model, self._world, self._last, self._batch = model, world, last, batch
        self._peak = peak_flops(world.device)
        self._began = self._asked = time.perf_counter()
        self._waited = self._flops = 0.0
        self._steps = self._tokens = self._all_steps = 0
        self.has_memory = False

    def wait_begins(self, behind_s: float) -> None:
        self._wait_began = time.perf_counter() - behind_s

    def wait_ends(self, batch: Batch, behind_s: float) -> None:
        """The batch is there: what came before was waiting for data, but for what ``behind_s`` grew, waiting for the GPU."""
        self._waited += time.perf_counter() - behind_s - self._wait_began
        self._steps += 1
        self._all_steps += 1
        x: Any = batch.get("x")
        self._tokens += x.shape[1:].numel() * self._batch if x is not None and not x.is_floating_point() else 0
        self._flops += self._model.flops(batch) if hasattr(self._model, "flops") else 0.0  # type: ignore[operator]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block the clocks stand: evaluations and saves are no steps."""
        self._sync()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._sync()
            gone = time.perf_counter() - began
            self._began, self._asked = self._began + gone, self._asked + gone

    def _sync(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)

    def facts(self, step: int, skipped: int | None) -> dict[str, float]:
        """What metrics.jsonl says of the steps since the last call; rates are over all ranks."""
        self._sync()
        now = time.perf_counter()
        seconds = max(now - self._asked, 1e-9)
        facts: dict[str, float] = {
            "step_s": seconds / max(self._steps, 1),
            "samples_per_s": self._steps * self._batch / seconds,
            "wait": min(1.0, self._waited / seconds),
        }
        if self._tokens:
            facts["tokens_per_s"] = self._tokens / seconds
        if self._peak is not None and self._flops:
            facts["mfu"] = self._flops / seconds / self._peak
        if skipped is not None:
            facts["skipped"] = skipped
        facts |= gpu_facts(self._world.device)
        facts["eta_s"] = (now - self._began) / max(self._all_steps, 1) * (self._last - step)
        self._asked, self._waited, self._flops = now, 0.0, 0.0
        self._steps = self._tokens = 0
        return facts

    def line(self, step: int, loss: float, facts: dict[str, float]) -> str:
        """The progress line."""
        rate = (
            f"{facts['tokens_per_s']:,.0f} tokens/s"
            if "tokens_per_s" in facts
            else f"{facts['samples_per_s']:,.0f} samples/s"
        )
        parts = [f"step {step:,}/{self._last:,}", f"loss {loss:.4f}", rate, f"data wait {facts['wait']:.1%}"]
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
    """In the unit that a person would say.

    >>> [duration(seconds) for seconds in (0.2, 90, 1579, 36_000, 400_000)]
    ['0 s', '90 s', '26 min', '10.0 h', '4.6 days']
    """
    for limit, unit, length, digits in ((120, "s", 1, 0), (7200, "min", 60, 0), (172_800, "h", 3600, 1)):
        if seconds < limit:
            return f"{seconds / length:.{digits}f} {unit}"
    return f"{seconds / 86_400:.1f} days"
