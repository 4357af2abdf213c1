"""Trains a byte-level BPE vocabulary on documents of the corpus itself."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.errors import ConfigError
from millrace.text.bpe import HuggingFaceTokenizer


def train_bpe(documents: Iterable[bytes], vocab_size: int) -> HuggingFaceTokenizer:
    """A vocabulary of ``vocab_size`` ids: ``<|endoftext|>``, the 256 bytes, and merges in the order they were learnt."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ConfigError(f"tokenizer 'train:{vocab_size}' needs tokenizers; pip install millrace[text]") from error
    if not 257 <= vocab_size <= 1 << 20:
        raise ConfigError(f"train:{vocab_size}; a byte-level vocabulary has 257 to {1 << 20} ids")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((document.decode() for document in documents), trainer=trainer)
    # The name of the end in a text is text: else a document could make ends of its own.
    return HuggingFaceTokenizer(backend.to_str().encode(), f"train:{vocab_size}", plain_special=True)
