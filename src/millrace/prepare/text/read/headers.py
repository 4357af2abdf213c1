"""Checks before any work that files of records hold the fields asked for: by their header or first record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from millrace.errors import SourceError
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.framing import read_documents
from millrace.prepare.text.read.html import check_library
from millrace.prepare.text.read.reader import unreadable
from millrace.prepare.text.read.records import Bad, MissingText, check_parquet
from millrace.prepare.text.read.sources import Source, SourceSlice


def check_headers(
    sources: Sequence[Source], options: ReadOptions, watched: Callable[[Iterable[Source], int], Iterable[Source]]
) -> list[Source]:
    """The sources. With ``--on-error skip``, a file that cannot be used gets its ``problem``.

    Else one error names all such files. Plain text has no header. ``watched`` gives the files one by one, with progress.
    """
    check_library(sources)
    checked = [(source, _problem(source, options)) for source in watched(sources, len(sources))]
    problems = [(source, problem) for source, problem in checked if problem is not None]
    if not problems or options.on_error != "stop":
        return [
            source if problem is None else msgspec.structs.replace(source, problem=_reason(source, problem))
            for source, problem in checked
        ]
    lacking = [problem for _, problem in problems if isinstance(problem, MissingText)]
    has_others = any(problem is None and source.format != "text" for source, problem in checked)
    hint = _two_names(len(lacking)) if lacking and has_others else ""
    if len(lacking) == len(problems) and len(lacking) + has_others > 1:
        raise _missing_text(lacking, options.text_field, hint)
    if len(problems) == 1:
        raise problems[0][1]
    listed = "; ".join(f"({k}) {problem}" for k, (_, problem) in enumerate(problems, start=1))
    raise SourceError(
        f"{len(problems):,} files cannot be used: {listed}{hint}; fix them, leave them out with --exclude, or go on with "
        "--on-error skip",
        source=problems[0][0].path,
    )


def _missing_text(problems: Sequence[MissingText], field: str, hint: str) -> SourceError:
    """The error for files that lack the text, each with the fields that it has."""
    listed = " | ".join(f"{problem.source!r} has {', '.join(problem.names[:8])}" for problem in problems)
    if not hint:
        shared = [name for name in problems[0].names if all(name in problem.names for problem in problems)]
        choose = f"choose one that all have ({', '.join(shared[:8])}) with --text-field; " if shared else ""
        hint = (
            f"; {choose}if they name their text differently, prepare one kind and leave the others out with --exclude; then "
            "add the others with --append and --text-field NAME"
        )
    return SourceError(
        f"no field {field!r} in {len(problems):,} file{'s' * (len(problems) > 1)}: {listed}{hint}",
        source=problems[0].source,
    )


def _two_names(lacking: int) -> str:
    """The remedy where files name their text differently."""
    these = "this file" if lacking == 1 else "the files without it"
    return (
        f"; other files have it: prepare those first and leave {these} out with --exclude; then add {these} "
        "with --append and --text-field NAME"
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
    if first.names is None:
        return problem
    return MissingText(str(problem), source=source.path, offset=first.offset, names=first.names)


def _reason(source: Source, problem: SourceError) -> str:
    """The problem of a file without its name and the remedies."""
    return str(problem).removeprefix(repr(source.path)).lstrip(" ,:").split("; choose one")[0]
