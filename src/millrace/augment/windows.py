"""Steps for windows: a column of (batch, rows, features) floats."""

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
class Jitter(Step):
    """Adds normal noise of deviation ``std`` to every number."""

    std: float = 0.03
    column: str = "x"

    def draw(self, batch: Mapping[str, Any], rng: Rng) -> dict[str, Array]:
        return {"noise": self.std * rng.normal(*column_of(batch, self.column, floats=True).shape[1:])}

    def apply(self, batch: Mapping[str, Any], drawn: Mapping[str, Array]) -> dict[str, Any]:
        values = column_of(batch, self.column, floats=True)
        return {self.column: values + like(drawn["noise"], values)}


@dataclass(frozen=True)
class Scale(Step):
    """Multiplies each feature of a window by its own factor, normal around 1 with deviation ``std``."""

    std: float = 0.1
    column: str = "x"

    def draw(self, batch: Mapping[str, Any], rng: Rng) -> dict[str, Array]:
        features = column_of(batch, self.column, axes=3, floats=True).shape[2]
        return {"factors": 1 + self.std * rng.normal(features)[:, None, :]}

    def apply(self, batch: Mapping[str, Any], drawn: Mapping[str, Array]) -> dict[str, Any]:
        values = column_of(batch, self.column, axes=3, floats=True)
        return {self.column: values * like(drawn["factors"], values)}


@dataclass(frozen=True)
class MaskSpans(Step):
    """Sets a run of up to ``time`` rows to ``value``, and each feature as a whole with probability ``features``."""

    time: int = 0
    features: float = 0.0
    value: float = 0.0
    column: str = "x"

    def __post_init__(self) -> None:
        check_share("features", self.features)
        if self.time < 0:
            raise ConfigError(f"time={self.time}; expected 0 or more rows")

    def draw(self, batch: Mapping[str, Any], rng: Rng) -> dict[str, Array]:
        _, rows, features = column_of(batch, self.column, axes=3, floats=True).shape
        lengths = rng.integers(0, min(self.time, rows) + 1)
        starts = (rng.uniform() * (rows - lengths + 1)).astype(np.int64)
        inside = np.arange(rows) - starts[:, None]
        is_hidden = ((inside >= 0) & (inside < lengths[:, None]))[:, :, None]
        return {"is_hidden": is_hidden | (rng.uniform(features) < self.features)[:, None, :]}

    def apply(self, batch: Mapping[str, Any], drawn: Mapping[str, Array]) -> dict[str, Any]:
        values = column_of(batch, self.column, axes=3, floats=True)
        hidden = like(np.full((1, 1, 1), self.value), values)
        return {self.column: where(like(drawn["is_hidden"], values), hidden, values)}
