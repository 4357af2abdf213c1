"""Byte-level BPE: a vocabulary in Hugging Face's ``tokenizer.json``, run by the fastest engine.

An engine other than Hugging Face's tokenizers is used only where it gives the same ids: the vocabulary must convert, and
``check`` compares them on real text.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError
from millrace.lazy import cached_property
from millrace.ragged import Array, Int64s
from millrace.text import breaks
from millrace.text.giga import Engine, GigatokenEngine
from millrace.text.lump import Lump
from millrace.text.merges import MergeEngine, Merges
from millrace.text.ranks import byte_alphabet, fast_engines, joined, own_merges, slower_engines, splitting_pattern
from millrace.text.tokenizer import Encoded, Tokenizer, byte_places, with_ends
from millrace.text.words import LONG_WORD, word_ids

ENGINES = ("millrace", "gigatoken", "tiktoken", "tokenizers")  # fastest first
END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]", "<|im_end|>")


def _with_lengths(arrays: Sequence[Array]) -> tuple[Array, Int64s]:
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    return (np.concatenate(arrays) if len(arrays) else np.zeros(0, np.uint32)), lengths


def as_lists(ids: Array, lengths: Int64s) -> list[list[int]]:
    ends = np.cumsum(lengths).tolist()
    return [ids[start:stop].tolist() for start, stop in zip([0, *ends], ends, strict=False)]


def in_windows(start: int, found: Iterator[tuple[int, Array]]) -> Iterator[Encoded]:
    """The ids of a long word, with the bytes they stand for."""
    try:
        for size, ids in found:
            yield Encoded(start, start + size, ids)
            start += size
    except ValueError as error:
        raise breaks.Uncuttable(
            f"a word of more than {LONG_WORD} characters cannot be encoded: {error}", offset=start
        ) from error


def tokenizers_package(name: str) -> Any:
    """Hugging Face's package, which the tokenizer of this name needs."""
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(f"tokenizer {name!r} needs tokenizers; pip install millrace[text]") from error
    return tokenizers


class Outline(NamedTuple):
    """What encoding needs of a ``tokenizer.json``, in a form that is quickly sent to workers."""

    end: int
    vocab_size: int
    added: Sequence[bytes]  # tokens that are recognised in a text
    pattern: str | None  # that splits words
    merges: Merges | None  # of the core's own engine, where that may be used


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``. Byte-level BPE in the usual forms runs on a faster engine, everything else on tokenizers.

    Of one that ``is_known``, which was loaded before, Hugging Face's own engine is made when it is first needed, which is never
    in most workers. Where its ``outline`` is given, its file is not read before it is needed either.
    """

    kind = "json"

    def __init__(
        self,
        data: bytes,
        name: str,
        end: int | None = None,
        *,
        plain_special: bool = False,
        is_known: bool = False,
        outline: Outline | None = None,
    ) -> None:
        self.name, self._data, self._plain_special = name, data, plain_special
        if not is_known:
            self._backend  # noqa: B018 - what is wrong with it is said here
        self.outline = outline = self._outlined(end) if outline is None else outline
        self.end, self.vocab_size, self._added = outline.end, outline.vocab_size, outline.added
        self._engines = fast_engines(outline.merges, self.vocab_size, self.end, lambda: self._body)
        if os.environ.get("MILLRACE_BPE"):
            self.use(os.environ["MILLRACE_BPE"])

    def _outlined(self, end: int | None) -> Outline:
        vocabulary, added = self._vocabulary(), self._body.get("added_tokens") or []
        found = next((vocabulary[candidate] for candidate in END_NAMES if candidate in vocabulary), None)
        top = max(vocabulary.values(), default=-1)
        if end is None:
            end = top + 1 if found is None else found
        # Added tokens in the text are recognised, as Hugging Face does; gpt2 takes them for plain text, as tiktoken does.
        names = [] if self._plain_special else [token["content"].encode() for token in added]
        return Outline(end, max(top, end) + 1, names, splitting_pattern(self._body), own_merges(self._body))

    @cached_property
    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self._data)
        return body

    @cached_property
    def _backend(self) -> Any:
        package = tokenizers_package(self.name)
        try:
            backend = package.Tokenizer.from_str(self._data.decode())
        except Exception as error:
            raise ConfigError(f"tokenizer {self.name}: not a tokenizer.json ({error})") from error
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self._plain_special
        return backend

    def _vocabulary(self) -> Mapping[str, int]:
        vocabulary = self._body["model"]["vocab"]
        if not isinstance(vocabulary, dict):  # of Unigram a list
            return self._backend.get_vocab(with_added_tokens=True)  # type: ignore[no-any-return]
        return vocabulary | {token["content"]: token["id"] for token in self._body.get("added_tokens") or []}

    @property
    def engine(self) -> str:
        return self._engines[0].name if self._engines else "tokenizers"

    @property
    def _fast(self) -> Engine | None:
        return self._engines[0] if self._engines else None

    def check(self, documents: Sequence[bytes]) -> bool:
        """Compares the fast engines with Hugging Face's on these documents, and gives up those with any other id."""
        plain = [document for document in documents if not self._has_added(document)]
        slow = self._slow(plain) if self._engines else None
        while slow is not None and self._engines:
            try:
                if self._is_same(self._engines[0], plain, slow):
                    return True
            except ValueError:
                pass
            self._give_up()
        return False

    def _give_up(self) -> None:
        """Goes on with the next engine."""
        is_own = isinstance(self._engines.pop(0), MergeEngine)
        if is_own:
            self._engines = slower_engines(self._body, self.vocab_size)

    def _is_same(self, engine: Engine, documents: Sequence[bytes], expected: tuple[Array, Int64s]) -> bool:
        """Whether this engine gives these ids, in each of its ways."""
        if not all(map(np.array_equal, engine.encode_documents(documents), expected)):
            return False
        spaced = self._spaced(engine, documents)
        return spaced is None or all(map(np.array_equal, spaced, with_ends(*expected, self.dtype, self.end)))

    def _spaced(self, engine: Engine | None, documents: Sequence[bytes]) -> tuple[Array, Int64s] | None:
        """By the engines that leave room for the end themselves."""
        if isinstance(engine, MergeEngine):
            return engine.encode_spaced(documents)
        return engine.encode_spaced(documents, self.dtype, self.end) if isinstance(engine, GigatokenEngine) else None

    def use(self, engine: str) -> None:
        """Leaves alone all engines that are faster than this one."""
        allowed = ENGINES[ENGINES.index(engine) :] if engine in ENGINES else ENGINES[-1:]
        while self.engine not in allowed:
            self._give_up()

    def _has_added(self, document: bytes) -> bool:
        return any(token in document for token in self._added)

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        if breaks.any_long(documents):
            return joined([self._whole(document) for document in documents])
        if self._fast is None:
            return self._slow(documents)
        if self._added and any(map(self._has_added, documents)):
            return joined([self._slow([d]) if self._has_added(d) else self._quick([d]) for d in documents])
        return self._quick(documents)

    def encode_spaced(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        text = documents.text if isinstance(documents, Lump) else b"\n".join(documents) if self._added else b""
        is_plain = not any(token in text for token in self._added)
        found = None
        with contextlib.suppress(ValueError):  # one is too long, or more than it can do
            found = self._spaced(self._fast, documents) if is_plain else None
        return self.encode_with_ends(documents) if found is None else found

    def encode_pieces(self, document: bytes) -> Iterator[Encoded]:
        is_plain = not self._has_added(document)
        is_quick = is_plain and self._fast is not None
        pattern = self.outline.pattern if is_plain else None
        for start, stop, is_word in breaks.cut(document, self._quick_lists if is_quick else self._lists, pattern):
            piece = document[start:stop]
            if is_word:
                yield from in_windows(start, self._word(piece) if self._fast is None else self._fast.encode_word(piece))
            else:
                yield Encoded(start, stop, (self._quick if is_quick else self._slow)([piece])[0])

    def _quick(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        """By the fast engine; what that gives up on goes to the slow one."""
        assert self._fast is not None
        try:
            return self._fast.encode_documents(documents)
        except ValueError:
            return joined([self._quick([d]) for d in documents]) if len(documents) > 1 else self._slow(documents)

    def _slow(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        return _with_lengths([np.array(ids, np.uint32) for ids in self._lists([d.decode() for d in documents])])

    def _word(self, word: bytes) -> Iterator[tuple[int, Array]]:
        """As ``Engine.encode_word``, by Hugging Face's engine."""
        assert self._byte_table is not None
        model, letters = self._backend.model, {byte: letter for letter, byte in byte_alphabet().items()}
        sizes = np.zeros(self.vocab_size, np.int64)
        sizes[list(self._byte_table)] = list(map(len, self._byte_table.values()))

        def encode(data: bytes) -> list[int]:
            return [token.id for token in model.tokenize(data.decode("latin-1").translate(letters))]

        for ids in word_ids(word, encode, sizes):
            yield int(sizes[ids].sum()), ids

    def _quick_lists(self, texts: list[str]) -> list[list[int]]:
        return as_lists(*self._quick([text.encode() for text in texts]))

    def _lists(self, texts: list[str]) -> list[list[int]]:
        encode = getattr(self._backend, "encode_batch_fast", self._backend.encode_batch)
        return [encoding.ids for encoding in encode(texts, add_special_tokens=False)]

    def places(self, document: bytes, ids: Array) -> tuple[Int64s, Int64s]:
        if self._byte_table is not None and int(self._sizes(ids).sum()) == len(document):
            return super().places(document, ids)
        # Another make, or an added token that takes white space with it: Hugging Face says which characters.
        found = []
        for start, stop, _ in breaks.cut(document, self._lists):
            text = document[start:stop].decode()
            offsets = self._backend.encode(text, add_special_tokens=False).offsets
            found.append(np.stack(byte_places(text, np.array(offsets, np.int64).reshape(-1, 2))) + start)
        starts, stops = np.concatenate(found, axis=1)
        assert len(starts) == len(ids)
        return starts, stops

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        table = self._byte_table
        if table is None:
            return str(self._backend.decode(list(ids), skip_special_tokens=False)).encode()
        return b"".join(table.get(token, b"") for token in ids)

    @cached_property
    def _byte_table(self) -> dict[int, bytes] | None:
        """The bytes of every id of a byte-level vocabulary, so that decoding is exact also within a character."""
        if self.outline.pattern is None:
            return None
        alphabet = byte_alphabet()
        table = {
            number: bytes(alphabet[c] for c in token)
            for token, number in self._body["model"]["vocab"].items()
            if set(token) <= alphabet.keys()
        }
        return table | {token["id"]: token["content"].encode() for token in self._body.get("added_tokens") or []}

    def to_file(self) -> bytes:
        return self._data
