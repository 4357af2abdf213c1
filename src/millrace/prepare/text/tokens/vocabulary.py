"""Chooses the tokenizer of a corpus: by name, from a file, or made from the corpus."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from millrace.errors import ConfigError
from millrace.identity import digest
from millrace.prepare.text.clean.characters import clean, is_utf8
from millrace.prepare.text.clean.long_documents import clean_long
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.framing import read_documents
from millrace.prepare.text.read.html import page_text
from millrace.prepare.text.read.records import Bad
from millrace.prepare.text.read.sources import Part, Source, cut_parts
from millrace.text.bpe import HuggingFaceTokenizer
from millrace.text.breaks import is_long
from millrace.text.load import tokenizer_by_name, tokenizer_from_file
from millrace.text.simple import CharTokenizer
from millrace.text.tokenizer import Tokenizer
from millrace.text.train import check_vocab_size, train_bpe
from millrace.text.words import character_start

CHECK_DOCUMENTS = 200  # on these a fast encoder must give the ids of the slow one
CHECK_PARTS = 50  # from the beginnings of about this many parts
CHECK_BYTES, CHECK_LONGEST = 400_000, 10_000  # of all, of one: the slow one makes 3 MB/s, in 200 times their memory
SHORT = 1 << 20  # a document up to this size is taken whole
TRAIN_BYTES = 64 << 20  # a vocabulary is learnt from this much, from the beginnings of slices all over the corpus
SLICE_BYTES = 8 << 20
SEAL = "vocabulary.hash"


def choose_tokenizer(path: Path, sources: Sequence[Source], parts: Sequence[Part], options: ReadOptions) -> Tokenizer:
    """The tokenizer that ``options.tokenizer`` names; ``path`` may hold one that an interrupted run made."""
    name, is_there = options.tokenizer, is_whole(path)
    if name == "char":
        if is_there:
            return tokenizer_from_file(path.read_bytes(), name)
        return CharTokenizer(c for text in documents(sources, parts, options) for c in set(text.decode()))
    if name.startswith("train:"):
        if is_there:
            return HuggingFaceTokenizer(path.read_bytes(), name, plain_special=True)  # as train_bpe makes it
        return train_bpe(sample(sources, options), _vocab_size(name))
    return tokenizer_by_name(name)


def is_whole(path: Path) -> bool:
    """Whether a vocabulary of an interrupted run agrees with the hash beside it."""
    try:
        return seal_of(path).read_text() == digest(path.read_bytes())
    except (OSError, ValueError):
        return False


def seal_of(path: Path) -> Path:
    return path.with_name(SEAL)


def _vocab_size(name: str) -> int:
    size = name.removeprefix("train:")
    if not (size.isascii() and size.isdigit()):
        raise ConfigError(f"tokenizer {name!r}; expected train:VOCAB, such as train:32000")
    return check_vocab_size(int(size))


def vocabulary_note(name: str) -> str | None:
    """The note for a vocabulary that is made from the corpus, which takes time; None for any other."""
    if name == "char":
        return "the corpus is read once for its characters, then again to be tokenised"
    if name.startswith("train:"):
        _vocab_size(name)
        return f"a vocabulary is learnt first, from up to {TRAIN_BYTES >> 20} MiB of the corpus"
    return None


def file_identity(name: str) -> str | None:
    """A hash of the files of a tokenizer: they must not change between a run and its restart."""
    path = Path(name)
    beside = path.with_suffix(".json")  # the pattern of a .tiktoken file
    contents = [file.read_bytes() for file in (path, beside) if file.is_file()] if path.is_file() else []
    return digest(*contents) if contents else None


def check_encoder(tokenizer: Tokenizer, sources: Sequence[Source], parts: Sequence[Part], options: ReadOptions) -> None:
    """Gives up a fast encoder that differs from the slow one on documents from all over the corpus."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        chosen = parts[:: max(1, len(parts) // CHECK_PARTS)]
        each = -(-CHECK_DOCUMENTS // max(1, len(chosen)))
        texts = [text for part in chosen for text in islice(_beginnings(sources, part, options), each)]
        tokenizer.check([text[: character_start(text, CHECK_BYTES // len(texts))] for text in texts])


def _beginnings(sources: Sequence[Source], part: Part, options: ReadOptions) -> Iterator[bytes]:
    for document in _readable(sources, part, options):
        beginning = document.lstrip()
        if text := _clean(beginning[: character_start(beginning, CHECK_LONGEST)], options):
            yield text


def documents(
    sources: Sequence[Source], parts: Sequence[Part], options: ReadOptions, limit: int | None = None
) -> Iterator[bytes]:
    """Clean documents of the corpus in order; bad ones are left for the parts to report."""
    for part in parts:
        taken = 0
        for document in _readable(sources, part, options):
            stop = len(document) if limit is None else character_start(document, max(limit - taken, SHORT))
            text = _clean(document[:stop], options)
            taken += len(document)
            if text:
                yield text
            if limit is not None and taken >= limit:
                break


def _readable(sources: Sequence[Source], part: Part, options: ReadOptions) -> Iterator[bytes]:
    for piece in part.slices:
        source = sources[piece.source]
        for record in read_documents(source, piece, options):
            if not isinstance(record, Bad):
                with contextlib.suppress(Bad):
                    text = record.text
                    yield page_text(text.decode(errors="replace")).encode() if source.is_page else text


def _clean(document: bytes, options: ReadOptions) -> bytes:
    if is_long(len(document)) and is_utf8(document, 0, len(document)):
        return clean_long(document) if options.normalize else document
    text = document.decode(errors="replace")
    return (clean(text) if options.normalize else text).encode()


def sample(sources: Sequence[Source], options: ReadOptions) -> Iterator[bytes]:
    """Documents from the beginnings of evenly spread slices, however parts are cut."""
    parts = cut_parts(sources, SLICE_BYTES)
    share = max(64 << 10, TRAIN_BYTES // max(1, len(parts)))
    step = max(1, len(parts) * share // TRAIN_BYTES)
    # In an order whose every beginning is spread over the corpus: training may have enough before its end.
    chosen = sorted(parts[::step], key=lambda part: f"{part.number // step:032b}"[::-1])
    return documents(sources, chosen, options, share)
