"""``millrace doctor``: what this installation has, what this machine can do, and what limits a store on it."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument, Option

from millrace.cli import options

EXAMPLE = "millrace doctor corpus/ --batch 64 --length 1024"
NO_CORE = "not built, so numpy is used, which is slower; install a C compiler, then reinstall millrace"


def run(
    path: Annotated[str | None, Argument(metavar="[DIR]", help="A store, to say what limits feeds of it.")] = None,
    batch: options.BatchSize = 256,
    split: options.Split = None,
    length: options.Length = None,
    lookback: options.Lookback = None,
    horizon: options.Horizon = None,
    stride: options.Stride = None,
    lead: options.Lead = 0,
    column: options.ColumnName = None,
    seconds: Annotated[float, Option(min=0.01, help="How long gather is measured.")] = 1.0,
    as_json: options.Json = False,
) -> None:
    """Show what is installed and what this machine can do. With a store: what limits feeds of it, in some seconds."""
    from millrace.cli.printing import print_json, print_line

    facts = examine() | capabilities()
    found = None
    if path is not None:
        from millrace.feed.speed import Stages

        view = options.build_view(path, split, length, lookback, horizon, stride, lead, column=column, guesses=True)
        found = Stages.measure(view, batch, seconds=seconds)
    if as_json:
        print_json(facts | ({} if found is None else {"store": as_facts(found)}))
        return
    for name, value in facts.items():
        print_line(f"{name.ljust(max(map(len, facts)))}  {shown(name, value)}")
    if found is not None:
        print_line()
        show_store(found)
        if path is not None and "://" in path:
            print_line("The first pass also downloads the store, which is not measured here.")


def examine() -> dict[str, Any]:
    """Facts that take no measuring."""
    import platform as python_platform

    from millrace import __version__
    from millrace.distribution import old_distribution_advice
    from millrace.meter.machine import shared_memory_bytes
    from millrace.native import memory_bytes, num_cores
    from millrace.store import lock, platform
    from millrace.store.publish import installed

    old = old_distribution_advice()
    optional = ("numpy", "torch", "pyarrow", "tokenizers", "redis", "matplotlib")
    return {
        "millrace": __version__,
        **({} if old is None else {"old distribution": old}),
        "python": python_platform.python_version(),
        "C core": "in use" if platform.HAS_CORE else NO_CORE,
        "file lock": "flock" if lock.HAS_FLOCK else "lease file with heartbeat (no flock on this platform)",
        "cores": num_cores(),
        "memory": memory_bytes(),
        "open files": platform.descriptor_limit(),
        "/dev/shm": shared_memory_bytes(),
        **{name: installed(name) for name in optional},
    }


def capabilities() -> dict[str, Any]:
    """What is measured without a store."""
    import os
    from dataclasses import asdict

    from millrace.meter import machine
    from millrace.meter.usage import GpuUsage

    has_driver = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))  # else torch is not imported to ask
    usage = GpuUsage.read() if has_driver else None
    return {
        "copies": machine.memory_rate(), "GPU": machine.gpu_names() if has_driver else [],
        "to the GPU": machine.device_rate() if has_driver else None, "NVML": None if usage is None else asdict(usage),
    }  # fmt: skip


def as_facts(found: Any) -> dict[str, Any]:
    """A measured store for programs."""
    from dataclasses import asdict

    return {**asdict(found), "limit": found.limit, "verdict": found.verdict}


def shown(name: str, value: Any) -> str:
    """A fact for a person."""
    from millrace.cli.printing import size

    if name in ("copies", "to the GPU") and value is not None:
        return f"{size(value)}/s"
    if name in ("memory", "/dev/shm") and value is not None:
        return size(value) + (" free" if name == "/dev/shm" else "")
    if name == "NVML" and value is not None:
        watts = "" if value["gpu_power_w"] is None else f", {value['gpu_power_w']:.0f} W"
        return f"{value['gpu_utilization']:.0%} busy, {size(value['gpu_memory_used'])} used{watts}"
    if name in ("GPU", "to the GPU", "NVML", "/dev/shm") and not value:
        return "none that torch can see" if name == "GPU" else "not known"
    if isinstance(value, list):
        return ", ".join(value)
    return "not installed" if value is None else str(value)


def show_store(found: Any) -> None:
    from millrace.cli.printing import print_line, print_table, size

    per_s = {name: f"{rate:,.0f}" for name, rate in found.rates.items()}
    what = {
        "gather": "copying rows that lie in memory, with all threads",
        "memory": f"one thread copying {size(found.memory_bytes_per_s)}/s: no feed is faster on one",
        "disk": "rows that are not in memory, from anywhere in the store",
        "transfer": "copies to the GPU" if found.device_bytes_per_s is None else f"{size(found.device_bytes_per_s)}/s to the GPU",
    }  # fmt: skip
    print_line(f"a sample: {size(found.sample.read)} of the store, {size(found.sample.made)} as delivered")
    if found.resident is not None:
        print_line(f"in memory now: {found.resident:.0%} of the store")
    if found.disk is not None:
        disk = found.disk
        print_line(
            f"its disk: {size(disk['sequential_bytes_per_s'])}/s in a row, {disk['random_reads_per_s']:,.0f} reads/s of "
            f"{size(disk['read_bytes'])} from anywhere"
        )
    print_line()
    print_table([("stage", "samples/s", "what"), *((n, r, what[n]) for n, r in per_s.items())], right=("samples/s",))
    print_line()
    print_line(found.verdict)
