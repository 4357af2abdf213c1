"""Byte-level BPE: a vocabulary in Hugging Face's ``tokenizer.json`` or as tiktoken ranks, run by the fastest engine.

tiktoken's core encodes many joined documents at once, four times as fast as Hugging Face's tokenizers; gigatoken, where
it is installed, is faster still. An engine is used only where it gives the same ids: the vocabulary must convert, and
``check`` compares them on real text. ``MILLRACE_BPE`` names the fastest engine that may be used.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.lazy import cached_property
from millrace.ragged import Array, Int64s
from millrace.text.giga import Engine, GigatokenEngine
from millrace.text.tokenizer import Tokenizer

# GPT-2's splitting pattern, which Hugging Face's ByteLevel has built in, in the form tiktoken gives it: the
# same pieces, with possessive quantifiers, which cannot backtrack over a long run.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Stands between documents; contains non-characters, and a document that holds it is encoded alone.
SEPARATOR = "\ufdd0\ufdd1<|millrace|>\ufdd1\ufdd0"
END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]", "<|im_end|>")


class RankEngine:
    """tiktoken's core over ranks; ``ids`` maps ranks to the vocabulary's own numbers."""

    name = "tiktoken"

    def __init__(self, pattern: str, ranks: Mapping[bytes, int], ids: Array | None = None) -> None:
        from tiktoken import _tiktoken  # type: ignore[attr-defined]

        self._sizes = np.zeros(max(ranks.values()) + 1, np.int64)
        self._sizes[list(ranks.values())] = [len(token) for token in ranks]
        self._separator = max(ranks.values()) + 1
        self._core = _tiktoken.CoreBPE(dict(ranks), {SEPARATOR: self._separator}, pattern)
        self._ids = ids

    def sizes(self, vocab_size: int) -> Array:
        """The number of bytes of each of the vocabulary's ids; of others as many as no text has."""
        found = np.full(vocab_size, 1 << 40, np.int64)
        found[np.arange(len(self._sizes)) if self._ids is None else self._ids] = self._sizes
        return found

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        """ValueError where the pattern leaves out text, or gives up on it: a run of a million spaces is too long."""
        ranks, lengths = self._ranks(documents)
        if self._sizes[ranks].sum() != sum(map(len, documents)):
            raise ValueError("its pattern leaves out some of the text")
        return (ranks if self._ids is None else self._ids[ranks]), lengths

    def _ranks(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        texts = [document.decode() for document in documents]
        if any(SEPARATOR in text for text in texts):
            parts = [self._encode([text]) if SEPARATOR not in text else self._plain(text) for text in texts]
            return _joined(parts)
        return self._encode(texts) if texts else (np.zeros(0, np.uint32), np.zeros(0, np.int64))

    def _encode(self, texts: Sequence[str]) -> tuple[Array, Int64s]:
        buffer = self._core.encode_to_tiktoken_buffer(SEPARATOR.join(texts), {SEPARATOR})
        ids = np.frombuffer(buffer, np.uint32)
        ends = np.flatnonzero(ids == self._separator)
        lengths = np.diff(np.concatenate(([-1], ends, [len(ids)]))) - 1
        return np.delete(ids, ends), lengths

    def _plain(self, text: str) -> tuple[Array, Int64s]:
        ids = np.frombuffer(self._core.encode_to_tiktoken_buffer(text, set()), np.uint32)
        return ids, np.array([len(ids)], np.int64)


def _joined(parts: Sequence[tuple[Array, Int64s]]) -> tuple[Array, Int64s]:
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([lengths for _, lengths in parts])


class TiktokenTokenizer(Tokenizer):
    """A ``.tiktoken`` vocabulary: ranks and the pattern that belongs to them."""

    kind = "tiktoken"

    def __init__(self, name: str, pattern: str, ranks: Mapping[bytes, int], special: Mapping[str, int]) -> None:
        self.name, self._pattern, self._ranks, self._special = name, pattern, dict(ranks), dict(special)
        end = next((special[candidate] for candidate in END_NAMES if candidate in special), None)
        top = max([*self._ranks.values(), *special.values()])
        self.end = top + 1 if end is None else end
        self.vocab_size = max(top, self.end) + 1
        self._bytes = {rank: token for token, rank in self._ranks.items()}
        self._bytes |= {number: token.encode() for token, number in special.items()}

    @cached_property
    def _engine(self) -> RankEngine:
        return RankEngine(self._pattern, self._ranks)

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        try:
            return self._engine.encode_documents(documents)
        except ImportError as error:
            raise ConfigError(f"tokenizer {self.name} needs tiktoken; pip install millrace[text]") from error
        except ValueError as error:
            raise ConfigError(f"tokenizer {self.name} cannot encode this: {error}") from error

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._bytes.get(token, b"") for token in ids)

    def to_file(self) -> bytes:
        lines = "\n".join(
            f"{base64.b64encode(token).decode()} {rank}"
            for token, rank in sorted(self._ranks.items(), key=lambda item: item[1])
        )
        body = {
            "millrace_tokenizer": "tiktoken",
            "name": self.name,
            "pattern": self._pattern,
            "special": self._special,
            "ranks": lines,
        }
        return json.dumps(body).encode()


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``. Byte-level BPE in the usual forms runs on a faster engine, everything else on tokenizers."""

    kind = "json"

    def __init__(self, data: bytes, name: str, end: int | None = None, *, plain_special: bool = False) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise ConfigError(f"tokenizer {name!r} needs tokenizers; pip install millrace[text]") from error
        self.name, self._data = name, data
        try:
            self._backend = Backend.from_str(data.decode())
            self._body = json.loads(data)
        except Exception as error:
            raise ConfigError(f"tokenizer {name}: not a tokenizer.json ({error})") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = plain_special
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        found = next((vocabulary[candidate] for candidate in END_NAMES if candidate in vocabulary), None)
        top = max(vocabulary.values(), default=-1)
        self.end = end if end is not None else (top + 1 if found is None else found)
        self.vocab_size = max(top, self.end) + 1
        # Added tokens in the text are recognised, as Hugging Face does; gpt2 takes them for plain text, as tiktoken does.
        self._added = [] if plain_special else [t["content"].encode() for t in self._body.get("added_tokens") or []]
        self._engines = _engines(self._body, self.vocab_size)  # fastest first
        if os.environ.get("MILLRACE_BPE"):
            self.use(os.environ["MILLRACE_BPE"])

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
                if all(map(np.array_equal, self._engines[0].encode_documents(plain), slow)):
                    return True
            except ValueError:
                pass
            del self._engines[0]
        return False

    def use(self, engine: str) -> None:
        """Leaves alone all engines that are faster than this one."""
        while self.engine not in (engine, "tokenizers"):
            del self._engines[0]

    def give_up_fast(self) -> None:
        """From here on everything runs on Hugging Face's tokenizers."""
        self.use("tokenizers")

    def _has_added(self, document: bytes) -> bool:
        return any(token in document for token in self._added)

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        if self._fast is None:
            return self._slow(documents)
        if self._added and any(map(self._has_added, documents)):
            return _joined([self._slow([d]) if self._has_added(d) else self._quick([d]) for d in documents])
        return self._quick(documents)

    def _quick(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        """By the fast engine; what that gives up on goes to the slow one."""
        assert self._fast is not None
        try:
            return self._fast.encode_documents(documents)
        except ValueError:
            return self._slow(documents) if len(documents) == 1 else _joined([self._quick([d]) for d in documents])

    def _slow(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        encode = getattr(self._backend, "encode_batch_fast", self._backend.encode_batch)
        found = encode([document.decode() for document in documents], add_special_tokens=False)
        arrays = [np.array(encoding.ids, np.uint32) for encoding in found]
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        return (np.concatenate(arrays) if arrays else np.zeros(0, np.uint32)), lengths

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        table = self._byte_table
        if table is None:
            return str(self._backend.decode(list(ids), skip_special_tokens=False)).encode()
        return b"".join(table.get(token, b"") for token in ids)

    @cached_property
    def _byte_table(self) -> dict[int, bytes] | None:
        """The bytes of every id of a byte-level vocabulary, so that decoding is exact also within a character."""
        if _pattern(self._body) is None:
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


def byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


def _pattern(body: Mapping[str, Any]) -> str | None:
    """The splitting pattern of a byte-level tokenizer, or None where it is of another make."""
    if (body.get("model") or {}).get("type") != "BPE" or body.get("normalizer") is not None:
        return None
    first = body.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", []) if first.get("type") == "Sequence" else [first]
    kinds = [step.get("type") for step in steps]
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if kinds == ["ByteLevel"] and last.get("use_regex", True):
        return GPT2_PATTERN
    if kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):
        split = steps[0]
        pattern = (split.get("pattern") or {}).get("Regex")
        if split.get("behavior") == "Isolated" and not split.get("invert") and pattern:
            return str(pattern)
    return None


def _engines(body: Mapping[str, Any], vocab_size: int) -> list[Engine]:
    """What may encode instead of Hugging Face's tokenizers, fastest first."""
    ranks = _rank_engine(body)
    if ranks is None:
        return []
    if _pattern(body) == GPT2_PATTERN and os.environ.get("MILLRACE_BPE", GigatokenEngine.name) == GigatokenEngine.name:
        try:
            return [GigatokenEngine(body, SEPARATOR, ranks, ranks.sizes(vocab_size)), ranks]
        except (ImportError, ValueError):
            pass
    return [ranks]


def _rank_engine(body: Mapping[str, Any]) -> RankEngine | None:
    """tiktoken's core over the merges of a tokenizer.json; None where it does not convert or is not installed."""
    pattern, model = _pattern(body), body["model"]
    unusual = (
        model.get("dropout")
        or model.get("unk_token")
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
    )
    if pattern is None or unusual or model.get("ignore_merges"):
        return None
    alphabet, vocabulary = byte_alphabet(), model["vocab"]
    if not alphabet.keys() <= vocabulary.keys():
        return None
    ranks = {bytes([byte]): rank for rank, (_, byte) in enumerate(sorted(alphabet.items(), key=lambda item: item[1]))}
    ids = [vocabulary[character] for character, _ in sorted(alphabet.items(), key=lambda item: item[1])]
    pairs = [merge if isinstance(merge, (list, tuple)) else merge.split(" ") for merge in model["merges"]]
    tokens = [left + right for left, right in pairs]
    if not set("".join(tokens)) <= alphabet.keys():
        return None
    # Translated by a table and encoded at once: 95 ms for 50,000 merges, a loop over the characters 130.
    to_byte = {ord(character): byte for character, byte in alphabet.items()}
    for joined in tokens:
        if joined not in vocabulary:
            return None
        token = joined.translate(to_byte).encode("latin-1")
        if token not in ranks:
            ranks[token] = len(ids)
            ids.append(vocabulary[joined])
    try:
        return RankEngine(pattern, ranks, np.array(ids, np.uint32))
    except (ImportError, ValueError):
        return None
