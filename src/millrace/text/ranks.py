"""Encoders of byte-level BPE that are faster than Hugging Face's tokenizers, for a ``tokenizer.json``.

tiktoken's core takes many documents at once and is four times as fast; the C core's encoder
(``merges.py``) is ten times as fast again. ``MILLRACE_BPE`` names the fastest that may be used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from millrace.native import core
from millrace.ragged import Array, Int64s
from millrace.text.kinds import GPT2_PATTERN, ranks_package
from millrace.text.merges import MergeEncoder, Merges, merges_of
from millrace.text.tokenizer import Encoder, join_ids
from millrace.text.words import word_ids

# Put between documents. It has non-characters; a document that holds it is encoded alone.
SEPARATOR = "\ufdd0\ufdd1<|millrace|>\ufdd1\ufdd0"


class RankEncoder:
    """tiktoken's core over ranks; ``ids`` maps ranks to the ids of the vocabulary."""

    name = "tiktoken"

    def __init__(self, pattern: str, ranks: Mapping[bytes, int], ids: Array | None = None) -> None:
        _tiktoken = ranks_package()
        numbers = np.fromiter(ranks.values(), np.int64, len(ranks))
        self._separator = int(numbers.max()) + 1
        self._sizes = np.zeros(self._separator, np.int64)
        self._sizes[numbers] = np.fromiter(map(len, ranks), np.int64, len(ranks))
        self._core = _tiktoken.CoreBPE(dict(ranks), {SEPARATOR: self._separator}, pattern)
        self._ids = ids

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        """ValueError where the pattern skips text, or gives up on it, as on a run of a million spaces."""
        ranks, lengths = self._ranks(documents)
        if self._sizes[ranks].sum() != sum(map(len, documents)):
            raise ValueError("its pattern skips some of the text")
        return (ranks if self._ids is None else self._ids[ranks]), lengths

    def encode_word(self, word: bytes) -> Iterator[tuple[int, Array]]:
        for ranks in word_ids(word, self._core.encode_single_piece, self._sizes):
            yield int(self._sizes[ranks].sum()), (ranks if self._ids is None else self._ids[ranks])

    def _ranks(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        texts = [document.decode() for document in documents]
        if any(SEPARATOR in text for text in texts):
            parts = [self._encode([text]) if SEPARATOR not in text else self._plain(text) for text in texts]
            return join_ids(parts)
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


def byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


def splitting_pattern(body: Mapping[str, Any]) -> str | None:
    """The splitting pattern of a byte-level tokenizer; None for any other."""
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


def fast_encoder(
    merges: Merges | None, vocab_size: int, end: int, body: Callable[[], Mapping[str, Any]]
) -> Encoder | None:
    """The fastest encoder for a vocabulary; None where only Hugging Face's tokenizers takes it.

    The core's encoder asks for ``body`` when it needs tiktoken, which is rare.
    """
    if merges is not None:
        dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        try:
            ranks_package()
            return MergeEncoder(merges, end, dtype, lambda: rank_encoder(body()))
        except (ImportError, ValueError):
            pass
    return rank_encoder(body())


def core_merges(body: Mapping[str, Any]) -> Merges | None:
    """The merges for the core's encoder; None where it may not be used."""
    is_fit = splitting_pattern(body) == GPT2_PATTERN and _is_usual(body["model"]) and may_use_core()
    return merges_of(body["model"], byte_alphabet()) if is_fit else None


def may_use_core() -> bool:
    return bool(core) and (os.environ.get("MILLRACE_BPE") or MergeEncoder.name) == MergeEncoder.name


def _is_usual(model: Mapping[str, Any]) -> bool:
    """Whether a model has nothing but its merges."""
    unusual = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    return not any(model.get(name) for name in unusual)


def rank_encoder(body: Mapping[str, Any]) -> RankEncoder | None:
    """tiktoken's core over the merges of a tokenizer.json; None without tiktoken, or if they do not convert."""
    pattern, model = splitting_pattern(body), body["model"]
    if pattern is None or not _is_usual(model):
        return None
    alphabet, vocabulary = byte_alphabet(), model["vocab"]
    if not alphabet.keys() <= vocabulary.keys():
        return None
    ranks = {bytes([byte]): rank for rank, (_, byte) in enumerate(sorted(alphabet.items(), key=lambda item: item[1]))}
    ids = [vocabulary[character] for character, _ in sorted(alphabet.items(), key=lambda item: item[1])]
    pairs = [merge if isinstance(merge, (list, tuple)) else merge.split(" ") for merge in model["merges"]]
    tokens = [left + right for left, right in pairs]
    if not set("".join(tokens)) <= alphabet.keys() or not set(tokens) <= vocabulary.keys():
        return None
    # All are translated at once by a table: one by one takes several times as long.
    data = "".join(tokens).translate({ord(character): byte for character, byte in alphabet.items()}).encode("latin-1")
    for token, end in zip(tokens, accumulate(map(len, tokens)), strict=True):
        rank = len(ids)
        if ranks.setdefault(data[end - len(token) : end], rank) == rank:
            ids.append(vocabulary[token])
    try:
        return RankEncoder(pattern, ranks, np.array(ids, np.uint32))
    except (ImportError, ValueError):
        return None
