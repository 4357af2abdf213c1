"""gigatoken, the fastest engine for byte-level BPE, used where it is installed and gives the ids of tiktoken's core.

It is young, and ten times as fast. What keeps it exact: a character is tried on both engines when it is first met,
since their tables of Unicode differ (its letters include those of Unicode 17); the number of bytes its ids stand for is
compared; and a run compares ids on documents from all over its corpus before it starts. What keeps it small: it
remembers every word, so it is made again when it has grown, and long documents are not given to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from millrace.native import core
from millrace.ragged import Array, Int64s
from millrace.text.lump import for_core
from millrace.text.tokenizer import measured, with_ends

MAX_DOCUMENT = 2 << 20  # 64 MiB of one letter took 2 GB
MAX_GROWTH = 128 << 20  # of this process: 16 MB of random words, some hundred of a text
LOOK_BYTES = 4 << 20  # between two looks at the memory
UNKNOWN, SAME, OTHER = 0, 1, 2
# Where a character that is a letter, a number, white space or none of these has other ids than one of another class.
PROBES = ("{}'s", " {}'s", "   {}", "{}   a", "a{0}b 1{0}2 .{0}.", "\n{0}\n {0}")


class Engine(Protocol):
    """Documents in; out their ids one after the other, and how many each has. ValueError where it gives up."""

    name: str

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]: ...

    def encode_word(self, word: bytes) -> Iterator[tuple[int, Array]]: ...


class GigatokenEngine:
    """gigatoken over a ``tokenizer.json`` whose pattern is GPT-2's; ``exact`` takes the documents it may get wrong.

    ``sizes`` has the number of bytes of every id, ``separator`` is what stands between documents.
    """

    name = "gigatoken"

    def __init__(self, body: Mapping[str, Any], separator: str, exact: Engine, sizes: Array) -> None:
        from gigatoken.gigatoken_rs import load_hf_json

        self._load, self._exact, self._sizes = load_hf_json, exact, sizes
        self._small_sizes = np.minimum(sizes, np.iinfo(np.int32).max).astype(np.int32)
        self._separator, self._end = separator.encode(), len(sizes)
        part = {"id": self._end, "content": separator, "special": True, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False}  # fmt: skip
        self._data = msgspec.json.encode({**body, "added_tokens": [part]})
        self._classes = np.zeros(0x110000, np.uint8)
        self._classes[:128] = SAME
        self._since = self._before = 0
        self._renew()
        # The ids of what stands between documents that the core has joined; none where they are not what it expects.
        marks = self._backend.encode(b"\n."), exact.encode_documents([b"\n", b"."])[0]
        self._marks = tuple(marks[0].tolist()) if np.array_equal(*marks) and len(marks[0]) == 2 else None

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        unsure = self._unsure(documents, *measured(documents))
        if not unsure:
            return self._encode(documents)
        parts = [
            self._exact.encode_documents(list(some)) if are_unsure else self._encode(list(some))
            for are_unsure, some in _runs(documents, unsure)
        ]
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([lengths for _, lengths in parts])

    def encode_spaced(self, documents: Sequence[bytes], dtype: np.dtype[Any], end: int) -> tuple[Array, Int64s]:
        """The same with ``end`` behind each document, without a copy for it; ValueError also where one is long."""
        if core is None or self._marks is None:
            return with_ends(*self.encode_documents(documents), dtype, end)
        lengths, characters = measured(documents)
        if len(lengths) and lengths.max() > MAX_DOCUMENT:
            raise ValueError("a document is too long to be encoded at once")
        unsure = self._unsure(documents, lengths, characters)
        if not unsure:
            return self._spaced(documents, lengths, dtype, end)
        parts = [
            with_ends(*self._exact.encode_documents(list(some)), dtype, end)
            if are_unsure
            else self._spaced(some, measured(some)[0], dtype, end)
            for are_unsure, some in _runs(documents, unsure)
        ]
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([lengths for _, lengths in parts])

    def encode_word(self, word: bytes) -> Iterator[tuple[int, Array]]:
        return self._exact.encode_word(word)

    def _unsure(self, documents: Sequence[bytes], lengths: Int64s, characters: Int64s) -> list[int]:
        """Numbers of the documents that it may get wrong, or that would make it large."""
        others = np.flatnonzero(lengths != characters).tolist()  # not ASCII, as the separator
        texts = [documents[k].decode() for k in others]
        is_other = self._classes_of("".join(texts)) == OTHER
        found = {k for k in others if self._separator in documents[k]}
        found.update(np.flatnonzero(lengths > MAX_DOCUMENT).tolist())
        if is_other.any():
            ends = np.cumsum(list(map(len, texts)))
            found |= {others[k] for k in np.searchsorted(ends, np.flatnonzero(is_other), side="right")}
        return sorted(found)

    def _classes_of(self, text: str) -> Array:
        """Of every character, whether both engines take it for the same; found out when it is first met."""
        points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        new = np.unique(points[self._classes[points] == UNKNOWN])
        if len(new):
            self._compare(new)
        found: Array = self._classes[points]
        return found

    def _compare(self, points: Array) -> None:
        """Finds those that differ by halves: they are few among thousands."""
        if self._agree(points):
            self._classes[points] = SAME
        elif len(points) == 1:
            self._classes[points] = OTHER
        else:
            self._compare(points[: len(points) // 2])
            self._compare(points[len(points) // 2 :])

    def _agree(self, points: Iterable[int]) -> bool:
        probes = [probe.format(chr(point)).encode() for point in points for probe in PROBES]
        return all(map(np.array_equal, self._encode(probes), self._exact.encode_documents(probes)))

    def _encode(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        joined = self._separator.join(documents)
        ids = self._backend.encode(joined) if joined else np.zeros(0, np.uint32)
        ends = np.flatnonzero(ids == self._end)
        lengths = np.diff(np.concatenate(([-1], ends, [len(ids)])))[: len(documents)] - 1
        ids = np.delete(ids, ends)
        if len(ends) != max(0, len(documents) - 1) or self._sizes[ids].sum() != sum(map(len, documents)):
            return self._exact.encode_documents(documents)  # it has lost something
        self._look_at_memory(len(joined))
        return ids, lengths

    def _spaced(
        self, documents: Sequence[bytes], lengths: Int64s, dtype: np.dtype[Any], end: int
    ) -> tuple[Array, Int64s]:
        """Most documents parted by a newline, which is half as much work for it as the separator."""
        joined, kinds = core.joined(for_core(documents), self._separator)
        ids = self._backend.encode(joined) if joined else np.zeros(0, np.uint32)
        tokens, counts = np.empty(len(ids) + 1, dtype), np.empty(len(documents), np.int64)
        marks = (*(self._marks or ()), self._end, end)
        found = core.parted(ids, self._small_sizes, lengths, kinds, marks, tokens, dtype.itemsize, counts)
        if found < 0:  # it has lost something
            return with_ends(*self._exact.encode_documents(documents), dtype, end)
        self._look_at_memory(len(joined))
        return tokens[:found], counts

    def _look_at_memory(self, num_bytes: int) -> None:
        self._since += num_bytes
        if self._since >= LOOK_BYTES:
            self._since = 0
            if _own_bytes() - self._before > MAX_GROWTH:
                self._renew()

    def _renew(self) -> None:
        self._backend: Any = None  # given back before the next takes as much
        self._backend = self._load(self._data)
        self._before = _own_bytes()


def _runs(documents: Sequence[bytes], chosen: Sequence[int]) -> Iterator[tuple[bool, Sequence[bytes]]]:
    """The documents in order, each of those chosen alone and the rest between them together."""
    at = 0
    for k in chosen:
        if at < k:
            yield False, documents[at:k]
        yield True, documents[k : k + 1]
        at = k + 1
    if at < len(documents):
        yield False, documents[at:]


def _own_bytes() -> int:
    """Memory of this process that is no file's."""
    import psutil

    try:
        memory = psutil.Process().memory_info()
    except psutil.Error:  # no /proc: what it has had at most
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(memory.rss - getattr(memory, "shared", 0))
