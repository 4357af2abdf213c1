"""Views made of views: Subset picks samples, Concat puts views one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.gather.gather import Allocate, Field, Located, any_of, new_array
from millrace.identity import digest_chunks
from millrace.lazy import cached_property
from millrace.ragged import Int64s, Ragged, Spans, concatenated_ranges
from millrace.view.bitmap import PACKED, Bitmap
from millrace.view.view import View

MOST_COUNTED = 1 << 20  # samples of which a subset counts the rows for its repr


class Subset(View):
    """The samples of a view with these numbers, in this order, or where a mask is true.

    A mask with many samples is kept as bits: 133 MB for a billion. ``by`` says how the samples were chosen, in JSON, where
    they can be chosen again from that (``mr.random_split``, ``mr.k_fold``).

    >>> from millrace import Blocks, from_arrays
    >>> view = Blocks(from_arrays({"tokens": np.arange(100, dtype=np.uint16)}), length=10)
    >>> Subset(view, [3, 0])[0]["x"][:2].tolist()
    [30, 31]
    """

    def __init__(self, view: View, ids: npt.ArrayLike | Bitmap, *, by: dict[str, Any] | None = None) -> None:
        self.view, self.store, self.fields, self.by = view, view.store, view.fields, by
        chosen = _chosen(ids, len(view))
        # A bit for every sample, or a number for each that is chosen: what is smaller.
        if isinstance(chosen, Bitmap) and len(chosen) * 64 < len(view):
            chosen = chosen.ids()
        self.chosen: Int64s | Bitmap = chosen
        if isinstance(chosen, np.ndarray):
            chosen.flags.writeable = False

    @property
    def ids(self) -> Int64s:
        """The numbers of all chosen samples, 8 bytes for each."""
        return self.chosen.ids() if isinstance(self.chosen, Bitmap) else self.chosen

    def numbers(self, samples: npt.ArrayLike) -> Int64s:
        """The numbers that these samples have in the view they were chosen of."""
        wanted = self._checked(samples)
        return self.chosen.select(wanted) if isinstance(self.chosen, Bitmap) else self.chosen[wanted]

    def __len__(self) -> int:
        return len(self.chosen)

    @cached_property
    def stores(self) -> tuple[Any, ...]:
        return self.view.stores

    def spans(self, samples: npt.ArrayLike, axis: str | None = None) -> Spans:
        return self.view.spans(self.numbers(samples), axis)

    def records(self, samples: npt.ArrayLike) -> Int64s:
        return self.view.records(self.numbers(samples))

    def located(self, samples: Int64s) -> Located:
        return self.view.located(self.numbers(samples))

    def reads(self, samples: Int64s) -> Iterator[tuple[Any, Int64s, Int64s]]:
        return self.view.reads(self.numbers(samples))

    def shard_bytes(self) -> Int64s:
        return self.view.shard_bytes()

    def plan(self) -> list[tuple[Any, ...]] | None:
        rest = self.view.plan() if type(self) is Subset else None
        if rest is None:
            return None
        if isinstance(self.chosen, Bitmap):
            return [("select", self.chosen.words, self.chosen.ranks), *rest]
        return [("take", self.chosen), *rest]

    def unused_rows(self) -> int | None:
        """Rows that no chosen sample delivers; None for very many, for several views, and for a split by time."""
        if len(self) > MOST_COUNTED or len(leaves(self)) > 1 or self.store.cuts is not None:
            return None
        spans = self.spans(np.arange(len(self)))
        pieces = _delivered(self.fields, spans, self.store.layout.primary)
        starts, stops = (np.concatenate(edges) for edges in zip(*pieces, strict=True))
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], stops[order]
        reached = np.concatenate(([0], np.maximum.accumulate(stops)))[:-1] if len(stops) else stops
        return int(self.store.num_rows - np.maximum(stops - np.maximum(starts, reached), 0).sum())

    @cached_property
    def ids_hash(self) -> str:
        """The same for a mask and for the numbers of its samples."""
        chunks = self.chosen.chunks() if isinstance(self.chosen, Bitmap) else [self.chosen]
        return digest_chunks(8 * len(self), (chunk.astype("<i8").tobytes() for chunk in chunks))

    def spec(self) -> dict[str, Any]:
        found = {"view": "subset", "of": self.view.spec(), "ids": self.ids_hash}
        return found if self.by is None else {**found, "by": self.by}


def _chosen(ids: npt.ArrayLike | Bitmap, length: int) -> Int64s | Bitmap:
    """Numbers of samples that were checked, or the bits of a mask."""
    if isinstance(ids, Bitmap):
        if ids.length != length:
            raise ConfigError(f"a bitmap of {ids.length} samples for {length}; give one bit per sample")
        return ids
    chosen = np.asarray(ids)
    if chosen.dtype == PACKED:
        if chosen.shape != (-(-length // 8),):
            raise ConfigError(f"bits of shape {chosen.shape} for {length} samples; give a byte for each eight")
        return Bitmap(chosen, length)
    if chosen.dtype == bool:
        if chosen.shape != (length,):
            raise ConfigError(f"a mask of shape {chosen.shape} for {length} samples; give one value per sample")
        return Bitmap.of(chosen)
    if chosen.size == 0:
        chosen = np.zeros(0, np.int64)
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
        raise ConfigError(f"ids are {chosen.dtype} of shape {chosen.shape}; expected 1-D integers or a mask")
    if len(chosen) and (chosen.min() < 0 or chosen.max() >= length):
        bad = chosen.min() if chosen.min() < 0 else chosen.max()
        raise ConfigError(f"id {bad} is out of range; the view has samples 0 to {length - 1}")
    return chosen.astype(np.int64)


class Concat(View):
    """The samples of several views one after the other; all must deliver the same fields.

    Tokens of different tokenizers are refused: one id would stand for two texts. ``allow_mixed_tokenizers=True`` joins them
    all the same, such as for a run that began so. A store without a tokenizer of its own fits every other.

    >>> from millrace import Blocks, from_arrays
    >>> a, b = (Blocks(from_arrays({"tokens": np.arange(n, dtype=np.uint16)}), length=10) for n in (100, 50))
    >>> len(Concat([a, b])) == len(a) + len(b)
    True
    """

    def __init__(self, views: Sequence[View], *, allow_mixed_tokenizers: bool = False) -> None:
        if not views:
            raise ConfigError("Concat of no views; give at least one")
        check_views(views)
        self.views = tuple(views)
        self.store, self.fields = views[0].store, views[0].fields
        shapes = [[(f.name, f.dtype, f.shape, *_fill_of(f)) for f in view.fields] for view in views]
        for number, found in enumerate(shapes):
            if found != shapes[0]:
                raise ConfigError(f"view {number} delivers {found}, view 0 {shapes[0]}; Concat needs the same of all")
            if _labels(views[number]) != _labels(views[0]):
                raise ConfigError(
                    f"view {number} has other features than view 0, or another order; Concat would mix them"
                )
        _check_dictionaries(self)
        if not allow_mixed_tokenizers:
            _check_tokenizers(self.views)
        self._ends = np.cumsum([len(view) for view in views])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @cached_property
    def stores(self) -> tuple[Any, ...]:
        return tuple({store.fingerprint: store for view in self.views for store in view.stores}.values())

    def parts(self, samples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """Which view each sample is of, and its number there."""
        wanted = self._checked(samples)
        views = np.searchsorted(self._ends, wanted, side="right")
        return views, wanted - np.concatenate(([0], self._ends))[views]

    def spans(self, samples: npt.ArrayLike, axis: str | None = None) -> Spans:
        """Rows in the store of each sample's own view."""
        views, inside = self.parts(samples)
        each = {k: self.views[k].spans(inside[views == k], axis) for k in np.unique(views).tolist()}
        counts = np.ones(len(views), np.int64)  # pieces of each sample
        for k, found in each.items():
            counts[views == k] = 1 if found.offsets is None else np.diff(found.offsets)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        starts, stops = np.empty((2, int(offsets[-1])), np.int64)
        for k, found in each.items():
            mine = concatenated_ranges(offsets[:-1][views == k], counts[views == k])
            starts[mine], stops[mine] = found.starts, found.stops
        is_plain = all(found.offsets is None for found in each.values())
        return Spans(starts, stops, None if is_plain else offsets)

    def records(self, samples: npt.ArrayLike) -> Int64s:
        views, inside = self.parts(samples)
        found = np.empty(len(views), np.int64)
        for k in np.unique(views).tolist():
            found[views == k] = self.views[k].records(inside[views == k])
        return found

    def located(self, samples: Int64s) -> Located:
        views, inside = self.parts(samples)
        parts = {k: self.views[k].located(inside[views == k]) for k in np.unique(views).tolist()}
        return _LocatedConcat(self.fields, views, parts)

    def reads(self, samples: Int64s) -> Iterator[tuple[Any, Int64s, Int64s]]:
        views, inside = self.parts(samples)
        for k in np.unique(views).tolist():
            yield from self.views[k].reads(inside[views == k])

    def shard_bytes(self) -> Int64s:
        return np.concatenate([view.shard_bytes() for view in self.views])

    def plan(self) -> list[tuple[Any, ...]] | None:
        each = [view.plan() for view in self.views] if type(self) is Concat else [None]
        return None if None in each else [("concat", self._ends, each)]

    def unused_rows(self) -> int | None:
        if len(self.stores) < len(self.views):  # what one view leaves out, another may deliver
            return None
        each = [view.unused_rows() for view in self.views]
        return None if None in each else sum(rows or 0 for rows in each)

    def spec(self) -> dict[str, Any]:
        return {"view": "concat", "of": [view.spec() for view in self.views]}


def _delivered(fields: Sequence[Field], spans: Spans, axis: str) -> list[tuple[Int64s, Int64s]]:
    """The pieces of spans that are delivered of an axis: rows between lookback and horizon are not."""
    dense = {(field.first, field.length) for field in fields if field.axis is not None and field.length is not None}
    open_ended = [field for field in fields if field.axis is not None and field.length is None]
    whole = [field.pad for field in [own for own in open_ended if own.axis == axis] or open_ended]
    if whole and spans.offsets is None and None not in whole:
        return [(spans.starts, spans.starts + np.minimum(spans.lengths, max(pad or 0 for pad in whole)))]
    if whole or spans.offsets is not None or not dense:
        return [(spans.starts, spans.stops)]
    return [(spans.starts + first, spans.starts + first + length) for first, length in dense]


def leaves(view: View) -> list[View]:
    """The views of stores that a view is made of."""
    if isinstance(view, Subset):
        return leaves(view.view)
    return [leaf for part in view.views for leaf in leaves(part)] if isinstance(view, Concat) else [view]


def check_views(views: Sequence[Any]) -> None:
    for number, view in enumerate(views):
        if not hasattr(view, "fields"):
            raise ConfigError(
                f"source {number} is {type(view).__name__}, not a view; make one, such as mr.Records(store)"
            )


def is_even(view: View) -> bool:
    """Whether all samples have the same number of rows: those of windows have, those of ``Packed`` differ."""
    if isinstance(view, Subset):
        return is_even(view.view)
    if isinstance(view, Concat):
        parts = [part for part in view.views if len(part)]
        return all(map(is_even, parts)) and len({int(part.spans([0]).lengths[0]) for part in parts}) == 1
    is_dense = all(field.axis is None or field.length is not None for field in view.fields)
    return is_dense and view.spans([0]).offsets is None


def rows_delivered(view: View, samples: npt.ArrayLike) -> Int64s:
    """Rows of each sample, without those that ``pad`` cuts off."""
    lengths, axis = view.spans(samples).lengths, view.store.layout.primary
    pads = [field.pad for field in view.fields if field.axis == axis and field.measure is None]
    return lengths if not pads or None in pads else np.minimum(lengths, max(pad or 0 for pad in pads))


def _fill_of(field: Field) -> tuple[str, ...]:
    """What stands behind the rows of a padded field, where it is not zero. NaN is NaN."""
    return () if field.fill is None else (f"fill={field.fill!r}",)


def _labels(view: View) -> Any:
    """What stands on the last axis of each field, for views that know."""
    leaf = leaves(view)[0]
    return getattr(leaf, "features", None), getattr(leaf, "labels", None)


def _check_dictionaries(view: Concat) -> None:
    """Codes are delivered, so they must mean the same everywhere; a dictionary that another continues is fine."""
    longest: dict[str, tuple[str, ...]] = {}
    for leaf in leaves(view):
        for field in leaf.fields:
            column = leaf.store.layout.columns.get(field.column)
            mine = (column.values if column is not None else None) or ()
            known = longest.get(field.name, ())
            short, longest[field.name] = sorted((mine, known), key=len)
            if longest[field.name][: len(short)] != short:
                raise ConfigError(
                    f"dictionary column {field.name!r} stands for {list(mine)} in one view and {list(known)} in another, "
                    "so that codes differ; prepare both with the same values="
                )


def _check_tokenizers(views: Sequence[View]) -> None:
    """Refuses tokens of different tokenizers. What is joined already, such as the classes of one view, may be joined again."""
    tokenizers = [(number, _tokenizers(view)) for number, view in enumerate(views)]
    named = [(number, by_hash) for number, by_hash in tokenizers if by_hash]
    for number, by_hash in named[1:]:
        first, expected = named[0]
        if by_hash.keys() != expected.keys():
            raise ConfigError(
                f"view {number} has tokens of {' and '.join(by_hash.values())}, view {first} of "
                f"{' and '.join(expected.values())}, and these tokenizers differ: an id would stand for two texts. Prepare the "
                "stores with one tokenizer, or give allow_mixed_tokenizers=True"
            )


def _tokenizers(view: View) -> dict[str, str]:
    """The names of the tokenizers that made a view's tokens, by their hashes. Stores of other tools do not say theirs."""
    by_hash = {}
    for leaf in leaves(view):
        manifest = getattr(leaf.store.root, "manifest", None)
        if manifest is not None and manifest.tokenizer and any(field.column == "tokens" for field in leaf.fields):
            by_hash[str(manifest.tokenizer["hash"])] = f"{manifest.tokenizer.get('name')!r} ({leaf.store.root.path})"
    return by_hash


class _LocatedConcat(Located):
    """Samples of several views: each view fills its own, then they are put in the order asked for."""

    def __init__(self, fields: Sequence[Field], views: Int64s, parts: dict[int, Located]) -> None:
        self._fields, self._views, self._parts = fields, views, parts
        # How many samples of each view stand before each place, so that any run of samples can be filled.
        self._before = {k: np.concatenate(([0], np.cumsum(views == k))) for k in parts}

    def is_cold(self) -> bool | None:
        return any_of(part.is_cold() for part in self._parts.values())

    def fill(self, first: int, last: int, allocate: Allocate = new_array) -> dict[str, Any]:
        views = self._views[first:last]
        filled = {}
        for k in np.unique(views).tolist():
            low, high = int(self._before[k][first]), int(self._before[k][last])
            filled[k] = self._parts[k].fill(low, high)
        out: dict[str, Any] = {}
        offsets: dict[Any, Int64s] = {}  # columns that share theirs in every part have one array here too
        for field in self._fields:
            parts = {k: found[field.name] for k, found in filled.items()}
            if field.axis is not None and field.length is None and field.pad is None:
                found = out[field.name] = _interleave(field, views, parts, allocate)
                found.offsets = offsets.setdefault(tuple(id(part.offsets) for part in parts.values()), found.offsets)
                continue
            shape = (last - first, *(n or 0 for n in field.shape))
            array = np.empty(shape, object) if field.is_text else allocate(field.name, shape, field.dtype)
            for k, part in parts.items():
                array[views == k] = part
            out[field.name] = array
        return out


def _interleave(field: Field, views: Int64s, parts: dict[int, Ragged], allocate: Allocate) -> Ragged:
    taken = dict.fromkeys(parts, 0)
    items = []
    for k in views.tolist():
        items.append(parts[k][taken[k]])
        taken[k] += 1
    offsets = np.concatenate(([0], np.cumsum([len(item) for item in items], dtype=np.int64)))
    values = allocate(field.name, (int(offsets[-1]), *field.tail), field.dtype)
    if items:
        np.concatenate(items, out=values)
    return Ragged(values, offsets)
