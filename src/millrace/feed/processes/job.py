"""Job: what worker processes need of a feed, in an anonymous memory file that all of them map.

It holds one pickle, which only goes to processes that we start ourselves, and the arrays of it beside the pickle. So
a store in memory, the ids of a subset, where records begin or a table of a transform are in memory once for all workers.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import pickletools
import struct
import sys
from multiprocessing import spawn
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError
from millrace.feed.line import Line
from millrace.feed.processes.shared_slots import no_memory
from millrace.order.orders import Order
from millrace.store.store import Store
from millrace.view.compose import leaves
from millrace.view.view import View

if TYPE_CHECKING:
    from millrace.feed.feed import Feed

ALIGN = 64
_LENGTHS = struct.Struct("<q")


class Job(NamedTuple):
    """Makes any batch of any line of a feed."""

    view: View
    order: Order
    seed: int
    decode: Any
    transform: Any
    line: Line  # any line of the feed: others differ in their numbers

    @classmethod
    def of(cls, feed: Feed) -> Job:
        for leaf in leaves(feed.view):
            _compute_tables(leaf)
        return cls(feed.view, feed.order, feed.seed, feed.decode, feed.transform, feed.line(0, None))


def write_job(job: Job) -> int:
    """The descriptor of a new memory file with the job. The caller closes it."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(tuple(job))
    data = stream.getbuffer()
    parts = [memoryview(_main_module(bytes(data))), data, *(buffer.raw() for buffer in buffers)]
    table = b"".join(_LENGTHS.pack(number) for number in (len(parts), *(len(part) for part in parts)))
    fd = os.memfd_create("millrace-job", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            for part in (memoryview(table), *parts):
                file.write(part)
                file.write(bytes(-len(part) % ALIGN))
    except OSError as error:
        os.close(fd)
        raise no_memory(
            f"shared memory for the {sum(map(len, parts)):,} bytes that each worker needs", error
        ) from error
    return fd


def _compute_tables(leaf: View) -> None:
    """What batches of a view need of each record, so that it goes along: in each worker it would be memory of its own."""
    plan = leaf.plan()
    if plan is None or plan[-1][0] != "stride":
        for axis in {field.axis for field in leaf.fields if field.axis is not None}:
            leaf.store.whole.axis_index(axis)


class _Pickler(pickle.Pickler):
    """Pickles views and stores with the tables that they have computed, and arrays of a file's map beside the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.memmap):
            return value.view(np.ndarray).__reduce_ex__(5)
        if not isinstance(value, (View, Store)):
            return NotImplemented
        function, arguments, state = (*value.__reduce_ex__(5), None)[:3]
        if isinstance(value, Store):
            indexes = vars(value).get("_indexes", {}).items()
            state = {"_indexes": {axis: index for axis, index in indexes if index.is_joined}}
        elif isinstance(state, dict):
            state = state | _own_arrays(vars(value))
        return function, arguments, state


def _own_arrays(values: dict[str, Any]) -> dict[str, Any]:
    """Those that are no part of another one, such as of a file's map."""
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray) and value.base is None}


def read_job(fd: int) -> Job:
    """The job, in a worker. Its arrays are private: what a worker writes into one stays in that worker."""
    area = memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE))
    (count,) = _LENGTHS.unpack_from(area)
    lengths = [_LENGTHS.unpack_from(area, _LENGTHS.size * (1 + k))[0] for k in range(count)]
    begin, parts = _LENGTHS.size * (1 + count), []
    for length in lengths:
        begin += -begin % ALIGN
        parts.append(area[begin : begin + length])
        begin += length
    spawn.prepare(json.loads(bytes(parts[0])))
    return Job(*pickle.loads(parts[1], buffers=parts[2:]))  # noqa: S301 - from our own parent, by an inherited descriptor


def _main_module(data: bytes) -> bytes:
    """How a worker imports the script of this program, as multiprocessing does it, if the pickle names that."""
    found = spawn.get_preparation_data("millrace-worker") if "__main__" in _strings(data) else {}
    wanted = ("init_main_from_name", "init_main_from_path", "sys_argv")
    return json.dumps({key: found[key] for key in wanted if key in found}).encode()


def _strings(data: bytes) -> set[str]:
    return {argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}


def check_job(feed: Feed) -> None:
    """Refuses what no worker process could load, when a feed is constructed."""
    if not hasattr(os, "memfd_create"):
        raise ConfigError("processes= needs Linux (memfd_create); leave it out, and threads run the transform")
    try:
        feed.view.spec()
    except Exception as error:
        raise ConfigError(
            f"the view {type(feed.view).__name__} has no spec ({error}), and workers rebuild it from that; "
            "implement spec(), or leave processes= out"
        ) from error
    for name, function in (("decode", feed.decode), ("transform", feed.transform)):
        _check_sendable(name, function)


def _check_sendable(name: str, function: Any) -> None:
    where = "move it to the top level of a module and give it by name, with functools.partial for its options"
    shown = getattr(function, "__qualname__", repr(function))
    try:
        data = pickle.dumps(function, protocol=5, buffer_callback=lambda buffer: None)
    except Exception as error:
        raise ConfigError(f"{name} {shown} cannot be sent to another process ({error}); {where}") from error
    for module in _modules(data):
        if not _is_importable(module):
            kind = "of a notebook or an interactive session" if module == "__main__" else f"of module {module!r}"
            raise ConfigError(f"{name} {shown} is {kind}, which workers cannot import; {where}")


def _modules(data: bytes) -> set[str]:
    """The modules that a pickle names: of each global, the string pushed before its name."""
    strings: list[str] = []
    modules: set[str] = set()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STACK_GLOBAL":
            modules.update(strings[-2:-1])
        elif isinstance(argument, str):
            strings.append(argument)
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            strings.append("")  # a string from the memo: its module was seen where it was put there
    return modules - {""}


def _is_importable(module: str) -> bool:
    loaded = sys.modules.get(module)
    if module == "__main__":
        # As multiprocessing starts a child: by the name or the path of the script.
        return getattr(loaded, "__spec__", None) is not None or os.path.isfile(getattr(loaded, "__file__", None) or "")
    if module == "__mp_main__":  # that script, as a worker imports it
        return loaded is not None
    package = module.partition(".")[0]
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    # Not whether it is loaded here: a module made by hand, or loaded from a path, is found nowhere else.
    return any(finder.find_spec(package, None) is not None for finder in finders)
