"""JSON that reads the same everywhere: no key twice, no NaN, no number beyond a float, a limit on size and depth.

An object may also carry the hash of its other keys (``sealed``): then one changed bit is an error, not another value.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.errors import ConfigError, corrupt
from millrace.identity import canonical, digest

MAX_BYTES = 32 << 20
SEAL = "hash"
MAX_DEPTH = 64  # of lists and objects; json and msgspec recurse, their own limit depends on the caller's stack


def check_json(value: Any, what: str) -> None:
    """Refuses what the manifest could not hold exactly."""
    try:
        check_depth(value)
        canonical(value).encode()
        if json.loads(canonical(value)) != value:
            raise ValueError("keys must be strings and sequences lists")
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what} cannot be kept as JSON: {error}; use strings, numbers, lists and dicts") from error


def load_json(data: bytes, path: str, remedy: str = "copy or prepare the store again") -> dict[str, Any]:
    """The object in a small JSON file: no other value, no key twice, no NaN; ``remedy`` ends the error."""
    if len(data) > MAX_BYTES:
        raise corrupt(path, f"more than {MAX_BYTES} bytes", remedy)
    try:
        hooks: Any = {"object_pairs_hook": _no_duplicates, "parse_constant": _no_constants, "parse_float": _finite}
        body = json.loads(data.decode(), **hooks)
        check_depth(body)
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"is not valid JSON ({error})", remedy) from error
    if not isinstance(body, dict):
        raise corrupt(path, f"holds a {type(body).__name__}, expected a JSON object", remedy)
    return body


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the hash of all of them, which ``unsealed`` compares.

    >>> unsealed(sealed({"step": 4}))
    ({'step': 4}, True)
    """
    plain = json.loads(json.dumps(values, allow_nan=False))  # tuples as lists: what a reader will hash
    return {**plain, SEAL: digest(canonical(plain))}


def unsealed(values: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The values without their hash, and whether there was one; ``ValueError`` where it does not fit them."""
    plain = {key: value for key, value in values.items() if key != SEAL}
    if SEAL not in values:
        return plain, False
    if (found := digest(canonical(plain))) != values[SEAL]:
        raise ValueError(f"its values have hash {found}, expected {values[SEAL]!r:.60}")
    return plain, True


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {twice!r} appears twice")
    return result


def numbers_problem(key: str, values: Any, features: Sequence[str]) -> str | None:
    """Why a value of JSON is not one finite number for each feature; None where it is."""
    if not isinstance(values, list) or len(values) != len(features):
        found = f"{len(values)} numbers" if isinstance(values, list) else repr(values)[:60]
        return f"{key} is {found}, expected a list of {len(features)}, one per feature"
    for feature, value in zip(features, values, strict=True):
        # 1e999 is valid JSON and becomes inf; an integer of 400 digits has no float at all.
        if type(value) not in (int, float) or not abs(value) <= 1.7976931348623157e308:
            return f"{key} of feature {feature!r} is {value!r:.40}, expected a finite number"
    return None


def _no_constants(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is beyond any float")
    return value


def check_depth(value: Any, left: int = MAX_DEPTH) -> None:
    """Raises ``ValueError`` where lists and objects nest too deep for the functions that recurse over them."""
    if isinstance(value, (dict, list)):
        if left == 0:
            raise ValueError(f"lists and objects nest deeper than {MAX_DEPTH}")
        for child in value.values() if isinstance(value, dict) else value:
            check_depth(child, left - 1)
