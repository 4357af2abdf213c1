"""Calls everything in the C core with arguments that are right but for a few: started by test_fuzz_core.py in a process of its own.

``python fuzz_core.py SEED CALLS LAST``: LAST is a file that holds the call under way, for whoever finds this process dead.
"""

import json
import os
import random
import resource
import sys

import numpy as np

from millrace.native import core

MEMORY = 3 << 30  # bytes, so that what asks for too much is refused and not killed
NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 64, 255, 256, 1 << 31, 1 << 32, 1 << 60, 1 << 61, (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 64,
)  # fmt: skip
DTYPES = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ">i8", ">f4", "?", "c8", "U3")
# No objects: whatever writes bytes into an array of them, as file.readinto() does, ends Python.


class Fuzz:
    def __init__(self, seed):
        self.rng = random.Random(seed)

    # Values.

    def array(self, dtype=None, size=None):
        dtype = dtype or self.rng.choice(DTYPES)
        size = self.rng.choice((0, 1, 2, 3, 9, 33)) if size is None else size
        array = np.array([self.rng.choice((0, 1, 2, 5, 100, 127)) for _ in range(size)]).astype(dtype)
        return self.bent(array) if self.rng.random() < 0.5 else array

    def bent(self, array):
        """The same numbers, stored in another way: it may be one that the core cannot read."""
        way = self.rng.randrange(7)
        if way == 0:
            return np.repeat(array, 2)[::2]
        if way == 1:  # at an odd address
            memory = np.zeros(array.nbytes + 1, np.uint8)
            memory[1:] = np.frombuffer(array.tobytes(), np.uint8)
            return memory[1:].view(array.dtype)
        if way == 2:
            array.flags.writeable = False
            return array
        if way == 3:
            return array[: self.rng.randint(0, array.shape[0])] if array.ndim else array
        if way == 4:
            return array.astype(self.rng.choice(DTYPES[:12]), copy=True) if array.dtype.kind in "iuf" else array
        if way == 5 and array.dtype.kind in "iuf":  # huge or negative numbers among them
            array = array.copy()
            if array.size:
                low, high = (-(1 << 63), (1 << 63) - 1) if array.dtype == "i8" else (0, 100)
                array.flat[self.rng.randrange(array.size)] = self.rng.choice((low, high, 1))
            return array
        return array.reshape(1, *array.shape)

    def anything(self):
        makers = (
            lambda: self.rng.choice(NUMBERS), lambda: self.rng.choice(NUMBERS), self.array, self.array, lambda: None,
            lambda: b"some bytes \xff", lambda: bytearray(16), lambda: "text", lambda: 1.5, lambda: [b"one", b"two"],
            lambda: tuple(self.anything() for _ in range(self.rng.randrange(4))), lambda: range(1 << 40), lambda: self.anything,
            lambda: memoryview(bytes(24)), lambda: [self.anything() for _ in range(self.rng.randrange(3))], self.column,
        )  # fmt: skip
        return self.rng.choice(makers)()

    def changed(self, value):
        """A value in place of another: of the same kind, or of any."""
        if self.rng.random() < 0.3:
            return self.anything()
        if isinstance(value, tuple) and value:
            parts = list(value)
            at = self.rng.randrange(len(parts))
            parts[at] = self.changed(parts[at])
            return tuple(parts)
        if isinstance(value, np.ndarray):
            return self.bent(value)
        if isinstance(value, bool) or not isinstance(value, int):
            return self.anything()
        return self.rng.choice((*NUMBERS, value + 1, value - 1, value * 2))

    def arguments(self, right):
        """Right ones, of which some are changed, left out, added, or given twice."""
        found = list(right)
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            at = self.rng.randrange(len(found)) if found else 0
            way = self.rng.random()
            if found and way < 0.85:
                found[at] = self.changed(found[at])
            elif found and way < 0.95:
                found[at] = found[self.rng.randrange(len(found))]
            elif way < 0.98:
                found.append(self.anything())
            else:
                found = found[:-1]
        return found

    def made(self, kind, right):
        """An object of arguments that are right but for a few, else of right ones."""
        try:
            return kind(*self.arguments(right))
        except Exception:  # noqa: BLE001 - refusals are what is wanted
            return kind(*right)

    # What there is to call, with right arguments.

    def column(self):
        column = self.made(core.Column, (np.array([0, 4, 4, 10]), 8))
        for shard in range(3):
            if self.rng.random() < 0.9:
                self.attempt(column.give, (shard, np.arange(6.0)))
        return column

    def gather(self):
        column, record = self.column(), core.Column(np.array([0, 10]), 8)
        record.give(0, np.arange(10))
        fields = [
            ("dense", 0, 0, 0, 0, self.rng.randrange(2), 2, 1, 1, 8, self.rng.choice((None, (0,)))),
            ("ragged", 0, 1, 0, 0, self.rng.choice((0, 3)), 0, 1, 1, 8, None),
            ("padded", 0, 2, 0, 0, 0, 3, 1, 1, 8, None, self.rng.choice((None, b"12345678"))),
            ("record", 1, 3, 0, 0, 0, 1, 1, 1, 8, None),
            ("lengths", 0, 4, 0, 0, 3, 1, 1, 1, 8, None),
            ("mask", 0, 5, 0, 0, 0, 3, 1, 1, 8, None),
            ("start", 0, 6, 0, 0, 7, 1, 1, 1, 8, None),
        ]
        chosen = self.rng.sample(fields, self.rng.randint(1, 7))
        return self.made(core.Gather, ((column, record), tuple(chosen))), chosen

    def fill(self):
        gather, fields = self.gather()
        samples, outs, places = 3, [], []
        for _, _, kind, _, _, _, length, *_ in fields:
            rows = {
                0: length * samples,
                1: 6,
                2: length * samples,
                3: samples,
                4: samples,
                5: length * samples,
                6: samples,
            }[kind]
            outs.append(np.zeros(rows, bool) if kind == 5 else np.zeros(rows))
            places.append(np.array([0, 2, 4, 6]) if kind == 1 else None)
        offsets = self.rng.choice((None, np.array([0, 1, 2, 3])))
        axes = ((np.array([0, 3, 8]), np.array([2, 5, 10]), offsets),)
        records = np.array([0, 5, 9])
        return gather.fill, (axes, records, 0, samples, tuple(outs), tuple(places), self.rng.choice((1, 2)), 0)

    def program(self):
        gather, fields = self.gather()
        at, marks, places, size = 0, [], [], 4
        for own in [marks] * 3 + [places] * len(fields):
            own.append(at)
            at += 256
        offsets = np.array([0, 2, 2, 5, 9, 10])
        order = self.rng.choice((("shuffled", 5, 3), ("sequential", 5), ("block_shuffled", 5, 3, 2, 2), self.mixture()))
        ranks = np.array([0, 5])
        first = self.rng.choice((("take", np.arange(5), 1), ("select", np.array([31] + [0] * 15), ranks, 1)))
        # The same offsets in two shards, and the windows of them.
        pieces = np.array([0, 2, 5]), ((np.array([0, 2]), (np.array([0, 2, 2]), np.array([0, 3, 7, 8]))),)
        last = self.rng.choice(
            (("offsets", 0, (offsets,)), ("pieces", 0, pieces), ("ranked", 0, np.array([0, 7]), pieces, 1, 2))
        )
        steps = (first, ("concat", np.array([5]), np.array([2])), last)
        if self.rng.random() < 0.3 and not any(field[2] == 3 for field in fields):
            steps = (("stride", 0, 5, 2, 2),)
        line = (0, self.rng.choice((-1, 10)), size, 0, size, 1)
        right = (order, steps, (gather,), line, tuple(marks), tuple(places), at, lambda *where: None)
        return self.made(core.Program, right)

    def mixture(self):
        numbers = ([3, 5], [0, 9], [0, 0], [0, 0, 4, 5], np.arange(1 << 16) % 2)
        table = self.made(core.Mixture, tuple(np.array(own, np.int64) for own in numbers))
        return "mixture", 5, 3, table

    def ring(self):
        def allocate(slot, num_bytes):
            return self.anything() if self.rng.random() < 0.1 else np.zeros(num_bytes, np.uint8)

        right = (self.program(), allocate, self.rng.choice((-1, 3)), 2, 3, 0, 0)
        try:  # without lanes: those are addresses of functions, which are called
            return core.Ring(*self.arguments(right)[:7])
        except Exception:  # noqa: BLE001
            return core.Ring(*right)

    def documents(self):
        return b"one two\n\nthree's\t\xc3\xa9 " * 4, np.array([0, 3, 9]), np.array([3, 9, 30])

    def bpe(self):
        merges = np.array([97, 98, 256, 256, 99, 257], np.uint32)
        return self.made(core.Bpe, (np.arange(256, dtype=np.uint32), merges, 300, 2))

    def targets(self):
        """A call and right arguments for it, of each kind."""
        rng, rows, orders = (
            self.rng,
            np.arange(12.0),
            (("shuffled", 9, 3), ("block_shuffled", 9, 3, 2, 2), self.mixture()),
        )
        return {
            "samples": lambda: (core.samples, (rng.choice(orders), np.arange(7), np.zeros(7, "i8"))),
            "permute": lambda: (core.permute, (np.arange(9, dtype="u8"), 9, np.arange(24, dtype="u4"), False)),
            "rows_of": lambda: (core.rows_of, ([np.arange(4.0), np.arange(4.0)], np.zeros(8))),
            "measure_rows": lambda: (core.measure_rows, (rows, 3, np.array([0, 2]), np.array([2, 4]), np.zeros(36))),
            "scale_rows": lambda: (core.scale_rows, (rows, np.zeros(3), np.ones(3), np.zeros(12, "f4"))),
            "resize_image": lambda: (core.resize_image, self.image()),
            "is_utf8": lambda: (core.is_utf8, ("é and more".encode() * 3, 0, 20)),
            "between_gaps": lambda: (core.between_gaps, (b"one\n\ntwo\n\n\nthree" * 9,)),
            "clean_documents": lambda: (core.clean_documents, (self.documents(), rng.choice((None, np.full(0x20000, 255, "u1"))))),
            "hash_documents": lambda: (core.hash_documents, (self.documents(),)),
            "measure": lambda: (core.measure, (self.documents(),)),
            "join_with_zeros": lambda: (core.join_with_zeros, (self.documents(),)),
            "copy_runs": lambda: (core.copy_runs, (np.arange(9, dtype="u1"), 1, np.array([0, 2, 4, 6]), np.zeros(4, "u2"), 2)),
            "pack": lambda: (core.pack, (np.array([0, 3, 9, 9, 40]), rng.choice((1, 7, 64)))),
            "turns": lambda: (core.turns, (np.array([1 << 15, 0, 30_000, 2768]),)),
            "mark_documents": lambda: (core.mark_documents, self.marks()),
            "num_maps": lambda: (core.num_maps, ()),
            "lock_wait": lambda: (core.lock_wait, ()),
            "Map": self.map,
            "Column": lambda: (rng.choice((self.column().give, self.column().missing)), (np.array([0, 4]), np.array([3, 9]))),
            "Column.give": lambda: (self.column().give, (rng.randrange(3), np.arange(6.0))),
            "Column.read_by": lambda: (self.read_by, (rng.randrange(-1, 4),)),
            "Gather": lambda: (self.gather, ()),
            "Gather.fill": self.fill,
            "Gather.is_cold": lambda: (self.gather()[0].is_cold, ()),
            "Program.fill": lambda: (self.program().fill, (rng.randrange(4), np.zeros(4096, "u1"))),
            "Program.fetch": lambda: (self.program().fetch, (True,)),
            "Program.is_cold": lambda: (self.program().is_cold, ()),
            "Ring.get": lambda: (self.ring().get, (True, 0, [])),
            "Ring": lambda: (self.run_ring, ()),
            "Bpe.encode": lambda: (self.bpe().encode, (self.documents(), np.zeros(2000, "u1"), np.zeros(3, "i8"))),
            "Bpe.learn": lambda: (self.bpe().learn, (np.full(0x110000, 2, "u1"),)),
            "KnownHashes": lambda: (core.KnownHashes, (rng.choice((0, 9, 5000)),)),
            "KnownHashes.add": lambda: (core.KnownHashes().add, (np.arange(64, dtype="u1"),)),
        }  # fmt: skip

    def marks(self):
        counts, length = np.array([2, 0, 1]), self.rng.choice((4, 5))
        sizes = tuple(np.zeros(3 * length, kind) for kind in ("i4", "i8", "?"))
        return counts, np.array([1, 3, 4]), np.arange(3), np.array([True, False, True]), length, *sizes

    def image(self):
        sides = [self.rng.choice((1, 2, 5, 33)) for _ in range(4)]
        top, left = (self.rng.choice((0.0, 0.4)) for _ in range(2))
        box = top, left, self.rng.choice((sides[0] - top, 0.3)), self.rng.choice((sides[1] - left, 0.3))
        planar = self.rng.random() < 0.5
        shape = (3, *sides[2:]) if planar else (*sides[2:], 3)
        out = np.zeros(shape, self.rng.choice(("u1", "f4")))
        return np.zeros((*sides[:2], 3), "u1"), box, out, planar, self.rng.random() < 0.5, ((1, 2, 3), (0, 0, 0))

    def map(self):
        fd = os.open(__file__, os.O_RDONLY)
        try:
            self.attempt(core.Map, self.arguments((fd, 100, False)))
            found = core.Map(fd, 64)
        finally:
            os.close(fd)
        return lambda *more: bytes(found.random(*more) or b""), ()

    def read_by(self, shard):
        """It closes the file that it is given: never one of ours."""
        fd = self.rng.choice((-1, 10**6, os.open(os.devnull, os.O_RDONLY)))
        self.column().read_by(shard, fd)

    def run_ring(self):
        ring = self.ring()
        for _ in range(self.rng.randrange(5)):
            self.attempt(ring.get, (self.rng.random() < 0.7,))
        ring.counters(), ring.behind_ns(), ring.close()
        self.attempt(ring.work, (self.rng.choice((0, 0, 1, -1, 5)),))  # it would wait for a ring that is not closed
        ring.get()

    def attempt(self, call, arguments):
        try:
            call(*arguments)
        except Exception:  # noqa: BLE001 - any of them is an answer; a signal is not
            return False
        return True


def known_names():
    """Every function, type and method that the core has."""
    for name in dir(core):
        value = getattr(core, name)
        if name.startswith("_") or not callable(value):
            continue
        methods = (
            [f"{name}.{method}" for method in vars(value) if not method.startswith("_")]
            if isinstance(value, type)
            else []
        )
        yield name, methods


def main(seed, calls, last):
    if "asan" not in os.environ.get("LD_PRELOAD", ""):  # which wants the whole address space for itself
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    fd = os.open(last, os.O_RDWR | os.O_CREAT)
    answered = dict.fromkeys(Fuzz(0).targets(), 0)
    for number in range(calls):
        fuzz = Fuzz(seed * 1_000_003 + number)  # each call by itself, so that one can be tried again
        names = fuzz.targets()
        name = fuzz.rng.choice(list(names))
        os.pwrite(fd, f"call {number} of seed {seed}: {name}".ljust(80).encode(), 0)
        try:
            call, right = names[name]()
        except Exception:  # noqa: BLE001 - what it is called on could not be made
            continue
        answered[name] += fuzz.attempt(call, fuzz.arguments(right))
    sys.stdout.write(json.dumps(answered))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
