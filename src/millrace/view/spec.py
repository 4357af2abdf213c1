"""Rebuilds views from their specs: for cursors, explanations, worker processes and other machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError, ResumeMismatch
from millrace.identity import digest_chunks
from millrace.lazy import attachment
from millrace.ragged import Array
from millrace.view.bitmap import PACKED, Bitmap
from millrace.view.blocks import Blocks
from millrace.view.compose import Concat, Subset
from millrace.view.packed import Packed
from millrace.view.records import Records
from millrace.view.view import View
from millrace.view.windows import Windows

_LEAVES: dict[str, Callable[..., View]] = {"blocks": Blocks, "windows": Windows, "records": Records, "packed": Packed}


def from_spec(
    spec: Mapping[str, Any],
    store: Any,
    arrays: Mapping[str, npt.ArrayLike] | None = None,
    *,
    allow_mixed_tokenizers: bool = False,
) -> View:
    """The view that ``view.spec()`` described, over a store or ``{fingerprint: store}``.

    ``arrays`` holds the ids of subsets by their hash, as ``view_arrays`` collects them. ``allow_mixed_tokenizers`` is that
    of ``Concat``: a spec does not say it.
    """
    try:
        return _rebuilt(spec, store, arrays, allow_mixed_tokenizers)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"this is no spec of a view: {spec}: {error!r}") from error


def _rebuilt(spec: Mapping[str, Any], store: Any, arrays: Mapping[str, npt.ArrayLike] | None, mixed: bool) -> View:
    kind = spec["view"]
    if kind == "subset":
        of = from_spec(spec["of"], store, arrays, allow_mixed_tokenizers=mixed)
        ids, by = (arrays or {}).get(spec["ids"]), spec.get("by")
        if ids is None and by is not None:
            ids = attachment("selection")(of, by)
        if ids is None:
            raise ConfigError(f"the ids of a subset ({spec['ids']}) are missing; give arrays={{hash: ids}}")
        subset = Subset(of, ids, by=by)
        if subset.ids_hash != spec["ids"]:
            raise ResumeMismatch(
                f"the ids given have hash {subset.ids_hash}, the spec says {spec['ids']}; give those the spec was made with",
                part="view", expected=spec["ids"], found=subset.ids_hash,
            )  # fmt: skip
        return subset
    if kind == "concat":
        views = [from_spec(part, store, arrays, allow_mixed_tokenizers=mixed) for part in spec["of"]]
        return Concat(views, allow_mixed_tokenizers=mixed)
    if kind not in _LEAVES:
        raise ConfigError(f"view {kind!r} is unknown; expected one of {', '.join((*_LEAVES, 'subset', 'concat'))}")
    options = {key: value for key, value in spec.items() if key not in ("view", "store", "split", "where")}
    return _LEAVES[kind](_part(spec, store), **options)


def _part(spec: Mapping[str, Any], store: Any) -> Any:
    """The split of the store that a spec names, and the records of it that were chosen."""
    wanted = spec.get("store")
    if isinstance(store, Mapping):
        if wanted not in store:
            raise ResumeMismatch(f"no store with fingerprint {wanted} was given; open that of the spec", part="store")
        store = store[wanted]
    root = store.root
    if root.fingerprint != wanted:
        raise ResumeMismatch(
            f"the spec belongs to store {wanted}, this one is {root.fingerprint}; open the store (or snapshot) it was made with",
            part="store", expected=wanted, found=root.fingerprint,
        )  # fmt: skip
    split, where = spec.get("split"), spec.get("where")
    part = root if split is None else root.split(split)
    return part if where is None else part.where(where)


def view_arrays(view: View) -> dict[str, Any]:
    """The arrays a spec names by hash: what ``from_spec`` needs as ``arrays``. Samples that can be chosen again are none."""
    if isinstance(view, Subset):
        chosen = view.chosen.packed if isinstance(view.chosen, Bitmap) else view.chosen
        own = {view.ids_hash: chosen} if view.by is None else {}
        return {**own, **view_arrays(view.view)}
    if isinstance(view, Concat):
        return {key: ids for part in view.views for key, ids in view_arrays(part).items()}
    return {}


def array_of_bytes(key: str, data: bytes) -> Array:
    """An array of ``view_arrays`` from its bytes. Its hash says whether they are numbers; if not they are bits."""
    are_numbers = len(data) % 8 == 0 and digest_chunks(len(data), [data]) == key
    return np.frombuffer(data, np.int64 if are_numbers else PACKED)
