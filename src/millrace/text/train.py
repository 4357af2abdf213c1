"""Trains a byte-level BPE vocabulary on documents of the corpus itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from millrace.errors import ConfigError
from millrace.text.bpe import HuggingFaceTokenizer
from millrace.text.kinds import GPT2_PATTERN
from millrace.text.words import character, words_of

PIECE_BYTES = 64 << 10  # given to the trainer at once: it buffers 256, and needs 140 bytes for every byte it splits
WORD_CHARS = 1 << 10  # longer words are cut, since each merge looks at all of them again
DISTINCT_BYTES = (
    4 << 20
)  # of different words, which the trainer keeps: 130 bytes for every byte (64 MiB of code have 1.1)
WORD = re.compile(rb"[A-Za-z]+|[0-9]+|[\x80-\xff]+|[^\sA-Za-z0-9\x80-\xff]+")  # nearly
SPACE = re.compile(rb"(?<=[!-~])[ \n]")  # at which GPT-2's pattern always begins a word


def check_vocab_size(vocab_size: int) -> int:
    if not 257 <= vocab_size <= 1 << 20:
        raise ConfigError(f"train:{vocab_size}; a byte-level vocabulary has 257 to {1 << 20} ids")
    return vocab_size


def train_bpe(documents: Iterable[bytes], vocab_size: int) -> HuggingFaceTokenizer:
    """A vocabulary of ``vocab_size`` ids: ``<|endoftext|>``, the 256 bytes, and merges in the order they were learnt."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ConfigError(f"tokenizer 'train:{vocab_size}' needs tokenizers; pip install millrace[text]") from error
    check_vocab_size(vocab_size)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_bounded(documents), trainer=trainer)
    # The name of the end in a text is text: else a document could make ends of its own.
    return HuggingFaceTokenizer(backend.to_str().encode(), f"train:{vocab_size}", plain_special=True)


def _bounded(documents: Iterable[bytes]) -> Iterator[str]:
    """The documents in pieces of whole words, until their different words are as many as memory should hold."""
    seen: set[int] = set()
    num_bytes = 0
    for document in documents:
        for piece in _pieces(document):
            new = {word for word in set(WORD.findall(piece)) if hash(word) not in seen}
            seen.update(map(hash, new))
            num_bytes += sum(map(len, new))
            if num_bytes > DISTINCT_BYTES:
                return
            yield piece.decode()


def _pieces(document: bytes) -> Iterator[bytes]:
    """Pieces whose words are those of the document, but for very long ones."""
    start = 0
    while len(document) - start > 2 * PIECE_BYTES:
        space = SPACE.search(document, start + PIECE_BYTES, start + 2 * PIECE_BYTES)
        if space is None:
            text = document[start : character(document, start + PIECE_BYTES)].decode()
            for piece in _groups(text):
                yield piece
                start += len(piece)
        else:
            yield document[start : space.start()]
            start = space.start()
    yield document[start:]


def _groups(text: str) -> Iterator[bytes]:
    """Words of a text that goes on, many together, and pieces of long ones."""
    words = words_of(GPT2_PATTERN)
    ends = (words.ends(text) if words is not None else None) or []
    while ends and text[ends[-1] - 1].isspace():  # at the end of a text white space makes other words
        ends.pop()
    ends = ends or [len(text)]
    begin = start = 0
    for end in ends:
        if end - start > WORD_CHARS:
            yield text[begin:start].encode()
            for begin in range(start, end, WORD_CHARS):
                yield text[begin : min(end, begin + WORD_CHARS)].encode()
            begin = end
        start = end
    yield text[begin:start].encode()
