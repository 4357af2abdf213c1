"""SIGTERM and SIGINT while training: the first asks to save and stop, the second stops at once."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

# SIGTERM within this time of the first is no second one: when a launcher is killed, the system sends its ranks one for each
# of its threads (of 60 kills of a process with four threads 28 gave two or three).
REPEAT_S = 0.5


@contextlib.contextmanager
def catch(note: Callable[[int], None]) -> Iterator[None]:
    """Calls ``note`` with the number of each SIGTERM and SIGINT within the block."""
    is_main = threading.current_thread() is threading.main_thread()  # Python sets handlers only there
    caught = (signal.SIGTERM, signal.SIGINT) if is_main else ()
    before = {number: signal.signal(number, lambda own, _: note(own)) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Signals:
    """``received`` is the number of the signal that asked to stop, or 0."""

    received = 0
    _received_at = 0.0

    def note(self, number: int) -> None:
        if not self.received:
            self.received, self._received_at = number, time.monotonic()
        elif number != signal.SIGTERM or time.monotonic() - self._received_at > REPEAT_S:
            raise KeyboardInterrupt
