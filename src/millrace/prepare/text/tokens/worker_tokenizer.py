"""The tokenizer of a preparation in its workers: each process loads it once."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

from millrace.store import platform
from millrace.text.bpe import HuggingFaceTokenizer, TokenizerOutline
from millrace.text.load import load_tokenizer
from millrace.text.merges import merges_from
from millrace.text.tokenizer import Tokenizer

MERGES = "merges.bin"


def tokenizer_of(folder: str, entry: dict[str, Any], encoder: str) -> Tokenizer:
    """The tokenizer with this manifest ``entry``, on the encoder that the run chose."""
    tokenizer = _load_once(folder, json.dumps(entry))
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.use(encoder)
    return tokenizer


def write_outline(folder: Path, tokenizer: Tokenizer) -> TokenizerOutline | None:
    """The outline of a tokenizer for workers, its merges in a file: a starting worker reads no large message."""
    outline = getattr(tokenizer, "outline", None)
    if outline is None or outline.merges is None:
        return None
    platform.write_file(folder / MERGES, outline.merges.to_bytes(), mode=0o644, durable=False)
    small: TokenizerOutline = outline._replace(merges=None)
    return small


def load_early(what: tuple[str, dict[str, Any], TokenizerOutline | None]) -> None:
    """Loads a tokenizer, given by (folder, manifest entry, outline), before the first part comes."""
    folder, entry, outline = what
    if outline is not None:
        outline = outline._replace(merges=merges_from((Path(folder) / MERGES).read_bytes()))
    _load_once(folder, json.dumps(entry), outline)
    gc.freeze()  # a vocabulary is a hundred thousand objects that stay


def set_tokenizer(folder: str, tokenizer: Tokenizer) -> None:
    """Sets the tokenizer of a run that makes its parts in this process."""
    _cache.clear()
    _cache[folder, json.dumps(tokenizer.describe())] = tokenizer


_cache: dict[tuple[str, str], Tokenizer] = {}  # one at most: that of the current run


def _load_once(folder: str, entry: str, outline: TokenizerOutline | None = None) -> Tokenizer:
    if (folder, entry) not in _cache:
        path = Path(folder) / "vocabulary.json"
        _cache.clear()
        _cache[folder, entry] = load_tokenizer(json.loads(entry), path.read_bytes(), str(path), outline)
    return _cache[folder, entry]
