"""kill -9 at random moments, again and again, until the work is done all the same."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence


def kill_loop(
    command: Sequence[str],
    rounds: int,
    seed: int | None = None,
    *,
    within_s: tuple[float, float] = (0.0, 1.0),
    done: Callable[[], bool] | None = None,
    between: Callable[[], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Starts the command, kills its whole process group after a random time, and so on; then lets it finish.

    After every kill ``between`` may look at what is left. The rounds end early when ``done`` says that nothing
    is left to do, or when the command ended by itself before it was killed. Returns the number of kills; raises
    ``AssertionError`` when an undisturbed run fails. The seed is printed: the same seed draws the same times.
    """
    if seed is None:
        seed = random.randrange(1 << 32)
    sys.stdout.write(f"kill_loop seed={seed} rounds={rounds}\n")
    moments = random.Random(seed)
    kills = 0
    for _ in range(rounds):
        if done is not None and done():
            break
        if not _killed(command, moments.uniform(*within_s), env):
            break
        kills += 1
        if between is not None:
            between()
    if done is None or not done():
        subprocess.run(command, check=True, env=env, stdin=subprocess.DEVNULL)
    if done is not None and not done():
        raise AssertionError(f"the command ended well but the work is not done (seed={seed}): {command}")
    return kills


def _killed(command: Sequence[str], after_s: float, env: Mapping[str, str] | None) -> bool:
    """True when the kill came first; a command that failed by itself is an ``AssertionError``."""
    process = subprocess.Popen(command, start_new_session=True, env=env, stdin=subprocess.DEVNULL)
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # Also when the command has ended: a worker it left behind dies with the group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode not in (0, -signal.SIGKILL):
        raise AssertionError(f"exit code {process.returncode} before any kill: {command}")
    return process.returncode != 0
