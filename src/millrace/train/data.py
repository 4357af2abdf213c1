"""From a configuration to a store, its views, and a model that fits them. Refuses what does not fit."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from millrace.errors import ConfigError, MillraceError, StoreNotFound
from millrace.feed.mixture import Mixture
from millrace.prepare.functions import load_function
from millrace.prepare.table.table import prepare_table
from millrace.prepare.text.text import prepare_text
from millrace.store import platform
from millrace.store.open import open_store
from millrace.store.store import Store
from millrace.train.model_state import circle_in
from millrace.train.models.forecaster import Forecaster, Shapes
from millrace.train.models.gpt import GPT
from millrace.train.models.layers import Layers
from millrace.train.run_folder import DATA, RunFile, as_begun, input_changes, read_run
from millrace.train.settings import FORECASTERS, Config, Data
from millrace.train.start_checks import why_empty
from millrace.view.blocks import Blocks
from millrace.view.compose import Concat
from millrace.view.packed import Packed
from millrace.view.records import Records
from millrace.view.view import View, row_column
from millrace.view.windows import Windows

KINDS = {"gpt": "text", "lstm": "series", "transformer": "series"}
ROUND = 64  # a vocabulary is rounded up to this: matrix products are faster on such sizes
MAX_SCAN = 200_000_000  # tokens read to find the largest id, if a store keeps no tokenizer: a tenth of a second


def store_path(config: Config, run: Path) -> str:
    """The path of a run's store: ``data.store``, or the one made from ``data.input``."""
    if config.data.sources:
        return str(config.data.sources[0]["store"])
    if not config.data.store and not config.data.input:
        raise ConfigError("no data: give --store DIR for prepared data, or --input FILE for a small file")
    if config.data.store and os.path.realpath(config.data.store) == os.path.realpath(run):
        raise ConfigError(f"{run} is the store itself; give the run a folder of its own with --run")
    return config.data.store or str(run / DATA)


def prepare_input(config: Config, run: Path, before: RunFile | None) -> None:
    """Prepares ``data.input`` inside the run folder, as ``millrace prepare`` does. A continued run keeps its store."""
    if not config.data.input or (before is not None and (run / DATA / "store.json").exists()):
        return
    former = read_run(run) if before is None else None
    if former is not None and input_changes(former, config):
        platform.remove(run / DATA)  # of settings that the run no longer has
    kind = KINDS.get(config.model.kind)
    if kind is None:
        raise ConfigError(f"--input is prepared for gpt, lstm and transformer; prepare a store for {config.model.kind}")
    prepare = prepare_text if kind == "text" else prepare_table
    partial = run / f"{DATA}.partial"
    is_begun = partial.exists()
    try:
        prepare(config.data.input, run / DATA, **config.data.prepare)
    except MillraceError as error:
        if before is None and not is_begun:  # nothing is lost, and the next input is not refused
            platform.remove(partial)
        names_field = "text_field=" in str(error)
        if not isinstance(error, ConfigError) and not names_field:
            raise
        example = "tokenizer='bytes'" if kind == "text" else "entity='sensor', time='date'"
        example = "text_field='body'" if names_field else example
        raise ConfigError(
            f"--input {config.data.input}: {error} (options of the preparation are keys of [data.prepare], e.g. "
            f'--set "data.prepare={{{example}}}")'
        ) from error


def open_pinned(path: str | os.PathLike[str], fingerprint: str | None) -> Store:
    """The store of a run as it was when the run began, even after later appends."""
    store = open_store(path)
    if fingerprint is None or store.fingerprint == fingerprint:
        return store
    if store.manifest is None:
        raise ConfigError(
            f"{path} has changed since the run began (fingerprint {store.fingerprint}, then {fingerprint}); start another run"
        )
    try:
        return open_store(path, snapshot=fingerprint)
    except StoreNotFound as error:
        raise ConfigError(
            f"{path} does not hold what the run began with (snapshot {fingerprint}): it is another store, or that snapshot was "
            "removed; give the run's own store, or start another with --run"
        ) from error


def check_kind(config: Config, store: Store) -> None:
    """Refuses a store that the model cannot be trained on."""
    wanted = KINDS.get(config.model.kind)
    columns = store.layout.columns.values()
    has_tokens = any(column.axis and not column.shape and column.dtype[:4] == "uint" for column in columns)
    fits = has_tokens if wanted == "text" and store.kind != "text" else store.kind == wanted
    if wanted == "series" and store.kind == "records":
        fits = (config.data.column or "values") in store.layout.columns
    if wanted is not None and not fits:
        remedy = "model.kind = 'lstm' or 'transformer'" if store.kind == "series" else "model.kind = 'gpt'"
        raise ConfigError(
            f"{store.path} is a {store.kind} store, and model.kind = {config.model.kind!r} needs a {wanted} store; "
            f"take another store, or {remedy}"
        )


def training_view(store: Store, config: Config) -> View:
    """The view of the train split, or of those of all sources, mixed by their weights."""
    views = []
    for own in _stores(store, config):
        check_kind(config, own)
        part = own.split(config.data.split)
        views.append(_view(part, config))
        if not len(views[-1]):
            raise ConfigError(why_empty(views[-1], part, config.data))
    if not config.data.sources:
        return views[0]
    weights = [source["weight"] for source in config.data.sources]
    mixed = config.data.allow_mixed_tokenizers
    return Mixture(list(zip(views, weights, strict=True)), allow_mixed_tokenizers=mixed)


def validation_view(store: Store, config: Config) -> View | None:
    """The view of the val split, of all sources one after the other; None where no sample fits into any."""
    parts = [own.split(config.data.val_split) for own in _stores(store, config) if config.data.val_split in own.splits]
    views = [view for part in parts if len(view := _view(part, config))]
    mixed = config.data.allow_mixed_tokenizers
    return None if not views else views[0] if len(views) == 1 else Concat(views, allow_mixed_tokenizers=mixed)


def _stores(store: Store, config: Config) -> list[Store]:
    """The store of a run, or all of its sources, of which it is the first; their tokens must mean the same."""
    stores = [store, *(open_store(source["store"]) for source in config.data.sources[1:])]
    known = [
        None if own.manifest is None or not own.manifest.tokenizer else own.manifest.tokenizer["hash"] for own in stores
    ]
    for own, tokenizer in zip(stores, known, strict=True):
        if tokenizer != known[0] and not config.data.allow_mixed_tokenizers:
            raise ConfigError(
                f"{own.path} has another tokenizer than {store.path}, so their tokens differ; prepare both with the same, or set "
                "data.allow_mixed_tokenizers = true"
            )
    return stores


def _view(part: Store, config: Config) -> View:
    data = config.data
    if KINDS.get(config.model.kind, part.kind) == "text":
        if data.pack:
            return Packed(part, length=data.length, column=data.column or None)
        return Blocks(part, length=data.length, stride=data.stride or None, column=data.column or None)
    if KINDS.get(config.model.kind, part.kind) == "series":
        return windows_of(part, data)
    return Records(part)


def windows_of(part: Store, data: Data) -> Windows:
    """The windows of a store or split, as the configuration describes them."""
    return Windows(
        part, lookback=data.lookback, horizon=data.horizon, stride=data.stride or 1, lead=data.lead,
        target=data.target or None, inputs=data.inputs or None, include=data.include, column=data.column or None,
    )  # fmt: skip


def has_mask(store: Store, column: str) -> bool:
    """Whether a store records which values of a row column were observed."""
    mask, values = store.layout.columns.get("mask"), store.layout.columns[column]
    return mask is not None and mask.axis == values.axis and (mask.shape or (1,)) == (values.shape or (1,))


def with_mask_of(config: Config, store: Store, before: RunFile | None, say: Callable[[str], None]) -> Config:
    """The configuration with the mask of the store, unless the run began without one; says what it added."""
    masked = with_mask(config, store)
    if before is None:
        if masked != config:
            say("added 'mask' to data.include: the store says which values are missing, and no loss counts them")
        return masked
    begun = as_begun(config, before)
    if "mask" in masked.data.include and "mask" not in begun.data.include:
        say("note: the run began without the mask of its store, so it learns the filled gaps; start another with --run")
    return begun


def with_mask(config: Config, store: Store) -> Config:
    """Adds the mask for forecasters: without it they would learn the values that fill gaps."""
    is_ready = config.model.kind not in FORECASTERS or "mask" in config.data.include
    if is_ready or store.kind != "series":
        return config
    if not has_mask(store, row_column(store, config.data.column or None, "values", "Windows")):
        return config
    return replace(config, data=replace(config.data, include=(*config.data.include, "mask")))


def vocabulary(store: Store, config: Config) -> int:
    """How many ids the model has: ``model.vocabulary``, or those of the store, rounded up."""
    described = None if store.manifest is None else store.manifest.tokenizer
    stores = _stores(store, config)
    sizes = [own.manifest.tokenizer["vocab_size"] for own in stores if own.manifest and own.manifest.tokenizer]
    known = max(sizes) if described else store.meta.get("vocabulary")
    wanted = config.model.vocabulary
    if known is None and not wanted:
        raise ConfigError(f"{store.path} does not say its vocabulary; set model.vocabulary, e.g. 50304 for GPT-2's")
    unsaid = [own for own in stores if own.manifest is None or not own.manifest.tokenizer]
    needed = max([int(known or 0), *sizes, *(_largest_token(own, config.data.column) + 1 for own in unsaid)])
    if wanted and needed > wanted:
        or_not = ", or leave it out" if known is not None else ""
        raise ConfigError(
            f"model.vocabulary = {wanted} is smaller than the vocabulary of {store.path}, which has ids up to {needed - 1}; "
            f"set model.vocabulary to {needed} or more{or_not}"
        )
    return wanted or -(-needed // ROUND) * ROUND


def _largest_token(store: Store, name: str) -> int:
    """The largest id among the first ``MAX_SCAN`` tokens."""
    column: Any = store.columns[row_column(store, name or None, "tokens", "Blocks")]
    largest, num_tokens = 0, 0
    for _, piece in column.pieces():
        for start in range(0, len(piece), 1 << 24):
            part = piece[start : start + (1 << 24)]
            largest, num_tokens = max(largest, int(np.max(part, initial=0))), num_tokens + len(part)
            if num_tokens > MAX_SCAN:
                return largest
    return largest


def build_model(config: Config, store: Store, view: View) -> nn.Module:
    """The model of a configuration, sized for the store and the view."""
    model = config.model
    if ":" in model.kind:
        return _own_model(model.kind, model.options)
    sizes: dict[str, Any] = {name: getattr(model, name) for name in ("layers", "heads", "width", "dropout")}
    built: nn.Module
    if model.kind == "gpt":
        separator = _separator(store) if model.document_mask else None
        built = GPT(vocabulary=vocabulary(store, config), length=config.data.length, separator=separator, **sizes)
    else:
        built = Forecaster(shapes_of(view, store), kind=model.kind, normalize=model.normalize, **sizes)
    for module in built.modules():
        if isinstance(module, Layers):
            module.recompute = config.train.recompute
    return built


def _separator(store: Store) -> int:
    described = None if store.manifest is None else store.manifest.tokenizer
    if not described:
        raise ConfigError(
            f"model.document_mask needs the id that ends a document, and {store.path} keeps no tokenizer; prepare it with "
            "millrace prepare text, or leave the mask out"
        )
    return int(described["end"])


def shapes_of(view: Any, store: Store) -> Shapes:
    """The sizes of a view's windows, for a forecaster."""
    fields, labels = {field.name: field for field in view.fields}, view.labels

    def width(name: str) -> int:
        return int(fields[name].tail[-1]) if name in fields else 0

    def categories(name: str) -> tuple[int, ...]:
        if name not in fields:
            return ()
        known = store.meta.get("categories", {})
        missing = [column for column in labels[name] if column not in known]
        if missing or len(labels[name]) != width(name):
            raise ConfigError(
                f"{name} has {width(name)} columns, and meta['categories'] names the values of {', '.join(known) or 'none'}; "
                "prepare the store with millrace prepare table"
            )
        return tuple(len(known[column]) for column in labels[name])

    are_inputs = all(label in labels["x"] for label in labels["y"])
    return Shapes(
        features=width("x"), outputs=width("y"), targets=tuple(map(labels["x"].index, labels["y"])) if are_inputs else (),
        lookback=view.lookback, horizon=view.horizon, static=width("static"), known_future=width("known_future"),
        categories=categories("categorical"), known_categories=categories("known_categorical"),
        static_categories=categories("static_categorical"), has_mask="mask" in fields,
    )  # fmt: skip


def _own_model(name: str, options: dict[str, Any]) -> nn.Module:
    """A user's model: calls ``module:callable`` with ``model.options``. The result must be a module."""
    made: Any = load_function(name, "model.kind =")
    if not isinstance(made, nn.Module):
        try:
            inspect.signature(made).bind(**options)
        except TypeError as error:
            raise ConfigError(f"model.options = {options}: {error} of {name}; give its arguments") from error
        try:
            made = made(**options)
        except RecursionError as error:
            raise ConfigError(f"model.kind = {name!r} calls itself without end; look at what it calls") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"model.kind = {name!r} gave {type(made).__name__}; expected a torch.nn.Module that takes a batch and returns a loss"
        )
    if (circle := circle_in(made)) is not None:
        raise ConfigError(
            f"model.kind = {name!r} holds itself, as {circle}, so it cannot be saved; keep that module outside, e.g. in a list"
        )
    return made
