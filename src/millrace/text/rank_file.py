"""A ``.tiktoken`` vocabulary: ranks, and the pattern that belongs to them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence

from millrace.distribution import install_command
from millrace.errors import ConfigError
from millrace.lazy import cached_property
from millrace.ragged import Array, Int64s
from millrace.text import breaks
from millrace.text.bpe import END_NAMES, as_lists, word_sections
from millrace.text.documents import Documents
from millrace.text.ranks import RankEncoder
from millrace.text.tokenizer import SectionIds, Tokenizer


class TiktokenTokenizer(Tokenizer):
    """Encodes by tiktoken's core."""

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
    def _encoder(self) -> RankEncoder:
        return RankEncoder(self._pattern, self._ranks)

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        documents = Documents.of(documents)
        return self._encode_long(documents) if breaks.any_long(documents) else self._encode(documents)

    def encode_sections(self, document: bytes) -> Iterator[SectionIds]:
        def lists(texts: list[str]) -> list[list[int]]:
            return as_lists(*self._encode([text.encode() for text in texts]))

        for start, stop, is_word in breaks.cut(document, lists, self._pattern):
            if is_word:
                yield from word_sections(start, self._encoder.encode_word(document[start:stop]))
            else:
                yield SectionIds(start, stop, self._encode([document[start:stop]])[0])

    def _encode(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        try:
            return self._encoder.encode_documents(documents)
        except ImportError as error:
            raise ConfigError(f"tokenizer {self.name} needs tiktoken; {install_command('text')}") from error
        except ValueError as error:
            raise ConfigError(f"tokenizer {self.name} cannot encode this: {error}") from error

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._bytes.get(token, b"") for token in ids)

    def to_file(self) -> bytes:
        lines = "\n".join(
            f"{base64.b64encode(token).decode()} {rank}"
            for token, rank in sorted(self._ranks.items(), key=lambda item: item[1])
        )
        body = {"millrace_tokenizer": "tiktoken", "name": self.name, "pattern": self._pattern}
        return json.dumps({**body, "special": self._special, "ranks": lines}).encode()
