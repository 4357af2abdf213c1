"""What every benchmark shares: the machine, interleaved rounds, ratios of medians, and where results go."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    with open("/proc/cpuinfo") as file:
        cpu = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "cores_of_others": round(cores_of_others(), 2),
    }


def cpu_seconds() -> tuple[float, float]:
    """Of the whole machine, and of this process and its children, those that ended included."""
    whole, ended = psutil.cpu_times(), os.times()
    own = ended.user + ended.system + ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            own += sum(child.cpu_times()[:4])
    return whole.user + whole.nice + whole.system, own


STARTED = (time.perf_counter(), *cpu_seconds())


def cores_of_others() -> float:
    """How many cores other processes kept busy since this one started: figures beside 0.2 or more are not to be kept."""
    whole, own = cpu_seconds()
    return max(0.0, whole - STARTED[1] - (own - STARTED[2])) / (time.perf_counter() - STARTED[0])


def interleave(contestants: dict[str, Callable[[], float]], rounds: int = 5) -> dict[str, list[float]]:
    """Each contestant once per round, in turn: drift of the machine then hits all alike."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, measure in contestants.items():
            found[name].append(measure())
    return found


def medians(rounds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in rounds.items()}


def save(name: str, figures: dict[str, Any], *, kept: bool = False) -> None:
    """One file of results; ``kept``: what the file holds under other keys stays, with its own machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text()) if kept and path.exists() else {}
    path.write_text(json.dumps(before | {"machine": machine(), **figures}, indent=1) + "\n")
    print(f"saved {path}")


def share(ratios: list[float]) -> dict[str, Any]:
    """Of ratios of neighbouring measurements: their median, and between which it lies at 95 %."""
    ordered = sorted(ratios)
    outside = max(0, int(len(ordered) / 2 - 0.98 * len(ordered) ** 0.5))
    return {
        "median": statistics.median(ordered), "between": [ordered[outside], ordered[-1 - outside]],
        "all": [round(ratio, 4) for ratio in ratios],
    }  # fmt: skip


def verdict(what: str, value: float, limit: float, *, at_least: bool = True) -> dict[str, Any]:
    """One line of the table: a figure against what was promised."""
    held = value >= limit if at_least else value <= limit
    sign = ">=" if at_least else "<="
    print(f"{'ok  ' if held else 'MISS'} {what}: {value:.3g} ({sign} {limit:g})")
    return {"what": what, "value": value, "limit": f"{sign} {limit:g}", "held": held}


def anonymous_bytes(pid: int | str = "self") -> int:
    """Anonymous and shared memory of a process, file pages apart."""
    total = 0
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith(("Anonymous:", "Pss_Shmem:")):
                total += int(line.split()[1]) * 1024
    return total
