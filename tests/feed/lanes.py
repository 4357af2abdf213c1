"""A device that is as slow as it may be: copies and kernels run when somebody waits for them.

Two streams are queues of work; an event is a place in one. Nothing runs before it must, so that memory that is used
again too early is seen as wrong numbers.
"""

import ctypes
import threading
import weakref

import numpy as np
import torch


class Event:
    stream = place = None


class SlowLanes:
    """A loop's stream that runs as late as it may, and a copy stream that runs as late or, if ``eager``, as early as it may."""

    device = torch.device("cpu")

    def __init__(self, eager=False):
        self.queues, self.done = {"loop": [], "copies": []}, {"loop": 0, "copies": 0}
        self.allocated, self.eager = [], eager
        self.host = []  # weak references to all memory of the host that was asked for
        self.num_waits, self.inside = 0, None

    def run(self, stream, until):
        """Runs a stream up to a place, and of the other what it waits for."""
        while self.done[stream] < until:
            event, work = self.queues[stream][self.done[stream]]
            if event is not None and event.stream is not None:
                self.run(event.stream, event.place)
            self._step(stream, work)

    def _step(self, stream, work):
        self.queues[stream][self.done[stream]] = None  # what ran holds nothing
        self.done[stream] += 1
        if work is not None:
            work()

    def _hurry(self):
        while self.eager and self.done["copies"] < len(self.queues["copies"]):
            event, work = self.queues["copies"][self.done["copies"]]
            if event is not None and not self.has_come(event):
                return
            self._step("copies", work)

    def queue(self, stream, work):
        self.queues[stream].append((None, work))
        self._hurry()

    def record(self, event, stream):
        event.stream, event.place = stream, len(self.queues[stream])

    def wait(self, stream, event):
        at = Event()
        at.stream, at.place = event.stream, event.place
        self.queues[stream].append((at, None))
        self._hurry()

    @property
    def num_alive(self):
        return sum(memory() is not None for memory in self.host)

    # What the feed asks for. Events and streams belong to a context, which must be the thread's own.

    def __enter__(self):
        assert self.inside is None
        self.inside = threading.get_ident()

    def __exit__(self, *error):
        self.check()
        self.inside = None

    def check(self):
        assert self.inside == threading.get_ident(), "in another context"

    def host_memory(self, num_bytes):
        memory = np.full(num_bytes, 78, np.uint8)
        self.host.append(weakref.ref(memory))
        return memory

    def new_memory(self, num_bytes):
        self.check()
        # Kept, since a GPU's allocator too gives memory away only after the work that was queued on it.
        self.allocated.append(torch.full((num_bytes,), 77, dtype=torch.uint8))
        return self.allocated[-1]

    def event(self):
        self.check()
        return Event()

    def mark(self, event):
        self.check()
        self.record(event, "loop")

    def copy(self, source, target, num_bytes, after, done):
        self.check()
        self.wait("copies", after)
        # By address, as on a GPU: a copy under way keeps neither end alive.
        self.queue("copies", lambda: ctypes.memmove(target, source, num_bytes))
        self.record(done, "copies")

    def use(self, done):
        self.check()
        self.wait("loop", done)

    def is_done(self, event):
        self.check()
        self._hurry()
        return self.has_come(event)

    def has_come(self, event):
        return event.stream is None or self.done[event.stream] >= event.place

    def finish(self, event):
        self.check()
        self.num_waits += 1
        self.run(event.stream, event.place)
