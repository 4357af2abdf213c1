"""``store.scale`` and ``store.inverse``, by the numbers of each entity where it has its own.

``Store`` loads this module when one of them is first called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError, StoreCorrupt, did_you_mean
from millrace.lazy import cached_property
from millrace.ragged import Array, Int64s
from millrace.scaling.moments import Float64s
from millrace.scaling.scaler import Scaling
from millrace.store.store import Store

COLUMN = "scaling"  # (2, features) float64 of each record: its center and its scale


class StoreScaling:
    """The scaling of one store, over the records of that store."""

    def __init__(self, store: Store) -> None:
        body = store.meta.get("scaling") if store.manifest is None else store.manifest.scaling
        if body is None:
            raise ConfigError(
                "this store keeps no scaling; stores made by millrace prepare table do, and layouts with a scaler.json"
            )
        self._store = store
        self.scaling = Scaling.from_manifest(body, where=store.path or "meta")

    def scale(self, rows: npt.ArrayLike, entity: Any = None) -> Array:
        values = np.asarray(rows)
        center, scale = self._center_and_scale(entity, values.shape)
        return self.scaling.transform(values, center=center, scale=scale)

    def inverse(self, y: npt.ArrayLike, features: Any = None, entity: Any = None) -> Float64s:
        values = np.asarray(y)
        if values.ndim == 0:
            raise ConfigError(f"values are the single number {values}; expected (..., features)")
        numbers = self._feature_numbers(features, values.shape[-1])
        center, scale = self._center_and_scale(entity, values.shape)
        return self.scaling.inverse(values, numbers, center=center, scale=scale)

    def _feature_numbers(self, features: Any, width: int) -> list[int]:
        """The numbers of the features on the last axis, which has this width."""
        names = self.scaling.features
        if features is None:
            return self._default_numbers(width)
        wanted: Sequence[Any] = [features] if isinstance(features, (str, int, np.integer)) else list(features)
        numbers = []
        for feature in wanted:
            if isinstance(feature, str) and feature in names:
                numbers.append(names.index(feature))
            elif isinstance(feature, (int, np.integer)) and 0 <= feature < len(names):
                numbers.append(int(feature))
            else:
                raise ConfigError(
                    f"feature {feature!r} is unknown{did_you_mean(feature, names)}; the store has {', '.join(names)}"
                )
        if len(numbers) != width:
            raise ConfigError(
                f"{len(numbers)} features for values of {width}; name the feature of each number on the last axis"
            )
        return numbers

    def _default_numbers(self, width: int) -> list[int]:
        names, given = self.scaling.features, self._store.meta.get("target")
        target = [given] if isinstance(given, str) else list(given or ())
        is_target = len(target) == width and set(target) <= set(names)
        if width == len(names) and (not is_target or target == list(names)):
            return list(range(width))
        if is_target and width != len(names):
            return [names.index(name) for name in target]
        both = "features and target differ in order" if is_target else f"the store has {len(names)}"
        raise ConfigError(f"values have {width} features, {both}; say which they are: features=[...]")

    def _center_and_scale(self, entity: Any, shape: tuple[int, ...]) -> tuple[Float64s | None, Float64s | None]:
        """Center and scale of entities, shaped to fit values of this shape; None where all share one scaling."""
        if not self.scaling.per_entity:
            return None, None
        if entity is None:
            raise ConfigError(
                "every entity of this store has a scaling of its own; give entity=, a name or record numbers "
                "(view.records(batch.samples))"
            )
        records = self._records(entity)
        if records.shape != shape[:-1][: records.ndim]:
            raise ConfigError(
                f"entity= has shape {records.shape} for values of shape {shape}; give one for all, or one for each of the "
                "first axis"
            )
        self._check_column()
        both = np.asarray(self._store.columns[COLUMN][records.reshape(-1)], np.float64)
        both = both.reshape(*records.shape, 2, len(self.scaling.features))
        self._check(both, records)
        spread = (*records.shape, *[1] * (len(shape) - 1 - records.ndim), -1) if records.ndim else (-1,)
        return both[..., 0, :].reshape(spread), both[..., 1, :].reshape(spread)

    def _records(self, entity: Any) -> Int64s:
        if isinstance(entity, str):
            number = self._by_name.get(entity)
            if number is None:
                near = did_you_mean(entity, self._by_name)
                some = ", ".join(list(self._by_name)[:3])
                raise ConfigError(
                    f"entity {entity!r} is unknown{near}; the store has {self._store.num_records:,} entities, such as {some}"
                )
            return np.array(number)
        records = np.asarray(entity)
        if records.dtype.kind in "UO":
            return np.array([int(self._records(str(name))) for name in records.ravel()]).reshape(records.shape)
        if records.dtype.kind not in "iu":
            raise ConfigError(f"entity= is {records.dtype}; expected a name or record numbers")
        if records.size and not 0 <= records.min() <= records.max() < self._store.num_records:
            raise ConfigError(
                f"entity= has records {records.min()} to {records.max()}; the store has 0 to {self._store.num_records - 1}"
            )
        return records.astype(np.int64)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        if "name" not in self._store.layout.columns:
            raise ConfigError("this store names no entities; give entity= as a record number")
        names = np.asarray(self._store.columns["name"][:]).tolist()
        return {name: number for number, name in enumerate(names)}

    def _check_column(self) -> None:
        column, expected = self._store.layout.columns.get(COLUMN), (2, len(self.scaling.features))
        if column is None or column.axis is not None or column.shape != expected:
            raise StoreCorrupt(
                f"this store scales every entity, but has no record column {COLUMN!r} of shape {expected}; copy or prepare it "
                "again", path=self._store.path, column=COLUMN,
            )  # fmt: skip

    def _check(self, both: Float64s, records: Int64s) -> None:
        is_bad = ~np.isfinite(both)
        is_bad[..., 1, :] |= ~(both[..., 1, :] > 0)
        if is_bad.any():
            *at, which, feature = (int(k) for k in np.argwhere(is_bad)[0])
            raise StoreCorrupt(
                f"{('center', 'scale')[which]} of feature {self.scaling.features[feature]!r} of record "
                f"{records[tuple(at)]} is {both[(*at, which, feature)]}; expected a finite number, a scale above 0: "
                "copy or prepare the store again", path=self._store.path, column=COLUMN,
            )  # fmt: skip
