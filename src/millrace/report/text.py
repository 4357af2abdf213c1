"""What a report says about text: lengths, sources, tokens, and passages that a person can read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.errors import MillraceError
from millrace.report.blocks import Bars, Passages, Section
from millrace.report.sample import Sample, bars, histogram, present

MOST_TOKENS = 4096  # of a document in one piece
ALL_TOKENS = 1 << 20  # of all documents: of a few long ones more pieces are read
COMMON = 25
BEFORE, AFTER, SHOWN = 60, 240, 6  # tokens of a passage before and after a boundary, and passages


def sections(sample: Sample, made: Mapping[str, Any]) -> list[Section]:
    lengths = sample.lengths()
    said = f"{int(np.median(lengths)):,} in the median, {lengths.max():,} in the longest"
    documents = [histogram("Tokens of a document", lengths, said), _long_tail(lengths), *_sources(sample, lengths)]
    return [
        Section("Documents", f"From {sample.said()}.", present(documents)),
        _tokens(sample),
        Section(
            "Passages", "The text as a model meets it: the end of a document, and the next one.", [_passages(sample)]
        ),
    ]


def _long_tail(lengths: Any) -> Any:
    """Lengths by powers of two: documents of very different lengths fit on one axis."""
    powers = Counter(int(length).bit_length() for length in lengths.tolist())
    names = [f"{1 << (k - 1):,} to {(1 << k) - 1:,}" if k > 1 else str(k) for k in sorted(powers)]
    return Bars("Documents by length", names, [float(powers[k]) for k in sorted(powers)], "tokens, doubling")


def _sources(sample: Sample, lengths: Any) -> list[Any]:
    column = sample.store.layout.columns.get("source")
    if column is None or column.dtype not in ("dictionary", "string"):
        return []
    folders: dict[str, float] = defaultdict(float)
    endings: dict[str, float] = defaultdict(float)
    for source, length in zip(sample.column("source").tolist(), lengths.tolist(), strict=True):
        folder, _, name = str(source).rpartition("/")
        folders[folder] += length
        ending = name.rpartition(".")[2]
        endings[f".{ending}" if "." in name else "(no ending)"] += length
    note = "" if sample.num_records == sample.store.num_records else "in the sample"
    shown, shared = _short(folders)
    where = ", ".join(filter(None, (f"below {shared}" if shared else "", note)))
    return [bars("Tokens by folder", shown, where), bars("Tokens by file ending", endings, note)]


def _short(folders: dict[str, float]) -> tuple[dict[str, float], str]:
    """The totals by folder, without the folder that all share, and that folder.

    >>> _short({"home/a/b": 1, "home/a": 2, "home/c": 3})
    ({'a/b': 1, 'a': 2, 'c': 3}, 'home')
    """
    parts = {name: name.split("/") for name in folders}
    depth = 0
    while len(parts) > 1 and len({tuple(each[: depth + 1]) for each in parts.values()}) == 1:
        depth += 1
    shared = "/".join(next(iter(parts.values()))[:depth]) if parts else ""
    own = "." if shared else "(no folder)"
    return {"/".join(parts[name][depth:]) or own: total for name, total in folders.items()}, shared


def _tokens(sample: Sample) -> Section:
    counts: Counter[int] = Counter()
    most = max(1, ALL_TOKENS // MOST_TOKENS // sample.num_contents)
    for piece in sample.pieces:
        starts, stops = piece.store.record_spans()
        for record in piece.contents.tolist():
            for first, last in _pieces(int(starts[record]), int(stops[record]), most):
                ids, times = np.unique(piece.store.columns["tokens"][first:last], return_counts=True)
                counts.update(dict(zip(ids.tolist(), times.tolist(), strict=True)))
    total = counts.total()
    common = counts.most_common(COMMON)
    has_texts = sample.store.manifest is not None and sample.store.manifest.tokenizer is not None
    names = [f"{id_}  {decode(sample.store, [id_])!r}" if has_texts else str(id_) for id_, _ in common]
    about = (
        f"From at most {most * MOST_TOKENS:,} tokens of each of {sample.num_contents:,} of {sample.store.num_records:,} documents: "
        f"{total:,} tokens with {len(counts):,} different ids."
    )
    tens = Counter(len(str(count)) for count in counts.values() if count > 1)
    often = {"once": list(counts.values()).count(1), **{_tens(digits): tens[digits] for digits in sorted(tens)}}
    rare = Bars(
        "How often an id occurs", list(often), [float(ids) for ids in often.values()], "times, and number of ids"
    )
    blocks = [
        Bars(
            "The most frequent tokens",
            names,
            [float(count) for _, count in common],
            "id and text" if has_texts else "id",
        )
    ]
    return Section("Tokens", about, [*blocks, rare])


def _pieces(first: int, last: int, most: int) -> list[tuple[int, int]]:
    """Up to so many pieces of a document, from its first tokens to its last ones.

    >>> _pieces(10, 5000, 1), _pieces(0, 5000, 2), _pieces(0, 1_000_000, 3)
    ([(10, 4106)], [(0, 5000)], [(0, 4096), (497952, 502048), (995904, 1000000)])
    """
    if last - first <= most * MOST_TOKENS:
        return [(first, last)]
    starts = np.linspace(first, last - MOST_TOKENS, most).astype(int).tolist()
    return [(start, start + MOST_TOKENS) for start in starts]


def _tens(digits: int) -> str:
    """The counts that have so many digits, in words; 1 has its own.

    >>> _tens(1), _tens(3)
    ('2 to 9', '100 to 999')
    """
    low, high = 10 ** (digits - 1), 10**digits - 1
    return f"{max(low, 2):,} to {high:,}"


def decode(store: Any, ids: Any) -> str:
    """The text of ids, or the ids themselves where the store has no tokenizer."""
    if store.manifest is None or store.manifest.tokenizer is None:
        return " ".join(map(str, np.asarray(ids).tolist()))
    try:
        return str(store.decode(np.asarray(ids)))
    except MillraceError as error:  # such as a tokenizer whose library is not installed
        return f"({error})"


def _passages(sample: Sample) -> Passages:
    found: list[tuple[str, list[str]]] = []
    for piece in sample.pieces:
        store = piece.store
        starts, stops = store.record_spans()
        for record in _spread(piece.contents, -(-SHOWN // len(sample.pieces))):
            first, last = int(starts[record]), int(stops[record])
            before = max(first - BEFORE, int(starts[record - 1])) if record else first
            pieces = [decode(store, store.columns["tokens"][before:first])] if before < first else []
            pieces.append(decode(store, store.columns["tokens"][first : min(last, first + AFTER)]))
            source = f", {store.columns['source'][record]}" if "source" in store.layout.columns else ""
            name = sample.store.shard_name(piece.number)
            found.append((f"document {record:,} of shard {name}{source}, {last - first:,} tokens", pieces))
    return Passages([*found, *_inside(sample, SHOWN - len(found))][:SHOWN])


def _inside(sample: Sample, count: int) -> list[tuple[str, list[str]]]:
    """Places within the longest document read, for stores of few documents, such as one file of tokens."""
    sizes = [
        (int(np.diff(piece.store.record_spans(), axis=0)[0, r]), k, r)
        for k, piece in enumerate(sample.pieces)
        for r in piece.contents.tolist()
    ]
    length, k, record = max(sizes, default=(0, 0, 0))
    if count <= 0 or length < 2 * count * AFTER:
        return []
    piece = sample.pieces[k]
    first = int(piece.store.record_spans()[0][record])
    name = sample.store.shard_name(piece.number)
    places = np.linspace(0, length - AFTER, count + 1).astype(int)[1:].tolist()
    return [
        (
            f"document {record:,} of shard {name}, from its token {place:,}",
            [decode(piece.store, piece.store.columns["tokens"][first + place : first + place + AFTER])],
        )
        for place in places
    ]


def _spread(records: Any, count: int) -> list[int]:
    """Some of the records, from first to last; not the first of a shard, which has no document before it."""
    inner = records[records > 0] if (records > 0).any() else records
    return (
        [int(inner[k]) for k in np.unique(np.linspace(0, len(inner) - 1, count + 2).astype(int)[1:-1])]
        if len(inner)
        else []
    )
