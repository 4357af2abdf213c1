"""``prepare table --append --refit``: the scaling of a store fitted again, from its statistics and those of new rows."""

from __future__ import annotations

import numpy as np

from millrace.errors import ConfigError
from millrace.scaling.moments import Moments
from millrace.scaling.scaler import Scaling


def check_refit(scaling: Scaling) -> None:
    """Refuses a scaling that cannot be fitted from statistics alone."""
    if scaling.method == "robust" or scaling.per_entity:
        raise ConfigError("--refit needs all rows for quartiles or a scaling per entity; prepare the whole table again")


def refit_scaling(old: Scaling, moments: Moments, rows: int) -> Scaling:
    """Fitted on the train rows of the store and so many new ones; the calendar features stay as they are."""
    width = len(moments)
    count = np.array(old.statistics["count"][:width], np.int64)
    mean, std, low, high = (
        np.array([0.0 if value is None else value for value in old.statistics[key][:width]])
        for key in ("mean", "std", "min", "max")
    )
    low, high = np.where(count > 0, low, np.inf), np.where(count > 0, high, -np.inf)
    before = Moments(count, mean, std**2 * count, low, high, np.zeros(width))
    nulls = np.array([value or 0 for value in old.statistics["nulls"][:width]]) + rows - moments.count
    return Scaling.fit(
        old.method, old.features[:width], Moments.merge(before, moments), dtype=old.dtype, fit_on=old.fit_on,
        nulls=nulls.tolist(),
    ).with_waves(old.features[width:])  # fmt: skip
