"""sentencepiece models, by file."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence

import numpy as np
import sentencepiece

from millrace.errors import ConfigError
from millrace.ragged import Array, Int64s
from millrace.text import breaks
from millrace.text.ranks import joined
from millrace.text.tokenizer import Encoded, Tokenizer, byte_places


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model; its own end-of-sentence id ends a document, or one more id where it has none."""

    kind = "sentencepiece"

    def __init__(self, data: bytes, name: str) -> None:
        self.name, self._data = name, data
        if not data:  # sentencepiece takes this for no model given yet
            raise ConfigError(f"tokenizer {name} is empty; copy it again")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
        except RuntimeError as error:
            raise ConfigError(f"tokenizer {name} is not a sentencepiece model: {error}") from error
        size = self._model.get_piece_size()
        self.end = self._model.eos_id() if self._model.eos_id() >= 0 else size
        self.vocab_size = max(size, self.end + 1)

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        if breaks.any_long(documents):
            return joined([self._whole(document) for document in documents])
        return self._encode(documents)

    def encode_pieces(self, document: bytes) -> Iterator[Encoded]:
        for start, stop, _ in breaks.cut(
            document, lambda texts: self._model.encode(texts, out_type=int, num_threads=1)
        ):
            yield Encoded(start, stop, self._encode([document[start:stop]])[0])

    def _encode(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        found = self._model.encode([document.decode() for document in documents], out_type=int, num_threads=1)
        arrays = [np.array(ids, np.uint32) for ids in found]
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        return (np.concatenate(arrays) if arrays else np.zeros(0, np.uint32)), lengths

    def places(self, document: bytes, ids: Array) -> tuple[Int64s, Int64s]:
        text = document.decode()
        found = self._model.encode(text, out_type="offset_mapping")["offsets"]  # in characters
        assert len(found) == len(ids)
        return byte_places(text, np.array(found, np.int64).reshape(-1, 2))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return str(self._model.decode([token for token in ids if token < self._model.get_piece_size()])).encode()

    def to_file(self) -> bytes:
        return json.dumps(
            {"millrace_tokenizer": "sentencepiece", "name": self.name, "model": base64.b64encode(self._data).decode()}
        ).encode()
