"""Trains a byte-level BPE vocabulary on documents of the corpus."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from millrace.distribution import install_command
from millrace.errors import ConfigError
from millrace.text.bpe import HuggingFaceTokenizer
from millrace.text.kinds import GPT2_PATTERN
from millrace.text.words import character_start, words_of

TEXT_BYTES = 64 << 10  # of one text for the trainer: it buffers 256, and needs 140 bytes for every byte
WORD_CHARS = 1 << 10  # longer words are cut, since each merge looks at them again
# Of different words, which the trainer keeps: 130 bytes for every byte (64 MiB of code have 1.1 MiB).
DISTINCT_BYTES = 4 << 20
WORD = re.compile(rb"[A-Za-z]+|[0-9]+|[\x80-\xff]+|[^\sA-Za-z0-9\x80-\xff]+")  # nearly
SPACE = re.compile(rb"(?<=[!-~])[ \n]")  # here GPT-2's pattern always begins a word


def check_vocab_size(vocab_size: int) -> int:
    if not 257 <= vocab_size <= 1 << 20:
        raise ConfigError(f"train:{vocab_size}; a byte-level vocabulary has 257 to {1 << 20} ids")
    return vocab_size


def train_bpe(documents: Iterable[bytes], vocab_size: int) -> HuggingFaceTokenizer:
    """A vocabulary of ``vocab_size`` ids: ``<|endoftext|>``, the 256 bytes, and merges in the order they were learnt."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ConfigError(f"tokenizer 'train:{vocab_size}' needs tokenizers; {install_command('text')}") from error
    check_vocab_size(vocab_size)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    options: Any = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **options)
    backend.train_from_iterator(_texts(documents), trainer=trainer)
    # A document that names the end-of-document token must not end there.
    return HuggingFaceTokenizer(backend.to_str().encode(), f"train:{vocab_size}", plain_special=True)


def _texts(documents: Iterable[bytes]) -> Iterator[str]:
    """The documents in texts of whole words, until their different words fill the memory allowed."""
    known: set[int] = set()
    num_bytes = 0
    for document in documents:
        for text in _split(document):
            new = {word for word in set(WORD.findall(text)) if hash(word) not in known}
            known.update(map(hash, new))
            num_bytes += sum(map(len, new))
            if num_bytes > DISTINCT_BYTES:
                return
            yield text.decode()


def _split(document: bytes) -> Iterator[bytes]:
    """Texts with the words of the document, but for very long ones."""
    start = 0
    while len(document) - start > 2 * TEXT_BYTES:
        space = SPACE.search(document, start + TEXT_BYTES, start + 2 * TEXT_BYTES)
        if space is None:
            text = document[start : character_start(document, start + TEXT_BYTES)].decode()
            for group in _groups(text):
                yield group
                start += len(group)
        else:
            yield document[start : space.start()]
            start = space.start()
    yield document[start:]


def _groups(text: str) -> Iterator[bytes]:
    """Words of a text that goes on, many together, and stretches of long words."""
    words = words_of(GPT2_PATTERN)
    ends = (words.ends(text) if words is not None else None) or []
    while ends and text[ends[-1] - 1].isspace():  # white space makes other words at the end of a text
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
