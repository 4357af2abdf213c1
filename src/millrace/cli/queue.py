"""``millrace queue``: what lies in a queue, and how to empty it."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from millrace.cli import options

EXAMPLE = "millrace queue status redis://trainer:6379/0"
DRAIN_EXAMPLE = "millrace queue drain redis://trainer:6379/0 --run exp1"
Url = Annotated[str, Argument(metavar="URL", help="The queue, e.g. redis://host:6379/0.")]


def status(
    url: Url,
    name: Annotated[str | None, Option("--run", help="Only this run.", show_default="all")] = None,
    as_json: options.Json = False,
) -> None:
    """Show the runs of a queue: tickets, leases, payloads, workers and their rates."""
    from contextlib import closing

    from millrace.cli.printing import plural, print_json, print_line, print_table
    from millrace.queues.open import open_queue

    with closing(open_queue(url)) as queue:
        found = [queue.status(run) for run in ([name] if name else queue.runs())]
    if as_json:
        print_json([{**run._asdict(), "leases": [held._asdict() for held in run.leases]} for run in found])
        return
    if not found:
        print_line("no run is here")
    for run in found:
        oldest = "" if run.oldest_s is None else f", the oldest for {run.oldest_s:.1f} s"
        print_line(
            f"{run.run}: {'live' if run.is_live else 'no trainer'}, {plural(run.depth, 'ticket')} waiting{oldest}, "
            f"{plural(len(run.leases), 'lease')}, {plural(run.ready, 'payload')} ready"
        )
        if run.workers:
            rows = [("worker", "threads", "made", "batches/s", "leases", "seen")]
            for worker, info in run.workers.items():
                threads, made, seconds = (_number(info.get(name)) for name in ("threads", "made", "seconds"))
                held = sum(held.worker == worker for held in run.leases)
                rate = made / seconds if seconds else 0.0
                rows.append((worker, f"{threads:.0f}", f"{made:,.0f}", f"{rate:.1f}", str(held),
                             f"{info['seen_s']:.1f} s ago"))  # fmt: skip
            print_table(rows, right=("threads", "made", "batches/s", "leases"))


def _number(value: object) -> float:
    """What a worker says about itself may be anything."""
    return float(value) if isinstance(value, (int, float)) else 0.0


def drain(
    url: Url,
    name: Annotated[str, Option("--run", help="The run to forget.")],
    as_json: options.Json = False,
) -> None:
    """Delete all that a queue keeps for a run.

    A live trainer publishes its run again within a second and goes on.
    """
    from contextlib import closing

    from millrace.cli.printing import print_json, print_line
    from millrace.feed.remote.record import run_name
    from millrace.queues.open import open_queue

    with closing(open_queue(url)) as queue:
        deleted = queue.drain(run_name(name))
    if as_json:
        print_json({"run": name, "deleted": deleted})
    else:
        print_line(f"deleted {deleted:,} keys of {name}")
