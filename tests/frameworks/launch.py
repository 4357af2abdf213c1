"""Runs an example life after life, on some ranks and killed at some batch: ``launch.py EXAMPLE STORE FOLDER RUN:WORLD:KILL ...``.

The libraries are imported once; ranks are forked from here with the environment that torchrun gives. A rank is killed by SIGKILL
when it asks its feed for batch number KILL (0: never), and the others with it, as torchrun does.
"""

import os
import signal
import sys
from pathlib import Path

from millrace.testing.servers import free_port

BEFORE = {
    "plain_ddp": "torch.nn.parallel",
    "lightning_trainer": "lightning",
    "fabric_loop": "lightning",
    "accelerate_loop": "millrace.accelerate",
    "hf_trainer": "millrace.transformers",
    "stateful_dataloader": "torchdata.stateful_dataloader",
    "jax_loop": "jax",
    "images": "millrace.images",
    "events": "torch",
}
NAMES = {"__name__": "__main__"}


def kill_at(count: int) -> None:
    from millrace.feed.iteration import Iteration

    plain, seen = Iteration.__next__, [0]

    def counted(self):
        if self._feed.last != "pad" or self._feed.seed == 1:  # the feed of the training, not of a validation
            seen[0] += 1
            if seen[0] == count:
                os.kill(os.getpid(), signal.SIGKILL)
        return plain(self)

    Iteration.__next__ = counted


def rank_of(example: str, store: str, run: str, rank: int, world: int, port: int, count: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test", OMP_NUM_THREADS="1",
    )  # fmt: skip
    sys.argv = [example, store, run, str(world)]
    if count and rank == 0:
        kill_at(count)
    # Its names stay until the process has ended: what frameworks do when theirs go is not what is tried here.
    exec(compile(Path(example).read_text(), example, "exec"), NAMES)


def live(example: str, store: str, run: str, world: int, count: int) -> int:
    """One life of the ranks; returns how it ended: the exit code, or minus the signal."""
    port, ranks = free_port(), []
    for rank in range(world):
        process = os.fork()
        if not process:
            try:
                rank_of(example, store, run, rank, world, port, count)
                sys.stdout.flush()
                os._exit(0)
            except BaseException:  # noqa: BLE001 - a child of a fork never returns
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        ranks.append(process)
    if count:  # the first is killed, whatever the others make of it
        first = os.waitstatus_to_exitcode(os.waitpid(ranks.pop(0), 0)[1])
        end(ranks)
        return first
    while ranks:
        process, status = os.wait()
        ranks.remove(process)
        if status:
            end(ranks)
            return os.waitstatus_to_exitcode(status)
    return 0


def end(ranks: list[int]) -> None:
    for process in ranks:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


if __name__ == "__main__":
    import torch
    import torch._dynamo  # which the first optimiser would import in every rank

    torch.set_num_threads(1)
    example, store, folder, *lives = sys.argv[1:]
    __import__(BEFORE[os.path.basename(example).removesuffix(".py")])
    for number, one in enumerate(lives):
        run, world, count = os.path.join(folder, one.split(":")[0]), *map(int, one.split(":")[1:])
        ended = live(example, store, run, world, count)
        expected = -signal.SIGKILL if count else 0
        assert ended == expected, f"a life of {one} ended with {ended}"
        for path in Path(run).glob("steps-*.jsonl"):
            path.rename(path.with_name(f"life-{number}-{path.name}"))
