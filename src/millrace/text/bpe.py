"""Byte-level BPE: a vocabulary in Hugging Face's ``tokenizer.json``, run by the fastest encoder.

Another encoder than Hugging Face's tokenizers is used only where it gives the same ids: the vocabulary
must convert, and ``check`` compares them on real text.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from millrace.distribution import install_command
from millrace.errors import ConfigError
from millrace.lazy import cached_property
from millrace.ragged import Array, Int64s
from millrace.text import breaks
from millrace.text.documents import Documents
from millrace.text.merges import MergeEncoder, Merges
from millrace.text.ranks import byte_alphabet, core_merges, fast_encoder, rank_encoder, splitting_pattern
from millrace.text.tokenizer import Encoder, SectionIds, Tokenizer, add_ends, byte_places, join_ids, pack_ids
from millrace.text.words import LONG_WORD, word_ids

ENCODERS = ("millrace", "tiktoken", "tokenizers")  # fastest first
END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]", "<|im_end|>")


def as_lists(ids: Array, lengths: Int64s) -> list[list[int]]:
    """The ids of each document."""
    ends = np.cumsum(lengths).tolist()
    return [ids[start:stop].tolist() for start, stop in zip([0, *ends], ends, strict=False)]


def word_sections(start: int, parts: Iterator[tuple[int, Array]]) -> Iterator[SectionIds]:
    """The ids of a long word, with the bytes they stand for."""
    try:
        for size, ids in parts:
            yield SectionIds(start, start + size, ids)
            start += size
    except ValueError as error:
        raise breaks.Uncuttable(
            f"a word of more than {LONG_WORD} characters cannot be encoded: {error}", offset=start
        ) from error


def tokenizers_package(name: str) -> Any:
    """Hugging Face's package; an error names the tokenizer that needs it."""
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(f"tokenizer {name!r} needs tokenizers; {install_command('text')}") from error
    return tokenizers


class TokenizerOutline(NamedTuple):
    """What encoding needs from a ``tokenizer.json``, in a form that is quickly sent to workers."""

    end: int
    vocab_size: int
    added: Sequence[bytes]  # tokens that are recognised in a text
    pattern: str | None  # splits text into words
    merges: Merges | None  # for the core's encoder, where it may be used


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``. The usual byte-level BPE runs on a faster encoder, everything else on tokenizers.

    ``is_known`` says that it was loaded before: then Hugging Face's encoder is made when it is first
    needed, which is never in most workers. With an ``outline``, the file is read only when it is needed.
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
        outline: TokenizerOutline | None = None,
    ) -> None:
        self.name, self._data, self._plain_special = name, data, plain_special
        if not is_known:
            self._backend  # noqa: B018 - refuses a broken file
        self.outline = outline = self._make_outline(end) if outline is None else outline
        self.end, self.vocab_size, self._added = outline.end, outline.vocab_size, outline.added
        self._fast = fast_encoder(outline.merges, self.vocab_size, self.end, lambda: self._body)
        if os.environ.get("MILLRACE_BPE"):
            self.use(os.environ["MILLRACE_BPE"])

    def _make_outline(self, end: int | None) -> TokenizerOutline:
        vocabulary, added = self._vocabulary(), self._body.get("added_tokens") or []
        top = max(vocabulary.values(), default=-1)
        if end is None:
            end = next((vocabulary[name] for name in END_NAMES if name in vocabulary), top + 1)
        # Added tokens in a text are recognised, as by Hugging Face; for gpt2 they are plain text, as for tiktoken.
        names = [] if self._plain_special else [token["content"].encode() for token in added]
        return TokenizerOutline(end, max(top, end) + 1, names, splitting_pattern(self._body), core_merges(self._body))

    @cached_property
    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self._data)
        return body

    @cached_property
    def _backend(self) -> Any:
        package = tokenizers_package(self.name)
        try:
            with self._panics_as_errors():
                backend = package.Tokenizer.from_str(self._data.decode())
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"tokenizer {self.name}: not a tokenizer.json ({error})") from error
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self._plain_special
        return backend

    @contextlib.contextmanager
    def _panics_as_errors(self) -> Iterator[None]:
        """Around calls of Hugging Face's encoder, which ends some errors by a panic, as of a pattern that takes too long."""
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # which is no Exception, and has no name to import
                raise
            raise ConfigError(
                f"tokenizer {self.name} failed in Hugging Face's encoder ({error}); correct its tokenizer.json, such as a pattern "
                "that takes too long, or take another tokenizer"
            ) from None

    def _vocabulary(self) -> Mapping[str, int]:
        vocabulary = self._body["model"]["vocab"]
        if not isinstance(vocabulary, dict):  # Unigram has a list
            return self._backend.get_vocab(with_added_tokens=True)  # type: ignore[no-any-return]
        return vocabulary | {token["content"]: token["id"] for token in self._body.get("added_tokens") or []}

    @property
    def encoder(self) -> str:
        """The name of the encoder in use."""
        return "tokenizers" if self._fast is None else self._fast.name

    def check(self, documents: Sequence[bytes]) -> bool:
        """Compares the fast encoder with Hugging Face's; one that gives other ids is replaced by the next."""
        plain = [document for document in documents if not self._has_added(document)]
        expected = self._slow(plain) if self._fast is not None else None
        while expected is not None and self._fast is not None:
            try:
                if self._is_same(self._fast, plain, expected):
                    return True
            except ValueError:
                pass
            self._give_up()
        return False

    def _give_up(self) -> None:
        """Changes to the next encoder."""
        self._fast = rank_encoder(self._body) if isinstance(self._fast, MergeEncoder) else None

    def _is_same(self, encoder: Encoder, documents: Sequence[bytes], expected: tuple[Array, Int64s]) -> bool:
        if not all(map(np.array_equal, encoder.encode_documents(documents), expected)):
            return False
        if not isinstance(encoder, MergeEncoder):
            return True
        spaced = encoder.encode_spaced(documents)
        return all(map(np.array_equal, spaced, add_ends(*expected, self.dtype, self.end)))

    def use(self, encoder: str) -> None:
        """Gives up all encoders that are faster than this one."""
        allowed = ENCODERS[ENCODERS.index(encoder) :] if encoder in ENCODERS else ENCODERS[-1:]
        while self.encoder not in allowed:
            self._give_up()

    def _has_added(self, document: bytes) -> bool:
        return any(token in document for token in self._added)

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        documents = Documents.of(documents)
        if breaks.any_long(documents):
            return self._encode_long(documents)
        if self._fast is None:
            return self._slow(documents)
        if self._added and any(map(self._has_added, documents)):
            return join_ids([self._slow([d]) if self._has_added(d) else self._quick([d]) for d in documents])
        return self._quick(documents)

    def encode_spaced(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        documents = Documents.of(documents)
        if isinstance(self._fast, MergeEncoder) and not self._has_added(documents.text):
            with contextlib.suppress(ValueError):  # a document is too long
                return self._fast.encode_spaced(documents)
        return self.encode_with_ends(documents)

    def encode_sections(self, document: bytes) -> Iterator[SectionIds]:
        is_plain = not self._has_added(document)
        is_quick = is_plain and self._fast is not None
        pattern = self.outline.pattern if is_plain else None
        for start, stop, is_word in breaks.cut(document, self._quick_lists if is_quick else self._lists, pattern):
            section = document[start:stop]
            if is_word:
                encode = self._encode_word if self._fast is None else self._fast.encode_word
                yield from word_sections(start, encode(section))
            else:
                yield SectionIds(start, stop, (self._quick if is_quick else self._slow)([section])[0])

    def _quick(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        """By the fast encoder; documents that it gives up on go to the slow one."""
        assert self._fast is not None
        try:
            return self._fast.encode_documents(documents)
        except ValueError:
            return join_ids([self._quick([d]) for d in documents]) if len(documents) > 1 else self._slow(documents)

    def _slow(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        return pack_ids(self._lists([document.decode() for document in documents]))

    def _encode_word(self, word: bytes) -> Iterator[tuple[int, Array]]:
        """``Encoder.encode_word`` by Hugging Face's encoder."""
        assert self._byte_table is not None
        model, letters = self._backend.model, {byte: letter for letter, byte in byte_alphabet().items()}
        sizes = np.zeros(self.vocab_size, np.int64)
        sizes[list(self._byte_table)] = list(map(len, self._byte_table.values()))

        def encode(data: bytes) -> list[int]:
            with self._panics_as_errors():
                return [token.id for token in model.tokenize(data.decode("latin-1").translate(letters))]

        for ids in word_ids(word, encode, sizes):
            yield int(sizes[ids].sum()), ids

    def _quick_lists(self, texts: list[str]) -> list[list[int]]:
        return as_lists(*self._quick([text.encode() for text in texts]))

    def _lists(self, texts: list[str]) -> list[list[int]]:
        encode = getattr(self._backend, "encode_batch_fast", self._backend.encode_batch)
        with self._panics_as_errors():
            return [encoding.ids for encoding in encode(texts, add_special_tokens=False)]

    def places(self, document: bytes, ids: Array) -> tuple[Int64s, Int64s]:
        if self._byte_table is not None and int(self._sizes(ids).sum()) == len(document):
            return super().places(document, ids)
        # Not byte-level, or an added token takes white space with it: Hugging Face knows the characters.
        found = []
        for start, stop, _ in breaks.cut(document, self._lists):
            text = document[start:stop].decode()
            with self._panics_as_errors():
                offsets = self._backend.encode(text, add_special_tokens=False).offsets
            found.append(np.stack(byte_places(text, np.array(offsets, np.int64).reshape(-1, 2))) + start)
        starts, stops = np.concatenate(found, axis=1)
        assert len(starts) == len(ids)
        return starts, stops

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        table = self._byte_table
        if table is None:
            with self._panics_as_errors():
                return str(self._backend.decode(list(ids), skip_special_tokens=False)).encode()
        return b"".join(table.get(token, b"") for token in ids)

    @cached_property
    def _byte_table(self) -> dict[int, bytes] | None:
        """The bytes of every id of a byte-level vocabulary: exact also within a character."""
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
