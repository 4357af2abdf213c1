"""Watch: what the system says of a worker process or thread that has been silent for a while."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

HANG_S = 300.0  # without an answer and without using a core: it hangs


class Finding(NamedTuple):
    """Why a worker gives no answer. ``is_final``: to make its batch again would only take as long again."""

    text: str | None  # None: it has ended, and how is known elsewhere
    is_final: bool = False


class Watch:
    """Looks at one process (or "self/task/" and a thread) again and again, as long as nothing comes from it."""

    def __init__(self) -> None:
        self._state, self._ticks, self.quiet_s = "", -1, 0.0

    def look(self, pid: int | str, seconds: float) -> Finding | None:
        """``seconds`` have passed since the last look. None: it works, or may still do so."""
        before, ticks = self._state, self._ticks
        self._state, self._ticks = _state_and_ticks(pid)
        # "R" without a tick: it would run, but others have the cores.
        self.quiet_s = self.quiet_s + seconds if self._ticks == ticks and self._state != "R" else 0.0
        if self._state in "ZX":  # or gone: "" is in every string
            return Finding(None)
        if self._state == before == "T":
            return Finding("was stopped by a signal")
        if self.quiet_s >= HANG_S:
            return Finding(f"neither answered nor used a core for {HANG_S:.0f} s", is_final=True)
        return None


def _state_and_ticks(pid: int | str) -> tuple[str, int]:
    """The letter of /proc for what a process does, "" if it is gone, and the time that it has used."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rsplit(b")", 1)[-1].split()
        return fields[0].decode(), int(fields[11]) + int(fields[12])
    return "", -1
