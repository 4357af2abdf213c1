"""Scaling: a center and a scale for every feature, how they were fitted, and how rows are scaled and unscaled.

``prepare`` fits one and writes it into the manifest; ``store.scale`` and ``store.inverse`` (apply.py) read it from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError, StoreCorrupt
from millrace.native import core
from millrace.ragged import Array
from millrace.scaling.moments import Float64s, Moments
from millrace.store.strict_json import numbers_problem

METHODS = ("standard", "minmax", "robust", "none")
STATISTICS = ("count", "mean", "std", "min", "max", "nulls")
_ROWS = 4096  # rows scaled at once: 16 features of float32 are 256 KiB


def scale_rows_numpy(rows: Array, center: Float64s, scale: Float64s, out: Array) -> bool:
    """Fills ``out`` with ``(rows - center) / scale``, computed in float64; says whether all results are finite.

    This is the twin of the core's ``scale_rows``, which fills float32 only. A piece of rows at a time stays in cache.
    """
    work = np.empty((min(_ROWS, len(rows)), rows.shape[1]))
    is_finite = True
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, len(rows), _ROWS):
            piece, block = slice(first, first + _ROWS), rows[first : first + _ROWS]
            scaled = np.subtract(block, center, out=work[: len(block)], dtype=np.float64)
            out[piece] = np.divide(scaled, scale, out=scaled)
            is_finite &= bool(np.isfinite(out[piece]).all())
    return is_finite


scale_float32_rows = scale_rows_numpy if core is None else core.scale_rows


@dataclass(frozen=True, eq=False)
class Scaling:
    """``scaled = (value - center) / scale`` in float64, for every feature of a row.

    ``standard``: mean and population standard deviation; ``minmax``: smallest value and range; ``robust``: median and
    the distance between the quartiles; ``none``: 0 and 1. A feature without spread has scale 1 and is named in
    ``constant``; one without a value has center 0 and scale 1 and is named in ``empty``.

    >>> fitted = Scaling.fit("minmax", ["price"], Moments.of([np.array([2.0, 4.0, 6.0])]))
    >>> fitted.transform(np.array([[3.0]])).tolist(), fitted.inverse(np.array([[0.25]])).tolist()
    ([[0.25]], [[3.0]])
    """

    method: str
    features: tuple[str, ...]
    center: Float64s
    scale: Float64s
    dtype: str = "float32"
    fit_on: str = "train"
    per_entity: bool = False
    constant: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    statistics: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        method: str,
        features: Sequence[str],
        moments: Moments,
        quantiles: Float64s | None = None,
        *,
        dtype: str = "float32",
        fit_on: str = "train",
        per_entity: bool = False,
        nulls: Sequence[int] | None = None,
    ) -> Scaling:
        """Fitted to the moments of the columns; ``robust`` needs their (columns, 3) quartiles."""
        center, scale = center_and_scale(method, features, moments, quantiles)
        is_empty = moments.count == 0
        is_constant = ~is_empty & (scale == 0)
        names = np.array(features, object)
        return cls(
            method, tuple(features), np.where(is_empty, 0.0, center), np.where(is_empty | is_constant, 1.0, scale),
            dtype=dtype, fit_on=fit_on, per_entity=per_entity,
            constant=tuple(names[is_constant]), empty=tuple(names[is_empty]), statistics=_statistics(moments, nulls),
        )  # fmt: skip

    def transform(
        self,
        rows: npt.ArrayLike,
        out_dtype: str = "float32",
        center: Float64s | None = None,
        scale: Float64s | None = None,
    ) -> Array:
        """Rows (..., features) in original units, scaled; give the center and scale of an entity that has its own."""
        values = self._checked(np.asarray(rows), self.features)
        with np.errstate(over="ignore"):
            scaled = np.subtract(values, self.center if center is None else center, dtype=np.float64)
            scaled /= self.scale if scale is None else scale
            stored = scaled.astype(out_dtype, copy=False)
        self._refuse_overflow(values, stored, scaled)
        return stored

    def scale_into(self, rows: Array, out: Array, center: Float64s, scale: Float64s) -> None:
        """The same numbers into ``out`` (rows, features)."""
        is_float32 = out.dtype == np.float32 and rows.flags.c_contiguous and out.flags.c_contiguous
        if not (scale_float32_rows if is_float32 else scale_rows_numpy)(rows, center, scale, out):
            with np.errstate(over="ignore"):
                self._refuse_overflow(rows, out, (rows - center) / scale)

    def inverse(
        self,
        values: npt.ArrayLike,
        features: Sequence[int] | None = None,
        center: Float64s | None = None,
        scale: Float64s | None = None,
    ) -> Float64s:
        """Scaled values (..., features) in original units, float64; ``features`` are the numbers of their features."""
        picked = list(range(len(self.features)) if features is None else features)
        scaled = self._checked(np.asarray(values), [self.features[k] for k in picked]).astype(np.float64)
        scaled *= (self.scale if scale is None else scale)[..., picked]
        scaled += (self.center if center is None else center)[..., picked]
        return scaled

    def with_waves(self, names: Sequence[str]) -> Scaling:
        """The scaling with features behind it that are stored as they are."""
        return replace(
            self, features=(*self.features, *names), center=np.append(self.center, np.zeros(len(names))),
            scale=np.append(self.scale, np.ones(len(names))),
            statistics={key: [*values, *([None] * len(names))] for key, values in self.statistics.items()},
        )  # fmt: skip

    def to_manifest(self) -> dict[str, Any]:
        """Plain JSON; ``from_manifest`` gives the same numbers back, bit for bit."""
        return {
            "method": self.method, "features": list(self.features), "center": self.center.tolist(),
            "scale": self.scale.tolist(), "dtype": self.dtype, "fit_on": self.fit_on, "per_entity": self.per_entity,
            "constant": list(self.constant), "empty": list(self.empty),
            "statistics": {key: list(values) for key, values in self.statistics.items()},
        }  # fmt: skip

    @classmethod
    def from_manifest(cls, body: Any, where: str = "scaling") -> Scaling:
        """From a manifest, every number checked; ``where`` names the file in errors."""
        if not isinstance(body, Mapping):
            raise _corrupt(where, f"holds {body!r:.60}, expected an object")
        method, names = body.get("method"), body.get("features")
        if method not in METHODS:
            raise _corrupt(where, f"method is {method!r:.60}, expected one of {', '.join(METHODS)}")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise _corrupt(where, f"features are {names!r:.60}, expected a list of names")
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise _corrupt(where, f"feature {twice!r} is named twice")
        center, scale = (_numbers(where, key, body.get(key), names) for key in ("center", "scale"))
        if (bad := np.flatnonzero(scale <= 0)).size:
            raise _corrupt(where, f"scale of feature {names[bad[0]]!r} is {scale[bad[0]]}, expected more than 0")
        if not isinstance(per_entity := body.get("per_entity", False), bool):
            raise _corrupt(where, f"per_entity is {per_entity!r:.60}, expected true or false")
        statistics = body.get("statistics", {})
        if not isinstance(statistics, Mapping) or any(
            not isinstance(values, list) or len(values) != len(names) for values in statistics.values()
        ):
            raise _corrupt(where, f"statistics are {statistics!r:.60}, expected lists of {len(names)}, one per feature")
        for key in ("constant", "empty"):
            some = body.get(key, [])
            if not isinstance(some, list) or not set(map(str, some)) <= set(names):
                raise _corrupt(where, f"{key} is {some!r:.60}, expected a list of some of its features")
        for key in ("dtype", "fit_on"):
            if not isinstance(body.get(key, ""), str):
                raise _corrupt(where, f"{key} is {body[key]!r:.60}, expected text")
        return cls(
            method, tuple(names), center, scale, dtype=body.get("dtype", "float32"), fit_on=body.get("fit_on", "train"),
            per_entity=per_entity, constant=tuple(body.get("constant", ())), empty=tuple(body.get("empty", ())),
            statistics=dict(statistics),
        )  # fmt: skip

    def _checked(self, values: Array, features: Sequence[str]) -> Array:
        if values.ndim == 0 or values.shape[-1] != len(features):
            more = f" and {len(features) - 8} more" if len(features) > 8 else ""
            axis = f"(..., {len(features)}), the last axis being {', '.join(features[:8])}{more}"
            raise ConfigError(f"values have shape {values.shape}; expected {axis}")
        return values

    def _refuse_overflow(self, rows: Array, stored: Array, scaled: Float64s) -> None:
        """Refuses values that the stored dtype cannot hold."""
        if not (np.isfinite(rows) & ~np.isfinite(stored)).any():
            return
        largest = np.fmax.reduce(np.abs(scaled).reshape(-1, scaled.shape[-1]), axis=0)
        at = int(np.argmax(largest > np.finfo(stored.dtype).max))
        raise ConfigError(
            f"feature {self.features[at]!r} scaled is {largest[at]:g}, which {stored.dtype} cannot hold; store a wider "
            "dtype, or leave the feature out"
        )


def center_and_scale(
    method: str, features: Sequence[str], moments: Moments, quantiles: Float64s | None = None
) -> tuple[Float64s, Float64s]:
    """Center and scale of each column, a scale of 0 where it has no spread; both are meaningless without values.

    Moments of (columns, parts) and quartiles of (columns, 3, parts) give those of each part.
    """
    if method not in METHODS:
        raise ConfigError(f"scale={method!r}; expected one of {', '.join(METHODS)}")
    if len(moments) != len(features):
        raise ConfigError(f"moments of {len(moments)} columns for {len(features)} features; give those of each")
    if method == "robust" and (quantiles is None or quantiles.shape[:2] != (len(features), 3)):
        raise ConfigError("robust scaling needs the quartiles of each feature; give quantiles (features, 3)")
    with np.errstate(over="ignore", invalid="ignore"):
        if method == "standard":
            center, scale = moments.mean, moments.std
        elif method == "minmax":
            center, scale = moments.low, moments.high - moments.low
        elif method == "robust":
            assert quantiles is not None
            center, scale = quantiles[:, 1], quantiles[:, 2] - quantiles[:, 0]
        else:
            center, scale = np.zeros(moments.count.shape), np.ones(moments.count.shape)
    unusable = (moments.count > 0) & ~(np.isfinite(center) & np.isfinite(scale))
    if unusable.any():
        name = features[int(np.argwhere(unusable)[0][0])]
        raise ConfigError(
            f"feature {name!r} has values too large for {method} scaling in float64; leave it out, or scale by none"
        )
    return center, scale


def _statistics(moments: Moments, nulls: Sequence[int] | None) -> dict[str, list[Any]]:
    columns = (
        moments.count, moments.mean, moments.std, moments.low, moments.high,
        np.zeros(len(moments), np.int64) if nulls is None else np.asarray(nulls, np.int64),
    )  # fmt: skip
    found = {}
    for name, values in zip(STATISTICS, columns, strict=True):
        # JSON has no inf and no NaN: what is not known of a column is null.
        known = np.isfinite(values) & ((moments.count > 0) | (name in ("count", "nulls")))
        found[name] = [value if is_known else None for value, is_known in zip(values.tolist(), known, strict=True)]
    return found


def _numbers(where: str, key: str, values: Any, features: Sequence[str]) -> Float64s:
    if problem := numbers_problem(key, values, features):
        raise _corrupt(where, problem)
    return np.array(values, np.float64)


def _corrupt(where: str, problem: str) -> StoreCorrupt:
    return StoreCorrupt(f"{where}: scaling {problem}; copy or prepare the store again", path=where)
