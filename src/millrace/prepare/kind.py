"""What a kind of data (text, a table) gives to its preparation; ``Run`` in run.py has all that kinds share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from millrace.prepare.engines.engine import Engine, Function
from millrace.prepare.plan import differences
from millrace.prepare.progress import EVERY, Progress
from millrace.prepare.quarantine import Skips
from millrace.prepare.stored_sources import File, StoredSources
from millrace.store.layout import Column
from millrace.store.shard import ShardEntry
from millrace.store.snapshot import Base

Item = TypeVar("Item")
NOTHING: Mapping[str, Any] = MappingProxyType({})


class PartsVoid(Exception):
    """Raised by a kind while parts are made: all of them are wrong, and have to be made again."""


class NothingNew(Exception):
    """Raised where an append is given only sources that its store has."""


@dataclass(frozen=True)
class Context:
    """What a run gives to its kind: where the store goes, where tasks run, and the way to the user."""

    out: Path  # of the finished store
    folder: Path  # of the unfinished store
    append: bool
    engine: Engine
    progress: Progress
    notes: list[str] = field(default_factory=list)  # for the report
    files: list[Any] = field(default_factory=list)  # the files that this run reads
    stored: StoredSources | None = None  # of the store that is appended to

    def new_files(self, files: Sequence[File]) -> list[File]:
        """The files that the store does not have; notes the others. All of them, where nothing is appended to."""
        fresh = list(files)
        if self.stored is not None:
            fresh, notes = self.stored.without(files)
            self.note(*notes)
            if not fresh:
                raise NothingNew
        self.files[:] = fresh
        return fresh

    def watched(self, files: Iterable[Item], total: int) -> Iterator[Item]:
        """The files one by one as they are looked into, with progress."""
        for number, file in enumerate(files):
            if number and number % EVERY == 0:
                self.progress("survey", number, total, {})
            yield file

    def count_found(self, number: int) -> None:
        """Shows how many files were found."""
        if number % EVERY == 0:
            self.progress("find", number, 0, {})

    @property
    def sources(self) -> Path:
        """Where files of URLs are brought to, until the store is finished."""
        return self.out.with_name(self.out.name + ".sources")

    @property
    def own_folders(self) -> tuple[Path, ...]:
        """Folders that hold no input."""
        return self.out, self.folder, self.sources

    def note(self, *notes: str) -> None:
        """Shows notes to the user and keeps them for the report, each once."""
        for note in notes:
            if note not in self.notes:
                self.notes.append(note)
                self.progress("note", 0, 0, {"note": note})


class Earlier(NamedTuple):
    """What an earlier run wrote into ``provenance.json`` of the store it made."""

    fingerprint: str | None
    plan: Mapping[str, Any]
    report: Any


class Product(NamedTuple):
    """What a kind says of the store that it has written the shards of."""

    fields: dict[str, Any]  # of the manifest
    report: dict[str, Any]  # of this run, as provenance.json has it
    details: Mapping[str, Any] = NOTHING  # of the report that the caller gets, besides
    provenance: Mapping[str, Any] = NOTHING
    files: Mapping[str, bytes | Iterable[bytes]] = NOTHING  # beside the manifest


class Kind(Protocol):
    """What one kind of data gives to ``Run``, in the order in which it is asked for.

    A kind serves one ``Run``, which it does not know, and remembers what it learns on the way.
    """

    context: Context  # given by the run before anything is asked
    report_type: type[msgspec.Struct]
    columns: Mapping[str, Column]  # of the store; known once all is settled
    # These three run in an engine, in any process.
    find_part: Function  # task of a part -> its report if an earlier run finished it, else None
    make_part: Function  # task of a part -> its report; the part is whole on disk
    write_shard: Function  # task of a shard (with ``split`` and ``number``) -> ShardEntry
    in_threads: bool = False  # whether tasks release the GIL and run no code of the user's; ``survey`` may find out
    apart: bool = False  # whether ``make_part`` runs code of the user's, which may crash its process
    functions: Mapping[str, str] = NOTHING  # of the user's, by option, that tasks call
    surveys_late: bool = False  # whether ``survey`` needs the lock
    parts_are_given: bool = False  # whether ``survey`` makes the parts, of records that only this process has
    is_void: bool = False  # whether an error now means that the parts are of no use

    def survey(self) -> None:
        """Finds the sources, and refuses those that cannot be used."""

    @property
    def plan(self) -> dict[str, Any]:
        """All that decides what is in the store; ``provenance.json`` keeps it."""

    def earlier(self, line: int) -> Earlier:
        """What the first run (0) or the last one (-1) of the finished store said."""

    def nothing_added(self, report: Any) -> Any:
        """The report of an append that adds nothing, from that of the last run."""
        return report

    def changes(self, plan: Mapping[str, Any]) -> list[str]:
        """How the plan of a finished store differs from this one."""
        return differences(plan, self.plan)

    def extend(self, base: Base) -> None:
        """Opens the store that is appended to."""
        return

    @property
    def part_plan(self) -> dict[str, Any]:
        """The plan in the unfinished store: what finished parts and shards depend on."""
        return self.plan

    def allow(self, old: Any, new: Any) -> Any:
        """The old plan with those changes of the new one that leave finished parts as they are."""

    def change(self, old: Any, new: Any) -> Sequence[str]:
        """Notes a plan that has changed; returns the names of what is void now, besides the shards."""

    def begin(self) -> None:
        """Whatever comes before the parts."""

    def part_tasks(self) -> Sequence[Any]:
        """A task for each part, with its ``key``; the parts in order are the whole input."""

    def estimate(self) -> tuple[int, int]:
        """Bytes on disk that the run likely needs, and needs in any case."""

    def tally(self, tasks: Sequence[Any], finished: Mapping[int, Any]) -> Any:
        """Counts parts for progress: ``done`` of ``total``, and ``facts``.

        ``add(number, part)`` takes a finished part, ``move(number, counts)`` says how far another has come.
        """

    def meanwhile(self) -> Callable[[], None] | None:
        """A check to run while the first parts are made."""
        return None

    @property
    def file_skips(self) -> Skips:
        """The records of files that the survey left out."""
        return Skips()

    def settle(self, parts: list[Any]) -> Sequence[Any] | None:
        """Decides what needs all parts, and returns the tasks of the shards; None: nothing is to be added."""

    def has_shard(self, task: Any) -> bool:
        """Whether a shard in the journal is all that is needed of it."""
        return True

    def begin_shards(self, tasks: list[Any]) -> None:
        """May sort the tasks of the shards that are missing."""
        return

    def end_shard(self, task: Any) -> Mapping[str, Any]:
        """A shard is in the journal; returns facts for progress."""

    def product(self, entries: Mapping[str, ShardEntry]) -> Product:
        """What the store and the report say, once all shards are written; ``entries`` are those, by name."""

    def close(self) -> None:
        """Gives back what the kind holds."""
        return
