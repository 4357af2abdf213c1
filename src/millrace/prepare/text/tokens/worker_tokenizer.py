"""The tokenizer of a preparation in the processes that make its parts, each of which loads it once."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

from millrace.store import platform
from millrace.text.bpe import HuggingFaceTokenizer, Outline
from millrace.text.load import load_tokenizer
from millrace.text.merges import merges_from
from millrace.text.tokenizer import Tokenizer

MERGES = "merges.bin"


def tokenizer_of(folder: str, described: dict[str, Any], engine: str) -> Tokenizer:
    """The tokenizer of a preparation, on the engine the run decided on."""
    tokenizer = _loaded(folder, json.dumps(described))
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.use(engine)
    return tokenizer


def outlined(folder: Path, tokenizer: Tokenizer) -> Outline | None:
    """What workers are told of a tokenizer, its merges in a file: a worker that still starts reads no large message."""
    outline = getattr(tokenizer, "outline", None)
    if outline is None or outline.merges is None:
        return None
    platform.write_file(folder / MERGES, outline.merges.to_bytes(), mode=0o644, durable=False)
    small: Outline = outline._replace(merges=None)
    return small


def load_early(what: tuple[str, dict[str, Any], Outline | None]) -> None:
    """Loads the tokenizer (of a folder, as described, in outline) before the first part comes."""
    folder, described, outline = what
    if outline is not None:
        outline = outline._replace(merges=merges_from((Path(folder) / MERGES).read_bytes()))
    _loaded(folder, json.dumps(described), outline)
    gc.freeze()  # a vocabulary is a hundred thousand objects that stay


def keep_loaded(folder: str, tokenizer: Tokenizer) -> None:
    """The tokenizer of a run whose parts are made in this process, which has loaded it."""
    _kept.clear()
    _kept[folder, json.dumps(tokenizer.describe())] = tokenizer


_kept: dict[tuple[str, str], Tokenizer] = {}  # that of the run whose parts are made here


def _loaded(folder: str, described: str, outline: Outline | None = None) -> Tokenizer:
    """Once per worker."""
    if (folder, described) not in _kept:
        path = Path(folder) / "vocabulary.json"
        _kept.clear()
        _kept[folder, described] = load_tokenizer(json.loads(described), path.read_bytes(), str(path), outline)
    return _kept[folder, described]
