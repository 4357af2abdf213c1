"""``millrace train``: trains a model on a store, or continues a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from millrace.cli import options
from millrace.cli.printing import print_json, print_line, print_note, same_command

EXAMPLE = "millrace train nano --store corpus/ --run runs/nano --set train.max_steps=200"


def run(
    config: Annotated[
        str | None,
        Argument(
            metavar="CONFIG",
            help="A TOML file, or a preset: nano, gpt-124m, gpt-150m, gpt-250m, lstm, transformer.",
            show_default=False,
        ),
    ] = None,
    store: Annotated[str | None, Option(help="The store to train on.")] = None,
    input_: Annotated[str | None, Option("--input", help="Instead of a store: a small file to prepare.")] = None,
    run_: Annotated[str | None, Option("--run", help="The run folder.", show_default="runs/CONFIG")] = None,
    changes: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Change a key of CONFIG, e.g. train.batch=64; repeatable."),
    ] = None,
    ranks: Annotated[int | None, Option(min=1, help="Number of processes on this machine.", show_default="1")] = None,
    resume: Annotated[str, Option(help="auto: continue a run that was saved here; never: refuse to.")] = "auto",
    metrics_port: Annotated[
        str | None,
        Option(
            metavar="PORT", help="Serve the numbers to Prometheus, on this machine alone; HOST:PORT for others too."
        ),
    ] = None,
    profile: Annotated[
        int, Option(min=0, metavar="STEPS", help="Record so many steps: a trace and a page in RUN/profile.")
    ] = 0,
    keys: Annotated[bool, Option("--keys", help="Print every key of a configuration, then stop.")] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print a JSON summary at the end; progress goes to stderr.")
    ] = False,
) -> None:
    """Train a model, or continue a run that was killed.

    Run the same command again to continue from the last checkpoint. On several machines use torchrun: torchrun --nnodes 2
    --nproc-per-node 8 ... -m -- millrace train CONFIG ...
    """
    import os
    import signal
    import sys
    import time

    from millrace.cli.streams import send_errors_to
    from millrace.errors import ConfigError, MillraceError
    from millrace.store.ownership import check_local
    from millrace.train import launch
    from millrace.train.threads import wait_asleep

    if keys:
        show_keys(as_json)
        return
    wait_asleep()
    if config is None:
        raise typer.BadParameter("missing; give a TOML file or a preset, e.g. nano", param_hint="CONFIG")
    if resume not in ("auto", "never"):
        raise typer.BadParameter(f"{resume!r}; expected auto or never", param_hint="--resume")
    given = {key: value for key, value in (("store", store), ("input", input_)) if value is not None}
    if len(given) == 2:
        raise ConfigError(
            f"--store {store} and --input {input_}: give one; --store for prepared data, --input for a small file to be "
            "prepared within the run"
        )
    from millrace.train.config import load_config
    from millrace.train.console import StreamConsole

    if launch.is_rank():
        send_errors_to(launch.follow_launcher())
    elif ranks is not None:
        launch.check_not_launched(ranks)

    folder = Path(run_) if run_ is not None else Path("runs") / Path(config).stem
    check_local(folder)
    has_started = False
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        settings = load_config(config, changes or [], given)
        if profile:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch loads: its profiler writes lines of its own
        with options.training_extras():
            from millrace.train import dist
            from millrace.train.trainer import train
        if ranks is not None and ranks > 1 and not launch.is_rank():
            flags: list[tuple[str, Any]] = [
                ("--store", store),
                ("--input", input_),
                ("--run", run_),
                ("--ranks", ranks),
            ]
            flags += [("--resume", resume), ("--profile", profile or None)]
            again = ["train", config, *(str(part) for flag in flags if flag[1] is not None for part in flag)]
            again += [] if metrics_port is None else ["--metrics-port", metrics_port]
            again += [part for change in changes or [] for part in ("--set", change)]
            sys.exit(launch.launch([*again, *(["--json"] if as_json else [])], ranks, folder))
        has_started, dist.held = True, []
        console = StreamConsole(sys.stderr if as_json else sys.stdout)
        stopped_by = train(settings, folder, resume=resume, console=console, metrics_port=metrics_port, profile=profile)
    except MillraceError as error:
        if getattr(error, "is_about_ranks", False) and launch.is_rank() and not error.is_reported:
            raise typer.Exit(launch.LOST) from error  # the launcher says which rank is gone
        # A mistake found before the ranks have met is found by all of them.
        if error.is_reported or (not has_started and os.environ.get("LOCAL_RANK", "0") != "0"):
            time.sleep(1)  # torchrun ends all ranks when one has ended: the one with the message must be first
            raise typer.Exit(1) from error
        raise
    if as_json and is_first:
        print_json(summary(folder, stopped_by))
    if stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    if stopped_by:
        if is_first:
            print_note(f"stopped by signal {stopped_by}; continue with: {same_command(sys.argv[1:])}")
        raise typer.Exit(128 + stopped_by)


def show_keys(as_json: bool) -> None:
    from millrace.train import keys

    if as_json:
        print_json(keys.as_json())
        return
    for line in keys.lines():
        print_line(line)


def summary(run: Path, stopped_by: int) -> dict[str, Any]:
    """The JSON at the end of a run."""
    from millrace.train.checkpoint import Checkpoints
    from millrace.train.metrics import read_metrics

    lines, checkpoints = read_metrics(run), Checkpoints(run / "checkpoints")
    latest, best = checkpoints.resolve("latest"), checkpoints.resolve("best")
    last = {key: next((line[key] for line in reversed(lines) if key in line), None) for key in ("loss", "val_loss")}
    step = 0 if latest is None else checkpoints.read(latest).step
    return {"run": str(run), "step": step, **last, "latest": latest, "best": best, "stopped_by": stopped_by}
