"""Several ranks on this machine by one command: ``millrace train ... --ranks 2``.

Each rank is the same command in its own process, with the environment that torchrun gives. Unlike torchrun, the launcher
waits as long as a checkpoint takes, and ends with the exit code of the ranks. The ranks meet at a store in this process,
so no other program can take their port first.

A rank's Python messages go to the terminal. What its libraries write to standard error goes to ``RUN/rank-N.log``.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from millrace.errors import ConfigError
from millrace.terminal import printable, quoted
from millrace.train.signals import catch

MARK = "MILLRACE_LAUNCHER"  # in the environment of a rank: the launcher's process id
ERRORS = "MILLRACE_ERRORS"  # likewise: the descriptor of the launcher's standard error
LOST = 75  # exit code of a rank that ended because another one is gone, and nobody has said why
POLL_S, GRACE_S = 0.05, 10.0  # how long the other ranks may take to end by themselves when one has failed
END_S = 60.0  # likewise when one has ended as it should: then all of them have done their work
Ranks = list[subprocess.Popen[bytes]]


def is_rank() -> bool:
    """Whether ``launch`` started this process."""
    return MARK in os.environ


def check_not_launched(ranks: int) -> None:
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"--ranks {ranks}, but WORLD_SIZE = {os.environ['WORLD_SIZE']} is set, as torchrun does; leave --ranks out under "
            "torchrun, or start millrace without it"
        )


def follow_launcher() -> int:
    """Makes this rank save and end when its launcher is gone; returns the descriptor for its messages."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ[MARK]):
        raise ConfigError("the process that started the ranks has ended")
    return int(os.environ[ERRORS])


def launch(arguments: Sequence[str], ranks: int, run: Path) -> int:
    """Runs ``millrace`` with these arguments once per rank; returns their exit code."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    errors = os.dup(2)
    shared = {
        **os.environ, MARK: str(os.getpid()), ERRORS: str(errors), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(meeting.port), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    processes: Ranks = []
    received: list[int] = []

    def forward(number: int) -> None:
        received.append(number)
        for process in processes:
            process.send_signal(number)

    with contextlib.ExitStack() as stack:
        # Files without a name: a killed launcher leaves none behind.
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(ranks)]
        stack.enter_context(catch(forward))
        for rank, log in enumerate(logs):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "millrace", *arguments]
            # A session of its own: the launcher alone gets Ctrl-C from the terminal, and passes it on.
            processes.append(subprocess.Popen(command, env=own, start_new_session=True, stderr=log, pass_fds=(errors,)))
        try:
            codes = _wait(processes, received)
        finally:
            for process in processes:
                process.kill()  # does nothing to those that have ended
                process.wait()
            os.close(errors)
        _keep_logs(logs, run)
    _report(codes, arguments, run)
    return next((1 if code == LOST else code for code in codes if code > 0), 1 if any(codes) else 0)


def _wait(processes: Ranks, received: list[int]) -> list[int]:
    """Waits for all ranks. When one has ended the others end by themselves, or are ended.

    Returns their exit codes, and 0 for those that had to be ended here.
    """
    ended_at = failed_at = math.inf
    own_codes: list[int] | None = None
    while None in (codes := [process.poll() for process in processes]):
        time.sleep(POLL_S)
        now = time.monotonic()
        if any(code is not None for code in codes):
            ended_at = min(ended_at, now)
        if any(codes) and not received:
            failed_at = min(failed_at, now)
        late_s = now - min(failed_at + GRACE_S, ended_at + END_S)
        if late_s <= 0:
            continue
        if own_codes is None:
            own_codes = [code or 0 for code in codes]
            if failed_at == math.inf:
                _note_late(codes)
        for process in processes:
            process.send_signal(signal.SIGTERM if late_s < GRACE_S else signal.SIGKILL)
    return own_codes or [process.returncode for process in processes]


def _note_late(codes: list[int | None]) -> None:
    late = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
    sys.stderr.write(
        f"note: rank {late} did not end within {END_S:.0f} s of the others, so it is ended now; the run itself is complete\n"
    )


def _keep_logs(logs: Sequence[IO[bytes]], run: Path) -> None:
    """Writes ``RUN/rank-N.log`` for each rank whose libraries wrote something; removes that of an earlier start."""
    for rank, log in enumerate(logs):
        path = run / f"rank-{rank}.log"
        with contextlib.suppress(OSError):  # a log is not worth an error
            path.unlink(missing_ok=True)
            if log.seek(0, os.SEEK_END) and run.is_dir():
                log.seek(0)
                with open(path, "wb") as file:
                    shutil.copyfileobj(log, file)


def _report(codes: list[int], arguments: Sequence[str], run: Path) -> None:
    """Names a rank that ended without an error message, and says how to continue."""
    if min(codes) >= 0 and LOST not in codes:
        return
    suspects = [rank for rank, code in enumerate(codes) if code not in (0, LOST)] or [codes.index(LOST)]
    rank = min(suspects, key=lambda rank: (codes[rank] > 0, codes[rank] == 1))
    how = (
        f"was ended by {signal.Signals(-codes[rank]).name}"
        if codes[rank] < 0
        else f"ended with exit code {codes[rank]}"
    )
    hint = "; if memory ran out, lower train.batch or train.micro_batch" if codes[rank] == -signal.SIGKILL else ""
    log = run / f"rank-{rank}.log"
    more = f" (more in {printable(str(log))})" if log.exists() else ""
    again = " ".join(map(quoted, arguments))
    sys.stderr.write(
        f"error: rank {rank} {how}{more}{hint}; continue from the last checkpoint with: millrace {again}\n"
    )
