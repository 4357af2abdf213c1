"""A device that is as slow as it may be: copies and kernels run when somebody waits for them.

Two streams are queues of work; an event is a place in one. Nothing runs before it must, so that memory that is used
again too early is seen as wrong numbers. The core calls it by addresses, as it calls the CUDA driver, from any thread.
"""

import ctypes
import itertools
import threading
import weakref

import numpy as np
import torch

LOOP, COPIES, SIDE, CONTEXT, INVALID_CONTEXT = 11, 12, 13, 77, 201
STREAMS = {LOOP: "loop", COPIES: "copies", SIDE: "side"}
POINTER, SIZE, FLAGS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint


class Event:
    stream = place = None

    def __init__(self, handle=0):
        self.handle = handle


class Thread(threading.local):
    """What the driver keeps of each thread."""

    context, is_inside, capture = None, False, 0


class SlowGpu:
    """A loop's stream that runs as late as it may, and a copy stream that runs as late or, if ``eager``, as early as it may."""

    device, home = torch.device("cpu"), LOOP

    def __init__(self, eager=False, stream=LOOP):
        self.queues, self.done = {name: [] for name in STREAMS.values()}, dict.fromkeys(STREAMS.values(), 0)
        self.allocated, self.eager, self.stream = [], eager, stream
        self.pool, self.used = [], {}  # blocks that were dropped, and the streams besides its own that each was used on
        self.host = []  # weak references to all memory of the host that was asked for
        self.registered = {}  # memory of others, by its address
        self.num_waits, self.thread = 0, Thread()
        self.busy = threading.RLock()  # threads take turns
        self.events, self.handles = weakref.WeakValueDictionary(), itertools.count(1000)
        self.calls = self.functions()
        self.table = (*(ctypes.cast(call, POINTER).value for call in self.calls), CONTEXT, COPIES)

    def run(self, stream, until):
        """Runs a stream up to a place, and of the other what it waits for."""
        with self.busy:
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
        with self.busy:
            self.queues[stream].append((None, work))
            self._hurry()

    def record(self, event, stream):
        with self.busy:
            event.stream, event.place = stream, len(self.queues[stream])

    def wait(self, stream, event):
        with self.busy:
            at = Event()
            at.stream, at.place = event.stream, event.place
            self.queues[stream].append((at, None))
            self._hurry()

    def move(self, source, target, num_bytes):
        # By address, as on a GPU: a copy under way keeps neither end alive.
        self.queue("copies", lambda: ctypes.memmove(target, source, num_bytes))

    def synchronize(self, event):
        with self.busy:
            if not self.has_come(event):
                self.num_waits += 1
                self.run(event.stream, event.place)

    def has_come(self, event):
        return event.stream is None or self.done[event.stream] >= event.place

    @property
    def num_alive(self):
        return sum(memory() is not None for memory in self.host)

    # What the core calls, with the arguments and in the order of the driver's functions.

    def functions(self):
        def inside(call, *types):
            def checked(*arguments):
                if self.thread.context != CONTEXT:
                    return INVALID_CONTEXT
                call(*arguments)
                return 0

            return ctypes.CFUNCTYPE(ctypes.c_int, *types)(checked)

        def anywhere(call, *types):
            return ctypes.CFUNCTYPE(ctypes.c_int, *types)(lambda argument: call(argument) or 0)

        def tell(found):
            found[0] = self.thread.context

        def relax(mode):
            self.thread.capture, mode[0] = mode[0], self.thread.capture

        events = self.events
        return [
            inside(lambda stream, event, flags: self.wait(STREAMS[stream], events[event]), POINTER, POINTER, FLAGS),
            inside(lambda event, stream: self.record(events[event], STREAMS[stream]), POINTER, POINTER),
            inside(lambda event: self.synchronize(events[event]), POINTER),
            inside(
                lambda target, source, size, stream: self.move(source, target, size), POINTER, POINTER, SIZE, POINTER
            ),
            anywhere(tell, ctypes.POINTER(POINTER)),
            anywhere(lambda context: setattr(self.thread, "context", context), POINTER),
            anywhere(relax, ctypes.POINTER(ctypes.c_int)),
        ]

    free_bytes = 1 << 40

    def free_memory(self):
        return self.free_bytes

    # What the feed asks for. Events and streams belong to a context, which must be the thread's own.

    def __enter__(self):
        assert not self.thread.is_inside
        self.thread.is_inside = True

    def __exit__(self, *error):
        self.check()
        self.thread.is_inside = False

    def check(self):
        assert self.thread.is_inside, "in another context"

    def current(self):
        return self.stream

    def host_memory(self, num_bytes):
        memory = np.full(num_bytes, 78, np.uint8)
        self.host.append(weakref.ref(memory))
        return memory

    def register(self, memory):
        """From now on copies may read it; before and afterwards they may not."""
        self.registered[memory.ctypes.data] = memory.nbytes

    def unregister(self, memory):
        del self.registered[memory.ctypes.data]

    def new_memory(self, num_bytes):
        """As torch's allocator: what is dropped is given away at once, in the order of its own stream and those it is told of."""
        self.check()
        with self.busy:
            free = [entry for entry in self.pool if len(entry[0]) >= num_bytes and all(map(self.has_come, entry[1]))]
            block = free[0][0] if free else np.empty(max(1 << 16, 2 * num_bytes), np.uint8)
            self.pool = [entry for entry in self.pool if entry[0] is not block]
        mine = block[:num_bytes]
        mine[:] = 77 if not free else mine
        self.allocated.append(num_bytes)
        self.used[mine.ctypes.data] = set()
        weakref.finalize(mine, self.dropped, block, mine.ctypes.data).atexit = False
        return torch.from_numpy(mine)

    def dropped(self, block, address):
        with self.busy:
            ends = []
            for stream in self.used.pop(address):
                ends.append(Event())
                self.record(ends[-1], STREAMS[stream])
            self.pool.append((block, ends))

    def record_use(self, memory, stream):
        self.used.get(memory.data_ptr(), set()).add(stream)  # memory of torch's own is not given away here

    def event(self):
        self.check()
        event = Event(next(self.handles))
        self.events[event.handle] = event
        return event

    def mark(self, event):
        self.check()
        self.record(event, STREAMS[self.stream])

    def mark_new(self, event):
        self.check()
        self.record(event, "loop")

    def copy(self, source, target, num_bytes, after, done, begun):
        self.check()
        self.wait("copies", after)
        self.record(begun, "copies")
        self.move(source, target, num_bytes)
        self.record(done, "copies")

    def use(self, done):
        self.check()
        self.wait(STREAMS[self.stream], done)

    def follow(self, stream, other, event):
        self.check()
        self.record(event, STREAMS[other])
        self.wait(STREAMS[stream], event)

    def is_done(self, event):
        self.check()
        with self.busy:
            self._hurry()
            return self.has_come(event)

    def finish(self, event):
        self.check()
        self.num_waits += 1
        self.run(event.stream, event.place)

    def finish_all(self):
        self.check()
        with self.busy:
            self.run("copies", len(self.queues["copies"]))


class PromptGpu(SlowGpu):
    """A device that does everything at once, for what torch computes on it."""

    def queue(self, stream, work):
        work()

    def record(self, event, stream):
        pass

    def wait(self, stream, event):
        pass
