"""``millrace worker``: makes batches for a trainer on another machine, through a queue."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Argument, Option

Trust = Literal["noted", "nothing", "copy"]
EXAMPLE = "millrace worker redis://trainer:6379/0 --run exp1 --threads 4"


def run(
    url: Annotated[str, Argument(metavar="URL", help="The queue, as the trainer names it.")],
    name: Annotated[str, Option("--run", help="The run to work for: the name of its run folder.")],
    threads: Annotated[int, Option(min=1, max=256, help="Batches that are made at a time.")] = 1,
    store: Annotated[
        list[str] | None,
        Option(help="A copy of the run's store on this machine.", show_default="as the trainer opened it"),
    ] = None,
    trust: Annotated[
        Trust, Option(help="Files of that store that need no check: noted as right here before, nothing, or the copy.")
    ] = "noted",
    transform: Annotated[str | None, Option(metavar="MODULE:FUNCTION", help="The transform of the trainer.")] = None,
    decode: Annotated[str | None, Option(metavar="MODULE:FUNCTION", help="The decode of the trainer.")] = None,
) -> None:
    """Make batches for a training run on another machine.

    Waits for the run, works until it ends, and may be killed at any time. The password of the queue comes from
    MILLRACE_REDIS_PASSWORD_FILE or MILLRACE_REDIS_PASSWORD.
    """
    import sys

    from millrace.cli.printing import print_line, size
    from millrace.feed.remote.record import run_name
    from millrace.feed.remote.worker import Functions, Lines, Worker
    from millrace.prepare.functions import load_function
    from millrace.queues.open import open_queue

    def say(text: str) -> None:
        print_line(text)
        sys.stdout.flush()

    name = run_name(name)
    functions = Functions(load_function(decode, "--decode"), load_function(transform, "--transform"))
    queue = open_queue(url)
    try:
        lines = Lines(queue, name, functions, store or [], threads=threads, trust=trust)
        worker = Worker(queue, name, lines.maker, threads=threads, say=say)
        worker.serve()
    finally:
        queue.close()
    say(f"run {name} has ended; made {worker.num_made:,} batches ({size(worker.num_bytes)})")
