"""Composes what makes the batches of a line: gather, then ``decode``, then ``transform``. Feeds and workers use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from millrace.feed.batch import Batch
from millrace.feed.line import Line
from millrace.feed.make.decode import DecodeMake
from millrace.feed.make.plan import PlanMake
from millrace.feed.make.program import Program, ProgramMake
from millrace.feed.make.transform import TransformMake
from millrace.feed.stages import Make


class Functions(Protocol):
    """The user's part of a feed."""

    @property
    def seed(self) -> int: ...
    @property
    def decode(self) -> Any: ...
    @property
    def transform(self) -> Any: ...


def compose_make(
    line: Line,
    functions: Functions,
    program: Program | None,
    *,
    slots: int,
    in_threads: bool = False,
    note: Callable[..., None] | None = None,
) -> Make[Batch]:
    """``note(stage, row)`` is told what is about to be done."""
    make: Make[Batch] = (
        PlanMake(line, slots=slots, in_threads=in_threads) if program is None else ProgramMake(program, slots=slots)
    )
    if functions.decode is not None:
        make = DecodeMake(make, functions.decode, line, functions.seed, note, slots=slots)
    if functions.transform is not None:
        make = TransformMake(make, functions.transform, line, functions.seed, note)
    return make
