"""The keys of a training run: one frozen dataclass per section of the TOML file, each key with its default and its meaning.

``config.py`` reads and checks them; ``keys.py`` prints them as the reference of ``millrace train --keys``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


def key(default: Any, meaning: str, **limits: Any) -> Any:
    """A field with its default and meaning. ``limits``: at ``least``, ``below``, or one of some ``choices``."""
    metadata = {"meaning": meaning, "least": None, "below": None, "choices": (), **limits}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Data:
    """Which store, and what one sample of it is."""

    store: str = key("", "The prepared store, or a layout of another tool. `--store` sets it.")
    input: str = key("", "A small file to prepare within the run, instead of a store. `--input` sets it.")
    sources: tuple[dict[str, Any], ...] = key(
        (),
        "Several stores instead of one: a table [[data.sources]] for each, with its `store` and `weight`. The weights are "
        "shares of samples, and may change when a run continues.",
    )
    allow_mixed_tokenizers: bool = key(False, "Several stores: train on tokens of different tokenizers.")
    column: str = key("", "The row column of samples. Empty: tokens for text, values for series, else the only one.")
    split: str = key("train", "The split to train on.")
    val_split: str = key("val", "The split to evaluate on. A store without it is trained without evaluation.")
    length: int = key(256, "Text: tokens of one sample.", least=1)
    pack: bool = key(False, "Text: samples hold whole documents side by side, which do not see each other.")
    lookback: int = key(64, "Series: rows the model sees.", least=1)
    horizon: int = key(8, "Series: rows the model forecasts.", least=1)
    lead: int = key(0, "Series: rows between lookback and horizon.", least=0)
    stride: int = key(0, "Rows from the start of one sample to the next. 0: `length` for text, 1 for series.", least=0)
    inputs: tuple[str, ...] = key((), "Series: features the model sees. Empty: those the store names, else all.")
    target: tuple[str, ...] = key((), "Series: features to forecast. Empty: those the store names, else all.")
    include: tuple[str, ...] = key(
        (),
        "Series: what else the model gets: static, static_categorical, categorical, known_future, mask, time. "
        "lstm and transformer always get the mask of a store that has one.",
    )
    depth: int = key(4, "Batches that the feed keeps ready.", least=1, below=4097)
    queue: str = key(
        "", "A queue such as redis://host/0, through which `millrace worker` makes batches. No password here."
    )
    transform: str = key(
        "", "A function(batch, rng) as module:function, for training batches. Its random numbers follow the position."
    )
    processes: bool | str = key(
        False,
        "Whether worker processes run `transform`, and how they start. Without them, threads do. auto: by measuring.",
        choices=(False, True, "auto", "forkserver", "spawn"),
    )
    workers: int = key(
        0,
        "Threads or processes that make batches, on each rank. 0: by cores and bytes. `millrace bench --autotune` finds the best.",
        least=0,
        below=4097,
    )
    prepare: dict[str, Any] = key({}, "Options for preparing `input`, e.g. {tokenizer = 'bytes'}.")  # noqa: RUF009 - it is a field


@dataclass(frozen=True)
class Model:
    """Which model, and its size."""

    kind: str = key("gpt", "gpt, lstm, transformer, or your own as module:callable.")
    layers: int = key(4, "Layers.", least=1)
    heads: int = key(4, "Attention heads of a layer. They must divide `width`. lstm has none.", least=1)
    width: int = key(128, "Numbers in a hidden state.", least=1)
    dropout: float = key(0.0, "Share of hidden numbers set to 0 while training.", least=0, below=1)
    vocabulary: int = key(0, "gpt: number of token ids. 0: that of the store, rounded up to a multiple of 64.", least=0)
    document_mask: bool = key(False, "gpt: attention stays within a document.")
    normalize: bool = key(
        True, "lstm, transformer: windows enter relative to their last row, in units of their spread."
    )
    options: dict[str, Any] = key({}, "Keyword arguments for module:callable.")  # noqa: RUF009 - it is a field


@dataclass(frozen=True)
class Train:
    """How long, how much at once, in which precision, on what."""

    max_steps: int = key(100, "Steps of the whole run. A finished run continues when you raise it.", least=1)
    batch: int = key(32, "Samples of one step, over all ranks and micro-batches.", least=1, below=2**31)
    micro_batch: int = key(0, "Samples of one forward pass on a rank. 0: its whole share of the batch.", least=0)
    halve_on_oom: bool = key(False, "When memory runs out, halve `micro_batch` and repeat the step.")
    seed: int = key(0, "Seed of weights, sample order and dropout.", least=0)
    log_every: int = key(10, "Steps between two lines of progress.", least=1)
    precision: str = key("fp32", "Number format of the computation.", choices=("fp32", "bf16", "fp16", "fp64"))
    clip: float = key(1.0, "Largest norm of the gradient; longer ones are shortened. 0: no limit.", least=0)
    device: str = key("auto", "auto takes a GPU if there is one.", choices=("auto", "cpu", "cuda"))
    threads: int = key(
        0,
        "Threads of torch on the CPU. 0: OMP_NUM_THREADS, else the cores, shared by the ranks; "
        "a continued run keeps its number.",
        least=0,
        below=4096,
    )
    parallel: str = key("ddp", "Several ranks: ddp copies the model, fsdp2 splits it.", choices=("ddp", "fsdp2"))
    compile: bool = key(False, "Compile the model with torch.compile.")
    recompute: bool = key(False, "Compute activations again in the backward pass: less memory, more time.")
    deterministic: bool = key(False, "GPU: use only kernels that give the same bits every time. CPUs always do.")
    tensorboard: bool = key(True, "Write TensorBoard files if TensorBoard is installed.")
    timeout_s: int = key(600, "Seconds a rank waits for the others.", least=1)


@dataclass(frozen=True)
class Optimizer:
    """Which optimiser, and its learning rate over the steps."""

    name: str = key("adamw", "The optimiser.", choices=("adamw", "adafactor", "sgd"))
    lr: float = key(1e-3, "Highest learning rate.", least=0, below=1e9)
    min_lr: float = key(0.0, "Learning rate at the end of the schedule.", least=0)
    schedule: str = key("cosine", "How the learning rate falls.", choices=("cosine", "linear", "constant"))
    warmup: int = key(0, "Steps in which the learning rate rises from 0 to `lr`.", least=0)
    decay_steps: int = key(0, "Last step of the schedule. 0: train.max_steps.", least=0)
    weight_decay: float = key(0.1, "Weight decay.", least=0)
    betas: tuple[float, float] = key((0.9, 0.95), "adamw: decay of the running means of gradient and square.")
    momentum: float = key(0.0, "sgd: momentum.", least=0)


@dataclass(frozen=True)
class Checkpoint:
    """When state is saved, and how much of it is kept.

    A run also saves at its end, on SIGTERM and Ctrl-C, and after its best evaluation.
    """

    every: int = key(100, "Steps between two checkpoints. 0: only at the end.", least=0)
    every_minutes: float = key(0.0, "Minutes between two checkpoints. 0: only by steps.", least=0, below=1e9)
    keep: int = key(2, "How many of the newest checkpoints to keep. The best one is always kept.", least=1)
    asynchronous: bool = key(True, "Write checkpoints in the background.")


@dataclass(frozen=True)
class Evaluation:
    """When the val split is evaluated, and how much of it."""

    every: int = key(0, "Steps between two evaluations. 0: only at the end.", least=0)
    batches: int = key(0, "Batches of one evaluation. 0: the whole split, as far as `max_share` allows.", least=0)
    max_share: float = key(
        0.25,
        "Most batches of one evaluation, as a share of the steps between two evaluations. "
        "The default takes about a tenth of the run's time. 0: no limit.",
        least=0,
        below=1e9,
    )


@dataclass(frozen=True)
class Config:
    """A training run."""

    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    train: Train = dataclasses.field(default_factory=Train)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)


FORECASTERS = ("lstm", "transformer")
OWN_MODELS = ("gpt", *FORECASTERS)


def every_field() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every key, as ``section.key``, with its field."""
    for section in dataclasses.fields(Config):
        kind: Any = section.default_factory
        yield from ((f"{section.name}.{each.name}", each) for each in dataclasses.fields(kind))
