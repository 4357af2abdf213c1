"""``millrace prepare text``: from text files to a token store."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any

import typer
from typer import Argument, Option

from millrace.cli.options import Address, Engine, MaxSkipped, SameSource
from millrace.cli.printing import print_json, print_line, print_table, size
from millrace.terminal import quoted

EXAMPLE = "millrace prepare text books/*.txt --out corpus --tokenizer gpt2"

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def count(text: str) -> int:
    """``10M`` -> 10,000,000; ``64MiB`` -> 67,108,864."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip().replace("_", ""))
    if match is None or match[2].upper() not in UNITS:
        raise typer.BadParameter(f"{text!r} is not a number such as 10M or 64MiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def run(
    context: typer.Context,
    sources: Annotated[list[str], Argument(help="Files, folders or patterns; - is standard input.")],
    out: Annotated[str, Option(help="Folder for the new store.")],
    tokenizer: Annotated[
        str, Option(help="gpt2, bytes, char, train:VOCAB, or a file (.json, .tiktoken, .model).")
    ] = "gpt2",
    shard_tokens: Annotated[int, Option(parser=count, metavar="COUNT", help="Tokens per shard.")] = "10M",  # type: ignore[assignment]
    split: Annotated[
        str | None,
        Option(
            metavar="FORM",
            help="Shares of documents for val and test: hash:0.01, hash:0.01,0.01, or tail:0.01 for the last documents.",
            show_default="hash:0.01",
        ),
    ] = None,
    val: Annotated[float, Option(help="Share of documents for validation; 0 for none.")] = 0.01,
    test: Annotated[float, Option(help="Share of documents for testing.")] = 0.0,
    val_tail: Annotated[
        bool, Option("--val-tail", help="Take the last documents for val, not a random share.")
    ] = False,
    format_: Annotated[
        str | None,
        Option("--format", help="Format of the sources: text, jsonl, csv or parquet.", show_default="by ending"),
    ] = None,
    document: Annotated[
        str | None, Option(help="What a document is: line, blank-line, file or record.", show_default="by ending")
    ] = None,
    text_field: Annotated[str, Option(help="The field or column with the text, in JSONL, CSV and Parquet.")] = "text",
    mask_field: Annotated[
        str | None,
        Option(help="The field or column that lists which parts of the text count for the loss.", show_default="none"),
    ] = None,
    no_normalize: Annotated[bool, Option("--no-normalize", help="Keep text as it is, for code and Markdown.")] = False,
    dedup: Annotated[str, Option(help="Which repeated documents to drop: exact, near or none.")] = "exact",
    no_dedup: Annotated[bool, Option("--no-dedup", help="The same as --dedup none.")] = False,
    dedup_unit: Annotated[str, Option(help="Compare whole documents, or each line: document or line.")] = "document",
    min_chars: Annotated[int, Option(help="Drop documents with fewer characters.")] = 1,
    max_document: Annotated[int, Option(parser=count, metavar="BYTES", help="Longest document.")] = "64MiB",  # type: ignore[assignment]
    long_documents: Annotated[str, Option(help="What to do with a longer document: stop or split.")] = "stop",
    filter_: Annotated[
        str | None,
        Option("--filter", metavar="MODULE:FUNCTION", help="Keep only texts for which this function returns true."),
    ] = None,
    on_error: Annotated[str, Option(help="What to do with unreadable documents: stop, skip or replace.")] = "stop",
    max_skipped: MaxSkipped = 0.01,
    encoding: Annotated[str, Option(help="Encoding of the files, such as latin-1.")] = "utf-8",
    html: Annotated[str, Option(help="HTML files: raw keeps the tags, text extracts the text.")] = "raw",
    max_ratio: Annotated[
        int, Option(help="Refuse compressed files that grow more than this many times; below 1 GiB nothing is stopped.")
    ] = 1000,
    exclude: Annotated[
        list[str] | None, Option(metavar="GLOB", help="Leave out files like '*.bak' or 'drafts/**'; repeatable.")
    ] = None,
    restart: Annotated[bool, Option("--restart", help="Begin afresh: delete the work of an interrupted run.")] = False,
    workers: Annotated[
        int | None, Option(min=1, help="Number of worker processes.", show_default="one per core; of --address: all")
    ] = None,
    stall: Annotated[
        float,
        Option(min=0, metavar="SECONDS", help="Stop if a worker makes no progress for this long; 0: never."),
    ] = 1800,
    engine: Engine = "local",
    address: Address = None,
    append: Annotated[bool, Option("--append", help="Add to an existing store, as a new snapshot.")] = False,
    same_source: SameSource = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Make a token store from text files.

    Cleans documents, drops repeated ones, tokenises the rest and writes shards. If it is interrupted, run the same command
    again: it continues.
    """
    from millrace.cli.prepare_progress import TextProgress
    from millrace.prepare.split_forms import TEXT_FORMS
    from millrace.prepare.text.options import ReadOptions, ShardOptions
    from millrace.prepare.text.text import prepare_text

    names = {*ReadOptions.__struct_fields__, *ShardOptions.__struct_fields__, "no_normalize"}
    given = given_options(context, names, TEXT_FORMS)
    if given.pop("no_normalize", False):
        given["normalize"] = False
    if no_dedup:
        given["dedup"] = "none"
    report = prepare(context, prepare_text, TextProgress(), given)
    if not as_json:
        show(report, out, is_append=append)


def given_options(context: typer.Context, names: Collection[str], forms: Mapping[str, Any]) -> dict[str, Any]:
    """The options, of these names and ``split``, that the user gave: an append takes all others from its store."""
    from millrace.prepare.split_forms import older_options

    asked = (name for name in context.params if name.rstrip("_") in (*names, "split"))
    sources = {name: context.get_parameter_source(name) for name in asked}
    given = {
        name.rstrip("_"): context.params[name]
        for name, source in sources.items()
        if source and source.name != "DEFAULT"
    }
    if given.get("split") is not None and (both := older_options(forms) & set(given)):
        flag = f"--{min(both).replace('_', '-')}"
        raise typer.BadParameter(f"give either --split or {flag}, not both", param_hint="--split")
    return given


def prepare(context: typer.Context, function: Any, progress: Any, given: Mapping[str, Any]) -> Any:
    """Runs a preparation with the options of its command; returns the report, and prints it for ``--json``."""
    import msgspec

    from millrace.prepare.advice import with_flags

    asked = context.params
    options = {
        name: asked[name]
        for name in ("workers", "engine", "address", "append", "restart", "same_source", "max_skipped")
    }
    with progress:
        report = with_flags(function)(
            asked["sources"],
            asked["out"],
            **options,
            exclude=asked["exclude"] or (),
            stall_s=asked["stall"],
            progress=progress,
            **given,
        )
    if asked["as_json"]:
        print_json(msgspec.to_builtins(report))
    return report


def show(report: Any, out: str, *, is_append: bool) -> None:
    from millrace.prepare.text.read.reader import REPLACED
    from millrace.store.open import open_store

    if not report.is_new and not report.documents:
        dropped = ", ".join(f"{reason}: {number:,}" for reason, number in report.dropped.items())
        print_line(f"nothing to add to {report.path}, fingerprint {report.fingerprint} ({dropped or 'no documents'})")
        return
    if not report.is_new:
        print_line(f"already complete: {report.path}, fingerprint {report.fingerprint}")
        return
    if is_append:
        print_line("added:")
    print_table(_splits(report.documents, report.tokens, report.shards), indent="")
    if is_append:
        whole = open_store(report.path).meta["report"]
        print_line("the store now holds:")
        print_table(_splits(whole["documents"], whole["tokens"], whole["shards"]), indent="")
    if report.cut:
        print_line(f"cut: {report.cut:,} document{'s' * (report.cut != 1)} into {report.pieces:,} pieces")
    tokens = sum(report.tokens.values())
    for reason, number in report.dropped.items():
        where = f" (named in {out}/quarantine.jsonl)" if reason.startswith("unreadable") else ""
        print_line(f"{'' if reason == REPLACED else 'dropped, '}{reason}: {number:,}{where}")
    seconds = max(report.seconds, 1e-9)
    each = report.characters / max(tokens, 1)
    by = f", by {report.encoder}" if report.encoder != report.tokenizer else ""
    print_line(f"{each:.2f} characters per token ({report.tokenizer}{by})")
    print_line(
        f"read {size(report.bytes_read)} of text in {seconds:.1f} s: {report.bytes_read / seconds / 1e6:.1f} MB/s, "
        f"{tokens / seconds:,.0f} tokens/s"
    )
    print_line(f"wrote {report.path}, fingerprint {report.fingerprint}")
    print_line(f"next: millrace head {quoted(out)}")


def _splits(documents: dict[str, int], tokens: dict[str, int], shards: dict[str, int]) -> list[tuple[str, ...]]:
    """The rows of a table of counts by split."""
    rows = [(split, *(f"{counts.get(split, 0):,}" for counts in (documents, tokens, shards))) for split in documents]
    return [("split", "documents", "tokens", "shards"), *rows]
