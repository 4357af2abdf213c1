"""Steps for tokens: a column of (batch, length) ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.augment.step import Step, check_share, column_of, like, where
from millrace.errors import ConfigError
from millrace.feed.rng import Rng
from millrace.ragged import Array


@dataclass(frozen=True)
class MaskTokens(Step):
    """Masks tokens as BERT does, and makes the labels of what was masked.

    A share ``p`` of the tokens is chosen, none of ``special``. Of those 80 % become ``mask``, 10 % any of ``vocab`` ids,
    and 10 % stay. ``target`` holds the chosen tokens, and ``ignore`` everywhere else.
    """

    mask: int
    vocab: int
    p: float = 0.15
    special: tuple[int, ...] = ()
    ignore: int = -100
    column: str = "x"
    target: str = "y"

    def __post_init__(self) -> None:
        check_share("p", self.p)
        _check_vocab(self.vocab)

    def draw(self, batch: Mapping[str, Any], rng: Rng) -> dict[str, Array]:
        length = column_of(batch, self.column, axes=2).shape[1]
        return {"chosen": rng.uniform(length), "kind": rng.uniform(length), "ids": rng.integers(0, self.vocab, length)}

    def apply(self, batch: Mapping[str, Any], drawn: Mapping[str, Array]) -> dict[str, Any]:
        tokens = column_of(batch, self.column, axes=2)
        is_chosen = like(drawn["chosen"] < self.p, tokens)
        for token in self.special:
            is_chosen = is_chosen & (tokens != token)
        new = np.where(drawn["kind"] < 0.8, self.mask, drawn["ids"])
        is_changed = is_chosen & like(drawn["kind"] < 0.9, tokens)
        ignored = like(np.full((1, 1), self.ignore), tokens)
        return {
            self.column: where(is_changed, like(new, tokens), tokens),
            self.target: where(is_chosen, tokens, ignored),
        }


@dataclass(frozen=True)
class ReplaceTokens(Step):
    """Noise: a share ``p`` of the tokens becomes any of ``vocab`` ids."""

    vocab: int
    p: float = 0.05
    column: str = "x"

    def __post_init__(self) -> None:
        check_share("p", self.p)
        _check_vocab(self.vocab)

    def draw(self, batch: Mapping[str, Any], rng: Rng) -> dict[str, Array]:
        length = column_of(batch, self.column, axes=2).shape[1]
        return {"is_changed": rng.uniform(length) < self.p, "ids": rng.integers(0, self.vocab, length)}

    def apply(self, batch: Mapping[str, Any], drawn: Mapping[str, Array]) -> dict[str, Any]:
        tokens = column_of(batch, self.column, axes=2)
        return {self.column: where(like(drawn["is_changed"], tokens), like(drawn["ids"], tokens), tokens)}


def _check_vocab(vocab: int) -> None:
    if vocab < 1:
        raise ConfigError(f"vocab={vocab}; expected how many token ids there are: store.tokenizer.vocab_size")
