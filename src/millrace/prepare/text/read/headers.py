"""Checks before any work that files of records hold the fields asked for: by their header or first record."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millrace.errors import SourceError
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.framing import read_documents
from millrace.prepare.text.read.html import check_library
from millrace.prepare.text.read.reader import unreadable
from millrace.prepare.text.read.records import Bad, MissingText, check_parquet
from millrace.prepare.text.read.sources import Source, SourceSlice


def check_headers(sources: Sequence[Source], options: ReadOptions) -> list[Source]:
    """The sources. With ``--on-error skip``, a file that cannot be used gets its ``problem``.

    Else one error names all such files. Plain text has no header.
    """
    check_library(sources)
    checked = [(source, _problem(source, options)) for source in sources]
    problems = [(source, problem) for source, problem in checked if problem is not None]
    if not problems or options.on_error != "stop":
        return [
            source if problem is None else msgspec.structs.replace(source, problem=_reason(source, problem))
            for source, problem in checked
        ]
    lacking = sum(isinstance(problem, MissingText) for _, problem in problems)
    has_others = any(problem is None and source.format != "text" for source, problem in checked)
    these = "this file" if lacking == 1 else "the files without it"
    hint = (
        (
            f"; other files have it: prepare those first and leave {these} out with --exclude; then add {these} "
            "with --append and --text-field NAME"
        )
        if lacking and has_others
        else ""
    )
    if len(problems) == 1:
        problems[0][1].args = (f"{problems[0][1]}{hint}",)
        raise problems[0][1]
    listed = "; ".join(f"({k}) {problem}" for k, (_, problem) in enumerate(problems, start=1))
    raise SourceError(
        f"{len(problems):,} files cannot be used: {listed}{hint}; fix them, leave them out with --exclude, or go on with "
        "--on-error skip",
        source=problems[0][0].path,
    )


def _problem(source: Source, options: ReadOptions) -> SourceError | None:
    if source.format == "text" or source.problem is not None:
        return None
    try:
        if source.format == "parquet":
            check_parquet(source, options)
            return None
        documents = read_documents(source, SourceSlice(0, 0, -1), options)
        first = next(documents, None)
        documents.close()
    except SourceError as error:
        return error
    if not isinstance(first, Bad) or options.on_error != "stop":  # one bad record is set aside alone
        return None
    problem = unreadable(source, first, options)
    return MissingText(str(problem), source=source.path, offset=first.offset) if first.lacks_text else problem


def _reason(source: Source, problem: SourceError) -> str:
    """The problem of a file without its name and the remedies."""
    return str(problem).removeprefix(repr(source.path)).lstrip(" ,:").split("; choose one")[0]
