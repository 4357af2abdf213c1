"""Whether the files of records hold what is asked for, looked at before any work: their header, or their first record."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millrace.errors import SourceError
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.framing import read_documents
from millrace.prepare.text.read.html import check_library
from millrace.prepare.text.read.reader import unreadable
from millrace.prepare.text.read.records import Bad, check_parquet
from millrace.prepare.text.read.sources import Source, Unit


def check_headers(sources: Sequence[Source], options: ReadOptions) -> list[Source]:
    """The sources; where errors do not stop the run, those that cannot be used say why and are set aside as a whole.

    Else one error names all of them. Plain text has no header.
    """
    check_library(sources)
    found = [(source, _problem(source, options)) for source in sources]
    problems = [(source, problem) for source, problem in found if problem is not None]
    if not problems or options.on_error != "stop":
        return [
            source if problem is None else msgspec.structs.replace(source, problem=_reason(source, problem))
            for source, problem in found
        ]
    if len(problems) == 1:
        raise problems[0][1]
    said = "; ".join(f"({k}) {problem}" for k, (_, problem) in enumerate(problems, start=1))
    raise SourceError(
        f"{len(problems):,} files cannot be used: {said}; fix them, leave them out with --exclude, or go on with "
        "--on-error skip",
        source=problems[0][0].path,
    )


def _problem(source: Source, options: ReadOptions) -> SourceError | None:
    if source.format == "text" or source.problem is not None:
        return None
    try:
        if source.format == "parquet":
            if source.compression is None or source.unpacked is not None:
                check_parquet(source, options)
            return None
        documents = read_documents(source, Unit(0, 0, -1), options)
        first = next(documents, (0, b""))[1]
        documents.close()
    except SourceError as error:
        return error
    # Where errors do not stop the run, a record that is wrong is set aside by itself.
    return unreadable(source, first, options) if isinstance(first, Bad) and options.on_error == "stop" else None


def _reason(source: Source, problem: SourceError) -> str:
    """What is wrong with a file, without its name and without the remedies."""
    return str(problem).removeprefix(repr(source.path)).lstrip(" ,:").split("; choose one")[0]
