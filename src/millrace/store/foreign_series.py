"""``metadata.json`` + ``all_features.mmap``: every entity's float32 rows in one file, one after the other.

Scaling comes from ``scaler.json``; a pickled scaler is code, so it is refused with the lines that convert it.
Called by foreign.py.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.identity import canonical
from millrace.ragged import Int64s
from millrace.store import foreign_files as files
from millrace.store.foreign_files import Foreign, Shard, corrupt
from millrace.store.layout import Column
from millrace.store.strict_json import numbers_problem

DATA = "all_features.mmap"
FEATURE_KEYS = ("features", "feature_columns")
ENTITY_KEYS = ("entities", "entity_index", "entity_offsets", "index")
CORRECT = "correct the file"


def read_series(folder: str, given: str | None) -> Foreign:
    """The folder as a series store: ``values`` (rows, features) and the ``name`` of each entity."""
    where = os.path.join(folder, "metadata.json")
    body = files.read_json(where)
    if files.SPELLINGS.get(str(stated := body.get("dtype", "float32"))) != "float32":
        raise corrupt(where, f"dtype is {stated!r}, expected float32", f"write {DATA} as float32", found=stated)
    features = _features(where, body)
    data = files.map_file(os.path.join(folder, DATA))
    files.check_given(given, "float32", data.path)
    rows, rest = divmod(data.num_bytes, 4 * len(features))
    if rest:
        raise corrupt(
            data.path, f"{data.num_bytes} bytes, expected a multiple of {4 * len(features)} ({len(features)} float32 features)",
            "copy the file again, or correct the features in metadata.json",
            column="values", expected=f"a multiple of {4 * len(features)}", found=data.num_bytes,
        )  # fmt: skip
    names, offsets = _entities(where, body, rows)
    scaler, target = _scaler(folder, features), _target(where, body)
    scaling = None if scaler is None else {
        "method": "standard", "features": features, "center": scaler["mean"], "scale": scaler["scale"],
        "dtype": "float32", "fit_on": "unknown", "per_entity": False,
    }  # fmt: skip
    texts = [name.encode() for name in names]
    text_offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    values = data.items("float32").reshape(rows, len(features))
    text = np.frombuffer(b"".join(texts), np.uint8)
    meta = {"features": features, "scaling": scaling, "target": target}
    return Foreign(
        "features", f"metadata.json with {DATA} of {len(names)} entities x {len(features)} float32 features", "series",
        {"values": Column("float32", len(features)), "name": Column("string", per="record")},
        [Shard(DATA, None, [offsets, text_offsets, values, text])], [data],
        meta={key: value for key, value in meta.items() if value is not None},
        identity=lambda: canonical([features, names, offsets.tolist(), scaler]).encode(),
    )  # fmt: skip


def _features(where: str, body: dict[str, Any]) -> list[str]:
    found = [body[key] for key in FEATURE_KEYS if isinstance(body.get(key), list)]
    if not found or not found[0]:
        raise corrupt(where, f"no list of names under {' or '.join(FEATURE_KEYS)}", CORRECT)
    if found[0] != found[-1]:
        raise corrupt(where, f"{' and '.join(FEATURE_KEYS)} differ, expected one list of names", "remove one of them")
    names = [_text(where, "feature", name) for name in found[0]]
    _check_different(where, "feature", names)
    return names


def _check_different(where: str, what: str, names: list[str]) -> None:
    for name, count in Counter(names).most_common(1):
        if count > 1:
            raise corrupt(where, f"{what} {name!r} is named {count} times, expected different names", CORRECT)


def _text(where: str, what: str, name: Any) -> str:
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str):
        raise corrupt(where, f"{what} name is {name!r}, expected a string", CORRECT)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise corrupt(where, f"{what} name {name!r} is not valid text ({error.reason})", CORRECT) from error
    return name


def _target(where: str, body: dict[str, Any]) -> Any:
    """The target as the metadata gives it, a name or a list of names; None without."""
    target = next((body[key] for key in ("target", "target_column") if body.get(key) is not None), None)
    for name in target if isinstance(target, list) else () if target is None else (target,):
        _text(where, "target", name)
    return target


def _entities(where: str, body: dict[str, Any], rows: int) -> tuple[list[str], Int64s]:
    """Names and offsets of the entities by their first row; together they must cover every row once."""
    spans = sorted(_spans(where, body), key=lambda span: span[1:])
    names, offsets = [name for name, _, _ in spans], [0]
    for name, start, end in spans:
        if start != offsets[-1] or end < start:
            how = "overlaps the one before" if start < offsets[-1] else "leaves a gap"
            how = how if end >= start else "end before they start"
            problem = f"entity {name!r} has rows [{start}, {end}), which {how}"
            remedy = "let each entity start where the one before ends (ends are exclusive)"
            raise corrupt(where, f"{problem}, expected start {offsets[-1]}", remedy, expected=offsets[-1], found=start)
        offsets.append(end)
    if offsets[-1] != rows:
        last = f"entity {names[-1]!r} ends at row {offsets[-1]}" if names else "there are no entities"
        raise corrupt(
            where, f"{last}, but {DATA} has {rows} rows", "copy both files again, or correct the entities",
            expected=rows, found=offsets[-1],
        )  # fmt: skip
    _check_different(where, "entity", names)
    return names, np.array(offsets, np.int64)


def _spans(where: str, body: dict[str, Any]) -> list[tuple[str, int, int]]:
    """(name, start, end) of each entity, from either way of writing them."""
    for key in ENTITY_KEYS:
        given = body.get(key)
        if isinstance(given, dict):
            return [(_text(where, "entity", name), *_bounds(where, name, span)) for name, span in given.items()]
        if isinstance(given, list) and all(isinstance(entry, dict) for entry in given):
            named = [(_text(where, "entity", entry.get("name", entry.get("entity"))), entry) for entry in given]
            return [(name, *_bounds(where, name, entry)) for name, entry in named]
    raise corrupt(
        where, f"no entities under {', '.join(ENTITY_KEYS)}",
        "give {name: [start, end]} or [{name, start, end}] with the rows of each entity",
    )  # fmt: skip


def _bounds(where: str, name: str, span: Any) -> tuple[int, int]:
    if isinstance(span, dict):
        span = [span.get("start", span.get("start_row")), span.get("end", span.get("end_row"))]
    if not isinstance(span, list) or len(span) != 2 or any(type(row) is not int for row in span):
        raise corrupt(where, f"entity {name!r} has rows {span!r}, expected two integers [start, end]", CORRECT)
    return span[0], span[1]


def _scaler(folder: str, features: list[str]) -> dict[str, list[float]] | None:
    """``{"mean": [...], "scale": [...]}`` from scaler.json, or None where there is no scaler."""
    where = os.path.join(folder, "scaler.json")
    if not os.path.lexists(where):
        _refuse_pickles(folder, where)
        return None
    body = files.read_json(where)
    key = "scale" if "scale" in body or "var" not in body else "var"
    mean = _numbers(where, "mean", body.get("mean"), features)
    scale = _numbers(where, key, body.get(key), features)
    for feature, number in zip(features, scale, strict=True):
        if number <= 0:
            remedy = "drop the feature, or give 1.0 to leave it as it is"
            raise corrupt(where, f"{key} of feature {feature!r} is {number}, expected more than 0", remedy)
    return {"mean": mean, "scale": [math.sqrt(number) for number in scale] if key == "var" else scale}


def _numbers(where: str, key: str, values: Any, features: list[str]) -> list[float]:
    if problem := numbers_problem(key, values, features):
        raise corrupt(where, problem, CORRECT)
    return [float(value) for value in values]


def _refuse_pickles(folder: str, where: str) -> None:
    for name in files.list_folder(folder):
        if not (name.endswith(".joblib") or (name.endswith(".pkl") and "scal" in name.lower())):
            continue
        path = os.path.join(folder, name)
        raise ConfigError(
            f"{path} may hold the scaler, but loading it would run code from the data; expected scaler.json. "
            "Where you trust it, convert it once with this line of Python: "
            f"import joblib, json; scaler = joblib.load({path!r}); "
            f'json.dump({{"mean": scaler.mean_.tolist(), "scale": scaler.scale_.tolist()}}, open({where!r}, "w"))',
            path=path,
        )
