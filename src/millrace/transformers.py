"""For the Trainer of Hugging Face: feeds as datasets, with their state in the checkpoint folder.

    trainer = FeedTrainer(model, args, train_dataset=feed.by_epoch(), eval_dataset=val_feed)

The feed's position is saved in ``trainer_state.json``, the last file of a checkpoint, and restored from there: the Trainer
itself skips no batches. ``FeedMixin`` does the same for your own Trainer class.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from millrace.distribution import install_command
from millrace.errors import ConfigError
from millrace.feed.batch import Batch
from millrace.feed.feed import Feed
from millrace.feed.passes import Passes
from millrace.gather.gather import Field
from millrace.view.blocks import Blocks
from millrace.view.compose import Concat, Subset
from millrace.view.view import View

try:
    from transformers import Trainer, TrainerCallback
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.trainer_callback import ExportableState

    from millrace.accelerate import Loader
except ImportError as error:
    raise ImportError(
        f"millrace.transformers needs transformers and accelerate; {install_command('transformers')}"
    ) from error

IGNORED = -100  # losses of transformers leave this label out
CHUNK = 1 << 20  # samples whose lengths are looked at together
# Arguments of the Trainer about loaders that it makes itself.
BATCH_SIZES = ("per_device_train_batch_size", "per_device_eval_batch_size")
OF_TRAINING = (
    BATCH_SIZES[0], "auto_find_batch_size", "dataloader_drop_last", "dataloader_num_workers",
    "dataloader_prefetch_factor", "dataloader_persistent_workers", "data_seed", "group_by_length", "train_sampling_strategy",
    "length_column_name",
)  # fmt: skip
OF_EVALUATION = BATCH_SIZES[1:]


class FeedMixin:
    """Makes a Trainer take feeds as datasets; put it before the Trainer among the bases of a class."""

    args: Any
    train_dataset: Any
    eval_dataset: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.add_callback(FeedState())  # type: ignore[attr-defined]
        if self.args.process_index == 0:
            self._warn_unused(options.get("data_collator", args[2] if len(args) > 2 else None))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """As the Trainer's; ``True`` is the last complete checkpoint, and an error if there is none."""
        if resume_from_checkpoint is True and (found := last_checkpoint(self.args.output_dir)) is not None:
            resume_from_checkpoint = found
        return super().train(resume_from_checkpoint, *args, **options)  # type: ignore[misc]

    def _warn_unused(self, data_collator: Any) -> None:
        """Names the arguments that were given and that feeds as datasets leave without use."""
        args, datasets = self.args, (self.train_dataset, self.eval_dataset)
        trains, evaluates = (isinstance(own, (Feed, Passes)) for own in datasets)
        names = (OF_TRAINING if trains else ()) + (OF_EVALUATION if evaluates else ())
        usual = {field.name: field.default for field in dataclasses.fields(args)}
        changed = {name: value for name in names if (value := getattr(args, name, None)) != usual.get(name)}
        for dataset, size, name in zip(
            datasets, (args.train_batch_size, args.eval_batch_size), BATCH_SIZES, strict=True
        ):
            if name in changed and size * args.world_size == _feed_of(dataset).batch:  # it says the same
                del changed[name]
        unused = [f"{name}={value!r}" for name, value in changed.items()]
        if (
            data_collator is not None
            and names
            and all(own is None or isinstance(own, (Feed, Passes)) for own in datasets)
        ):
            unused.append("data_collator=")
        if unused:
            warnings.warn(
                f"{type(self).__name__} does not use {', '.join(unused)}: the feed makes the batches; give batch=, seed=, "
                "workers= and transform= to the feed",
                UserWarning,
                stacklevel=3,
            )

    def get_train_dataloader(self) -> Any:
        if not isinstance(self.train_dataset, (Feed, Passes)):
            return super().get_train_dataloader()  # type: ignore[misc]
        if isinstance(self.train_dataset, Passes) and self.train_dataset.is_repeated:
            raise ConfigError("by_epoch(repeat=True) is the first epoch again and again; train with feed.by_epoch()")
        self.args.ignore_data_skip = True
        loader = TrainerLoader(self.train_dataset, is_shifted=self._is_shifted_twice(self.train_dataset), trains=True)
        feed, accumulated = loader.feed, self.args.gradient_accumulation_steps
        _check_last_shares(feed, feed.order.n if isinstance(loader.passes, Passes) else feed.stop or 0)
        if isinstance(loader.passes, Passes) and len(loader) % accumulated:
            raise ConfigError(
                f"gradient_accumulation_steps={accumulated} does not divide the {len(loader):,} batches of an epoch, so a "
                "resumed Trainer would step elsewhere; choose one that does, or train an endless feed with max_steps="
            )
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        chosen = self.eval_dataset[chosen] if isinstance(chosen, str) else chosen
        if isinstance(chosen, Feed):
            chosen = chosen.by_epoch(repeat=True)
        if not isinstance(chosen, Passes):
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        loader = TrainerLoader(chosen, is_shifted=self._is_shifted_twice(chosen))
        each = loader.feed.batch // loader.feed.world
        self.args.per_device_eval_batch_size = each // max(1, self.args.n_gpu)  # the weight of a batch's loss
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        if not isinstance(test_dataset, (Feed, Passes)):
            return super().get_test_dataloader(test_dataset)  # type: ignore[misc]
        return self.get_eval_dataloader(test_dataset)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """The loss is the mean over this rank's rows: gathering the losses of all ranks leaves padding out."""
        is_averaged = self.args.average_tokens_across_devices
        try:
            self.args.average_tokens_across_devices = is_averaged and not isinstance(inputs, Batch)
            return super().prediction_step(model, inputs, *args, **options)  # type: ignore[misc]
        finally:
            self.args.average_tokens_across_devices = is_averaged

    def _is_shifted_twice(self, dataset: Feed | Passes) -> bool:
        """Whether the labels are next tokens already, and the model would shift them once more."""
        feed = _feed_of(dataset)
        model: Any = self.accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
        is_two = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        shifts = getattr(model, "loss_function", None) is ForCausalLMLoss and not is_two
        is_shifted = feed.rename.get("y") == "labels" and _is_blocks(feed.view) and shifts
        smooths = getattr(self, "label_smoother", None) is not None
        if is_shifted and (smooths or not getattr(self, "model_accepts_loss_kwargs", False)):
            who = "label_smoothing_factor=" if smooths else "this model"
            raise ConfigError(
                f"the labels are next tokens already, and {who} shifts labels once more; deliver "
                "transform=lambda batch, rng: {'input_ids': batch['x'], 'labels': batch['x']} without rename="
            )
        return is_shifted


class FeedTrainer(FeedMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer with feeds as its datasets."""


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The last complete checkpoint of a Trainer: a kill while saving leaves one without a readable state."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    for path in sorted(found, key=lambda path: -int(path.name.removeprefix("checkpoint-"))):
        try:
            json.loads((path / "trainer_state.json").read_bytes())
        except (OSError, ValueError):
            continue
        return str(path)
    return None


def _feed_of(dataset: Feed | Passes) -> Feed:
    return dataset.feed if isinstance(dataset, Passes) else dataset


def _check_labels(feed: Feed) -> None:
    """Refuses labels whose padding the loss would count. A transform makes its own, a mask is for a model that takes it."""
    names = {field.name: feed.rename.get(field.name, field.name) for field in feed.view.fields}
    masks = [names[field.name] for field in feed.view.fields if field.measure == "mask"]
    if feed.transform is not None or feed.decode is not None or any(name != "attention_mask" for name in masks):
        return
    for field in feed.view.fields:
        is_counted = field.pad is not None and field.dtype.kind in "iu" and (field.fill or 0) != IGNORED
        if names[field.name] == "labels" and is_counted and _is_padded(feed.view, field):
            raise ConfigError(
                f"{field.name} is padded by {field.fill or 0}, which the loss counts as a class; give mr.Records(..., "
                f"fill={{{field.name!r}: {IGNORED}}})"
            )


def _is_padded(view: View, field: Field) -> bool:
    """Whether a sample has fewer rows than it is padded to."""
    firsts = range(0, len(view), CHUNK)
    spans = (view.spans(np.arange(first, min(first + CHUNK, len(view))), field.axis) for first in firsts)
    return any(bool((own.lengths < (field.pad or 0)).any()) for own in spans)


def _check_last_shares(feed: Feed, samples: int) -> None:
    """Refuses to train where a rank's share of the last batch is padding alone: the mean over no labels is NaN."""
    real, world = samples % feed.batch, feed.world
    if feed.last == "pad" and feed.budget is None and real and (world - 1) * feed.batch // world >= real:
        raise ConfigError(
            f"the last batch holds {real} of {samples:,} samples, which leaves padding alone to rank {world - 1} of {world}, whose "
            "loss would be NaN; give the feed last='drop'"
        )


class TrainerLoader(Loader):
    """A loader whose padding does not count for the loss, and whose next tokens are not shifted again."""

    framework = "the Trainer"

    def __init__(self, feed: Feed | Passes, *, is_shifted: bool, trains: bool = False) -> None:
        super().__init__(feed)
        _check_labels(self.feed)
        self._is_shifted, self._trains = is_shifted, trains

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        for batch in super().__iter__():
            if batch.valid is not None and not batch.valid.all():
                _ignore_padding(batch, is_refused=not self._trains)
            if self._is_shifted:
                batch["shift_labels"] = batch["labels"]
            yield batch


def _ignore_padding(batch: Batch, *, is_refused: bool) -> None:
    """Leaves the labels of padding out of the loss. Without integer labels padding counts, which evaluation refuses."""
    labels, padding = batch.get("labels"), ~np.asarray(batch.valid)
    if labels is None or labels.dtype.is_floating_point:
        if not is_refused:
            return
        raise ConfigError(
            f"the last batch has {int(padding.sum())} rows of padding, which a loss without integer labels counts; give "
            "the feed last='short' (one process), last='drop', or a batch that divides the samples"
        )
    labels = labels.clone()
    labels[padding] = IGNORED
    batch["labels"] = labels


def _is_blocks(view: View) -> bool:
    parts = [view.view] if isinstance(view, Subset) else view.views if isinstance(view, Concat) else []
    return all(map(_is_blocks, parts)) if parts else isinstance(view, Blocks)


class FeedState(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Keeps the state of the training feed in the checkpoints of a Trainer."""

    def __init__(self) -> None:
        self._loader: Any = None

    def state(self) -> dict[str, Any]:
        saved = None if self._loader is None else {**self._loader.state_dict(), "batch": self._loader.feed.batch}
        return {"args": {}, "attributes": {"saved": saved}}

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **others: Any) -> None:
        if not isinstance(train_dataloader, Loader):
            return
        self._loader = train_dataloader
        if not state.global_step:
            return
        known = state.stateful_callbacks.get("FeedState", {})
        saved = known.get("attributes", {}).get("saved") if isinstance(known, dict) else None
        if saved is None:
            raise ConfigError(
                f"the checkpoint of step {state.global_step} holds no state of a feed; resume another one"
            )
        batch = train_dataloader.feed.batch
        is_counted = isinstance(train_dataloader.passes, Passes) or train_dataloader.feed.epochs is not None
        if saved["batch"] != batch and is_counted:
            raise ConfigError(
                f"the checkpoint was saved with batch={saved['batch']}, and the Trainer counts epochs by steps; resume "
                f"with it, not with batch={batch}"
            )
        train_dataloader.load_state_dict(saved)
