"""``millrace bench``: how fast a feed of a store is, against what the machine can do; ``--autotune`` finds its settings."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument, Option

from millrace.cli import options

EXAMPLE = "millrace bench corpus/ --length 1024 --batch 64 --autotune --write tuned.toml"


def run(
    path: Annotated[str, Argument(metavar="DIR", help="The store.")],
    batch: options.BatchSize = 256,
    split: options.Split = None,
    length: options.Length = None,
    lookback: options.Lookback = None,
    horizon: options.Horizon = None,
    stride: options.Stride = None,
    lead: options.Lead = 0,
    column: options.ColumnName = None,
    transform: Annotated[str | None, Option(metavar="MODULE:FUNCTION", help="Your transform(batch, rng).")] = None,
    decode: Annotated[str | None, Option(metavar="MODULE:FUNCTION", help="Your decode(record, rng).")] = None,
    processes: Annotated[bool, Option("--processes", help="Run them in worker processes.")] = False,
    autotune: Annotated[bool, Option("--autotune", help="Find the fastest threads, depth and processes.")] = False,
    write: Annotated[
        str | None, Option(metavar="FILE", help="Put them into this TOML file, for millrace train.")
    ] = None,
    seconds: Annotated[
        float | None, Option(min=0.01, help="How long to measure.", show_default="2, or 25 for --autotune")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure a feed by itself, and find its settings.

    It compares the feed with what one thread copies in memory, and with the disk where rows come from it.
    """
    import os

    from millrace.cli.printing import print_json, print_line, size
    from millrace.errors import ConfigError
    from millrace.feed import speed
    from millrace.meter.machine import memory_rate
    from millrace.prepare.functions import load_function

    if write is not None and not autotune:
        raise ConfigError(f"--write {write} keeps what --autotune finds; give both")
    if write is not None and os.path.lexists(write) and not os.path.isfile(write):  # said before minutes of measuring
        raise ConfigError(f"--write {write} is no file; give a TOML file, or a name that is free")
    view = options.build_view(path, split, length, lookback, horizon, stride, lead, column=column, guesses=True)
    functions: dict[str, Any] = {
        name: function
        for name, given in (("transform", transform), ("decode", decode))
        if (function := load_function(given, f"--{name}")) is not None
    }
    if processes:
        if not functions:
            raise ConfigError(
                "--processes runs functions in worker processes, and there are none; give --transform or --decode"
            )
        functions["processes"] = True
    facts = measure(view, batch, functions, min(2.0, seconds or 2.0))
    facts["memory_bytes_per_s"] = memory_rate()
    facts["share_of_memory"] = facts["bytes_per_s"] / facts["memory_bytes_per_s"]
    if autotune:
        setting, rate = speed.autotune(view, batch=batch, within_s=seconds or 25.0, **functions)
        facts |= {"best": setting, "best_samples_per_s": rate}
        if write is not None:
            tuned = {name: setting[name] for name in ("workers", "depth")}
            if transform is not None:  # the trainer has no decode
                tuned |= {"transform": transform, "processes": setting["processes"]}
            write_settings(write, tuned)
    if as_json:
        print_json(facts)
        return
    print_line(
        f"{facts['samples_per_s']:,.0f} samples/s, {facts['batches_per_s']:,.0f} batches/s, {size(facts['bytes_per_s'])}/s: "
        f"{facts['share_of_memory']:.0%} of what one thread copies in memory ({size(facts['memory_bytes_per_s'])}/s)"
    )
    if facts.get("share_of_disk", 0) > facts["share_of_memory"]:  # it is the nearer limit
        print_line(
            f"{facts['share_of_disk']:.0%} of what the disk gives, {facts['disk_samples_per_s']:,.0f} samples/s, while "
            f"{facts['resident']:.0%} of the store lies in memory"
        )
    print_line(f"a training step of more than {1000 / facts['batches_per_s']:.3g} ms does not wait for it")
    print_line(f"CPU: {facts['cpu_cores']:.2g} cores; disk: {size(facts.get('disk_read_per_s', 0))}/s")
    if autotune:
        keys = ", ".join(f"{name}={value}" for name, value in facts["best"].items())
        print_line(f"fastest: {keys}: {facts['best_samples_per_s']:,.0f} samples/s")
        if write is not None:
            print_line(f"wrote {', '.join(f'data.{name}' for name in tuned)} to {write}")


def measure(view: Any, batch: int, functions: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Rates of a feed with its usual settings, and what it used meanwhile."""
    from millrace.feed import speed
    from millrace.feed.feed import Feed
    from millrace.meter.machine import disk_rates, resident_share
    from millrace.meter.usage import Usage

    sample, files = speed.SampleBytes.of(view), speed.files_of(view)
    sample.check(batch)
    before_share = resident_share(files) if files else None
    with Feed(view, batch=batch, **speed.ALONE, **functions) as feed:
        before = Usage.read()
        found = speed.rate(iter(feed), seconds)
        used = Usage.read().rates(before)
        report = feed.report()
    assert report is not None
    limit: dict[str, float] = {}
    if before_share is not None and before_share < speed.RESIDENT:
        share = (before_share + (resident_share(files) or 0.0)) / 2  # the feed itself brought rows to memory
        if (disk := disk_rates(files, min(int(sample.read) or 1, speed.ASK_BYTES))) is not None:
            most = speed.disk_rate(sample, disk, share)
            limit = {"disk_samples_per_s": most, "share_of_disk": found / most, "resident": share}
    return {
        "samples_per_s": found, "batches_per_s": found / batch, "bytes_per_s": found * sample.made, "batch": batch,
        "way": report.way, "workers": report.workers, "is_cold": bool(report.is_cold), **limit, **used,
    }  # fmt: skip


def write_settings(path: str, keys: dict[str, Any]) -> None:
    """Sets keys of [data] in a TOML file; all else in it stays as it is."""
    import json
    import re
    import tomllib
    from pathlib import Path

    from millrace.errors import ConfigError, StoreCorrupt
    from millrace.store import platform
    from millrace.store.plain_file import read_plain

    file = Path(path)
    try:
        text = read_plain(path, 1 << 20, follow=True).decode() if file.exists() else ""
        wanted = tomllib.loads(text)
        head, mark, rest = re.match(r"(?s)(.*?)((?:^|(?<=\n))\[data\][^\n]*\n|$)(.*)", text).groups()  # type: ignore[union-attr]
        own, after = re.match(r"(?s)(.*?)((?:^|(?<=\n))\[.*|$)$", rest).groups()  # type: ignore[union-attr]
        for name in keys:
            own = re.sub(rf"(?m)^[ \t]*{name}[ \t]*=.*\n?", "", own)
        lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in keys.items())
        if head and not head.endswith("\n"):
            head += "\n"
        changed = f"{head}{mark or '[data]' + chr(10)}{lines}{own}{after}"
        if tomllib.loads(changed) != {**wanted, "data": {**wanted.get("data", {}), **keys}}:
            raise ConfigError(
                f"{path}: its [data] cannot be changed line by line; set these keys of it yourself: {keys}"
            )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}; give another file to --write") from error
    except StoreCorrupt as error:
        raise ConfigError(f"{path} {error.problem}; give another file to --write") from error
    with platform.writing(path):
        platform.write_file(file, changed.encode(), mode=0o644)
