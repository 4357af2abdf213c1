"""Ticket, Reply and Member: what the pool knows of the batches under way, and of the workers that make them."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from millrace.errors import StageFailed
from millrace.feed.line import Line
from millrace.feed.processes import worker as protocol
from millrace.feed.processes.launch import ForkServer, Spawner
from millrace.feed.processes.packing import HEAD, STAGES
from millrace.feed.processes.shared_slots import SharedSlot
from millrace.feed.processes.watch import Finding, Watch

UNBEGUN = -1  # instead of a stage: no worker has begun to write into this slot


@dataclass
class Ticket:
    """A batch to make in a slot."""

    line: int
    batch: int
    slot: SharedSlot
    deaths: int = 0  # of workers that had begun with it
    losses: int = 0  # of workers that had it

    @property
    def is_begun(self) -> bool:
        return self.slot.array is None or HEAD.unpack_from(self.slot.array.data)[0] != UNBEGUN


class Reply(NamedTuple):
    """What became of a ticket: a batch in its slot, or an error."""

    ticket: Ticket
    text: bytes  # where the columns lie
    num_bytes: int
    make_s: float
    function_s: float
    rest_s: float
    error: Exception | None = None


@dataclass(eq=False)
class Member:
    """A worker process, as the pool sees it."""

    number: int
    wire: protocol.Wire
    bell: int  # wakes the worker
    launcher: ForkServer | Spawner
    tickets: deque[Ticket] = field(default_factory=deque)  # it makes them in this order
    pid: int | None = None  # once it works
    watch: Watch | None = None  # while it is silent

    @property
    def fileno(self) -> int:
        return self.wire.pipe.fileno()

    def send(self, *messages: bytes) -> None:
        with contextlib.suppress(OSError):  # it has died: its socket says so, and its tickets go to others
            self.wire.send(*messages)

    def send_tickets(self, *tickets: Ticket) -> None:
        for each in tickets:
            if each.slot.array is not None:
                HEAD.pack_into(each.slot.array.data, 0, UNBEGUN, -1)
        self.send(*(
            protocol.TICKET.pack(b"T", each.line, each.batch, each.slot.number, each.slot.offset, each.slot.size)
            for each in tickets
        ))  # fmt: skip

    def close(self) -> None:
        self.wire.pipe.close()
        os.close(self.bell)

    def look(self, seconds: float) -> Finding | None:
        """Why it gives no answer, if something is wrong with it."""
        self.watch = self.watch or Watch()
        return self.watch.look(self.pid or self.launcher.pid(self.number), seconds)


def fatal(ticket: Ticket, line: Line, what: str) -> StageFailed:
    """The error for a batch that no worker survives, with the sample where that is known."""
    stage, row = 0, -1
    if ticket.slot.array is not None:
        stage, row = HEAD.unpack_from(ticket.slot.array.data)
        stage = max(stage, 0)
    plan = line.plan(ticket.batch, ticket.batch + 1)
    position, sample = line.first_position(ticket.batch), None
    named = f"samples {plan.samples[plan.samples >= 0][:4]}..."
    if STAGES[stage] == "decode" and row >= 0:
        if row < len(plan.samples) and plan.positions[row] >= 0:  # padding repeats the first sample of all ranks
            position = int(plan.positions[row])
        sample = int(line.order.samples(np.array([position]))[0])
        named = f"sample {sample}"
    times = f", {ticket.deaths} times in all" if ticket.deaths > 1 else ""
    return StageFailed(
        f"{what} during {STAGES[stage]} at position {position} ({named}){times}; look at these samples, and at the memory "
        "that the workers need",
        stage=STAGES[stage], position=position, sample=sample,
    )  # fmt: skip
