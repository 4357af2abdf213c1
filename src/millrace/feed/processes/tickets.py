"""What the pool knows of the batches under way, of the workers that make them, and of how workers ended."""

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
from millrace.feed.processes.launch import ForkServer, Spawner, was_killed
from millrace.feed.processes.packing import HEAD, STAGES
from millrace.feed.processes.shared_slots import SharedSlot
from millrace.feed.processes.watch import Finding, Watch

MAX_DEATHS = 3  # workers that may crash or exit while they make one batch
MAX_KILLS = 5  # workers that may be killed meanwhile: for want of memory, or by somebody
MAX_LOSSES = 12  # the same where others are killed too, or with those that had not begun: all may be killed at once
MAX_TOLD = 5  # ends that a report describes
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


class Work(NamedTuple):
    """What a worker was doing when it ended."""

    stage: str
    position: int
    sample: int | None  # that it was decoding
    text: str

    @classmethod
    def of(cls, ticket: Ticket, line: Line) -> Work:
        stage, row = "gather", -1
        if ticket.slot.array is not None:
            number, row = HEAD.unpack_from(ticket.slot.array.data)
            stage = STAGES[number] if 0 <= number < len(STAGES) else stage
        positions = line.read_positions(ticket.batch)
        position = int(positions[0]) if len(positions) else line.first_position(ticket.batch)
        sample, named = None, f"samples {line.order.samples(positions[:4])}..."
        if stage == "decode" and row >= 0:
            position = int(positions[row]) if row < len(positions) else position
            sample = int(line.order.samples(np.array([position]))[0])
            named = f"sample {sample}"
        return cls(stage, position, sample, f"during {stage} at position {position} ({named})")


class Ends:
    """How workers ended, and which batches that is blamed on."""

    def __init__(self) -> None:
        self.count = 0
        self.last: deque[str] = deque(maxlen=MAX_TOLD)
        self._killed: set[tuple[int, int]] = set()  # batches whose worker was killed

    def add(
        self, what: str, code: int | None, ticket: Ticket | None, line: Line, is_final: bool = False
    ) -> StageFailed | None:
        """One more; ``ticket`` is what the worker had to make. The error, if that batch is not to be made again."""
        self.count += 1
        if ticket is None:
            self.last.append(what)
            return None
        work, is_killed = Work.of(ticket, line), was_killed(code)
        self.last.append(f"{what} {work.text}" if ticket.is_begun else what)
        ticket.losses += 1
        if ticket.is_begun:
            ticket.deaths += 1
            if is_killed:
                self._killed.add((ticket.line, ticket.batch))
        most = MAX_DEATHS if not is_killed else MAX_KILLS if len(self._killed) == 1 else MAX_LOSSES
        if ticket.deaths < most and ticket.losses < MAX_LOSSES and not is_final:
            return None
        times = f", {ticket.deaths} times in all" if ticket.deaths > 1 else ""
        return StageFailed(
            f"{what} {work.text}{times}; look at these samples, and at the memory that the workers need",
            stage=work.stage, position=work.position, sample=work.sample,
        )  # fmt: skip
