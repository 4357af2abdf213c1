"""Several ranks on this machine by one command: ``millrace train ... --ranks 2``.

Each rank is the same command in a process of its own, with the environment that torchrun gives. Unlike torchrun this waits as
long as a checkpoint takes, and ends with the exit code of the ranks. They meet at a store that this process keeps: no port
is chosen that another program could take before.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from millrace.errors import ConfigError
from millrace.train.signals import CAUGHT

MARK = "MILLRACE_LAUNCHER"  # of a rank: the process that started it
POLL_S, GRACE_S = 0.05, 10.0  # how long ranks get to end by themselves when one has failed


def is_rank() -> bool:
    """Whether this process is one that ``launch`` started."""
    return MARK in os.environ


def check_not_launched(ranks: int) -> None:
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"--ranks {ranks}, but WORLD_SIZE = {os.environ['WORLD_SIZE']} is set, as torchrun does; leave --ranks out under "
            "torchrun, or start millrace without it"
        )


def follow_launcher() -> None:
    """A rank saves and ends when the process that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ[MARK]):
        raise ConfigError("the process that started the ranks has ended")


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Runs ``millrace`` with these arguments once per rank; returns their exit code."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ, MARK: str(os.getpid()), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.port),
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    processes: list[subprocess.Popen[bytes]] = []
    with _forwarded(processes) as received:
        for rank in range(ranks):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # In a session of its own: Ctrl-C on the terminal comes once, from here.
            command = [sys.executable, "-m", "millrace", *arguments]
            processes.append(subprocess.Popen(command, env=own, start_new_session=True))
        try:
            _wait(processes, received)
        finally:
            for process in processes:
                process.kill()  # those that have ended are not there to be killed
                process.wait()
    return _code(processes)


@contextlib.contextmanager
def _forwarded(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Within the block SIGINT and SIGTERM go to the ranks; the list holds those that came."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in CAUGHT}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: list[subprocess.Popen[bytes]], received: list[int]) -> None:
    """Until all have ended. When one fails the others end by themselves, or are ended."""
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        time.sleep(POLL_S)
        has_failed = any(process.returncode for process in processes) and not received
        failed_at = time.monotonic() if has_failed and failed_at is None else failed_at
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            for process in processes:
                process.send_signal(signal.SIGTERM if time.monotonic() - failed_at < 2 * GRACE_S else signal.SIGKILL)


def _code(processes: list[subprocess.Popen[bytes]]) -> int:
    """0, or that of a rank that failed; one that a signal ended is named, since it could not say anything."""
    codes = [process.returncode for process in processes]
    killed = [rank for rank, code in enumerate(codes) if code < 0]
    if killed:
        name = signal.Signals(-codes[killed[0]]).name
        sys.stderr.write(f"rank {killed[0]} was ended by {name}\n")
    return next((code for code in codes if code > 0), 1 if killed else 0)
