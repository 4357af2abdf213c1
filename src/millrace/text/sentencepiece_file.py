"""sentencepiece models."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence

import numpy as np
import sentencepiece

from millrace.errors import ConfigError
from millrace.ragged import Array, Int64s
from millrace.text import breaks
from millrace.text.documents import Documents
from millrace.text.tokenizer import SectionIds, Tokenizer, byte_places, pack_ids


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model. Its end-of-sentence id ends a document; a model without one gets one more id."""

    kind = "sentencepiece"

    def __init__(self, data: bytes, name: str) -> None:
        self.name, self._data = name, data
        if not data:  # which sentencepiece takes for no model yet
            raise ConfigError(f"tokenizer {name} is empty; copy it again")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
        except RuntimeError as error:
            raise ConfigError(f"tokenizer {name} is not a sentencepiece model: {error}") from error
        size = self._model.get_piece_size()
        self.end = self._model.eos_id() if self._model.eos_id() >= 0 else size
        self.vocab_size = max(size, self.end + 1)

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        documents = Documents.of(documents)
        return self._encode_long(documents) if breaks.any_long(documents) else self._encode(documents)

    def encode_sections(self, document: bytes) -> Iterator[SectionIds]:
        for start, stop, _ in breaks.cut(document, self._lists):
            yield SectionIds(start, stop, self._encode([document[start:stop]])[0])

    def _encode(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        return pack_ids(self._lists([document.decode() for document in documents]))

    def _lists(self, texts: list[str]) -> list[list[int]]:
        lists: list[list[int]] = self._model.encode(texts, out_type=int, num_threads=1)
        return lists

    def places(self, document: bytes, ids: Array) -> tuple[Int64s, Int64s]:
        text = document.decode()
        places = self._model.encode(text, out_type="offset_mapping")["offsets"]  # in characters
        assert len(places) == len(ids)
        return byte_places(text, np.array(places, np.int64).reshape(-1, 2))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return str(self._model.decode([token for token in ids if token < self._model.get_piece_size()])).encode()

    def to_file(self) -> bytes:
        return json.dumps(
            {"millrace_tokenizer": "sentencepiece", "name": self.name, "model": base64.b64encode(self._data).decode()}
        ).encode()
