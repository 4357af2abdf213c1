"""Notes of a preparation: what the user may not have meant, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.prepare.text.options import ReadOptions, ShardOptions
from millrace.prepare.text.part import PartDone
from millrace.prepare.text.read.sources import Part, Source

TAIL = "--val-tail without deduplication: equal documents may be in train and in val; leave --no-dedup out, or split by hash"


def notes_before(sources: Sequence[Source], reading: ReadOptions, cutting: ShardOptions) -> list[str]:
    """Notes that are known before the work, which may take hours."""
    notes = []
    indented = [source.path for source in sources if source.is_indented] if reading.normalize else []
    if indented:
        notes.append(
            f"{_name_files(indented)}: code and markup are cleaned like prose and lose their indentation; "
            "--no-normalize keeps it"
        )
    pages = [source.path for source in sources if source.is_raw_html]
    if pages:
        notes.append(f"{_name_files(pages)}: HTML is kept with its tags; --html text takes only its text")
    if cutting.val_tail and cutting.val + cutting.test > 0 and reading.dedup == "none":
        notes.append(TAIL)
    return notes


def notes_after(sources: Sequence[Source], parts: Sequence[Part], done: Sequence[PartDone]) -> list[str]:
    """Notes that are known after the work: files without a document."""
    used = {
        piece.source for part in parts for piece in part.slices
        if piece.source - part.first_source not in done[part.number].without
    }  # fmt: skip
    empty = [source.path for number, source in enumerate(sources) if number not in used]
    return [f"{_name_files(empty)}: no document is in {'it' if len(empty) == 1 else 'them'}"] if empty else []


def _name_files(paths: Sequence[str]) -> str:
    return f"{paths[0]!r}{f' and {len(paths) - 1:,} more' if len(paths) > 1 else ''}"
