"""Chooses the tokenizer of a corpus: by name, by file, or made from the corpus itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from millrace.errors import ConfigError
from millrace.identity import digest
from millrace.prepare.text.clean.characters import clean
from millrace.prepare.text.clean.long_documents import check_utf8, clean_long, is_long
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.framing import Bad, read_documents
from millrace.prepare.text.read.html import page_text
from millrace.prepare.text.read.sources import Part, Source, cut_parts
from millrace.text.bpe import HuggingFaceTokenizer
from millrace.text.load import tokenizer_by_name, tokenizer_from_file
from millrace.text.simple import CharTokenizer
from millrace.text.tokenizer import Tokenizer
from millrace.text.train import check_vocab_size, train_bpe
from millrace.text.words import character

CHECK_DOCUMENTS = 200  # on which a fast engine must give the ids of the slow one
CHECK_PARTS = 50  # from the beginnings of about this many parts
CHECK_BYTES, CHECK_LONGEST = 400_000, 10_000  # of all, of one: the slow one makes 3 MB/s, in 200 times their memory
SHORT = 1 << 20  # a document of which less is left of what is asked for is taken whole
TRAIN_BYTES = 64 << 20  # a vocabulary is learnt from the beginnings of slices spread over the corpus, this much in all
SLICE_BYTES = 8 << 20
SEAL = "vocabulary.hash"


def choose_tokenizer(kept: Path, sources: Sequence[Source], parts: Sequence[Part], options: ReadOptions) -> Tokenizer:
    """The tokenizer ``options.tokenizer`` names; one that was made in an interrupted run is taken from ``kept``."""
    name, is_kept = options.tokenizer, is_whole(kept)
    if name == "char":
        if is_kept:
            return tokenizer_from_file(kept.read_bytes(), name)
        return CharTokenizer(
            character for text in documents(sources, parts, options) for character in set(text.decode())
        )
    if name.startswith("train:"):
        if is_kept:
            return HuggingFaceTokenizer(kept.read_bytes(), name, plain_special=True)  # as train_bpe makes it
        return train_bpe(sample(sources, options), _vocab_size(name))
    return tokenizer_by_name(name)


def is_whole(kept: Path) -> bool:
    """Whether a vocabulary of an interrupted run is what was written, by the hash beside it."""
    try:
        return seal_of(kept).read_text() == digest(kept.read_bytes())
    except (OSError, ValueError):
        return False


def seal_of(kept: Path) -> Path:
    return kept.with_name(SEAL)


def _vocab_size(name: str) -> int:
    size = name.removeprefix("train:")
    if not (size.isascii() and size.isdigit()):
        raise ConfigError(f"tokenizer {name!r}; expected train:VOCAB, such as train:32000")
    return check_vocab_size(int(size))


def told_of(name: str) -> str | None:
    """What to say before a vocabulary is made of the corpus, which takes its time; one that cannot be is refused."""
    if name == "char":
        return "the corpus is read once for its characters, then again to be tokenised"
    if name.startswith("train:"):
        _vocab_size(name)
        return f"a vocabulary is learnt first, of up to {TRAIN_BYTES >> 20} MiB of the corpus"
    return None


def file_identity(name: str) -> str | None:
    """A hash of the files a tokenizer's name stands for: they must not change between a run and its restart."""
    path = Path(name)
    beside = path.with_suffix(".json")  # the pattern of a .tiktoken file
    found = [file.read_bytes() for file in (path, beside) if file.is_file()] if path.is_file() else []
    return digest(*found) if found else None


def check_engine(tokenizer: Tokenizer, sources: Sequence[Source], parts: Sequence[Part], options: ReadOptions) -> None:
    """A fast engine that differs from the slow one on documents from all over the corpus is not used."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        chosen = parts[:: max(1, len(parts) // CHECK_PARTS)]
        each = -(-CHECK_DOCUMENTS // max(1, len(chosen)))
        found = [text for part in chosen for text in islice(_beginnings(sources, part, options), each)]
        tokenizer.check([text[: character(text, CHECK_BYTES // len(found))] for text in found])


def _beginnings(sources: Sequence[Source], part: Part, options: ReadOptions) -> Iterator[bytes]:
    for document in _readable(sources, part, options):
        beginning = document.lstrip()
        if text := _usable(beginning[: character(beginning, CHECK_LONGEST)], options):
            yield text


def documents(
    sources: Sequence[Source], parts: Sequence[Part], options: ReadOptions, limit: int | None = None
) -> Iterator[bytes]:
    """Cleaned documents of the corpus in order; what cannot be read is left for the parts to report."""
    for part in parts:
        taken = 0
        for document in _readable(sources, part, options):
            text = _usable(document if limit is None else _beginning(document, limit - taken), options)
            taken += len(document)
            if text:
                yield text
            if limit is not None and taken >= limit:
                break


def _readable(sources: Sequence[Source], part: Part, options: ReadOptions) -> Iterator[bytes]:
    for unit in part.units:
        source = sources[unit.source]
        for _, document in read_documents(source, unit, options):
            if not isinstance(document, Bad):
                with contextlib.suppress(Bad):
                    yield page_text(document.decode(errors="replace")).encode() if source.is_page else document


def _beginning(document: bytes, limit: int) -> bytes:
    return document[: character(document, max(limit, SHORT))]


def _usable(document: bytes, options: ReadOptions) -> bytes:
    if is_long(document):
        try:
            check_utf8(document)
            return clean_long(document) if options.normalize else document
        except UnicodeDecodeError:
            pass
    text = document.decode(errors="replace")
    return (clean(text) if options.normalize else text).encode()


def sample(sources: Sequence[Source], options: ReadOptions) -> Iterator[bytes]:
    """Documents from the beginnings of slices, of evenly spread ones where there are many; however parts are cut."""
    parts = cut_parts(sources, SLICE_BYTES)
    share = max(64 << 10, TRAIN_BYTES // max(1, len(parts)))
    step = max(1, len(parts) * share // TRAIN_BYTES)
    # In an order of which every beginning is spread over the corpus, since training may have enough before its end.
    chosen = sorted(parts[::step], key=lambda part: f"{part.number // step:032b}"[::-1])
    return documents(sources, chosen, options, share)
