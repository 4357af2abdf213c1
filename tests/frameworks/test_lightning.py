"""A feed in Lightning: whatever the checkpoint was saved by, the samples after it are those of the uninterrupted run."""

import functools
import logging

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import millrace as mr
import millrace.torch
from millrace.accelerate import Loader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.samples.tolist())
        return self.layer(batch["x"].to(self.layer.weight.dtype)).mean()

    def on_validation_epoch_start(self):
        self.validated.append([])

    def validation_step(self, batch, batch_idx):
        self.validated[-1] += batch.samples[batch.valid].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def fit(train, val=None, *, model=None, resume=None, **options):
    model = model or Model()
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        **{"devices": 1, "enable_checkpointing": "callbacks" in options, "max_epochs": 2, **options},
    )  # fmt: skip
    trainer.fit(model, train, val, ckpt_path=resume)
    return model


SAVES = [
    {"every_n_train_steps": 1},
    {"every_n_epochs": 1},
    {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    {"every_n_train_steps": 1, "save_on_train_epoch_end": True},
]


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 3},
        {"max_epochs": -1, "max_steps": 7, "limit_train_batches": 2},
        {"max_epochs": 3, "val_check_interval": 2},
        {"max_epochs": 2, "last": "drop"},
    ],
    ids=str,
)
def test_every_checkpoint_resumes_exactly(options, feed_of, tmp_path):
    """By step, by epoch, before and after the validation of an epoch's end, with and without one."""
    options = dict(options)
    feed_of = functools.partial(feed_of, last=options.pop("last", "pad"))
    for validates in (True, False) if "val_check_interval" not in options else (True,):

        def run(loader, validates=validates, **more):
            val = feed_of().by_epoch(repeat=True) if validates else None
            return fit(loader, val, **options, **more).seen

        whole = run(feed_of().by_epoch())
        for number, how in enumerate(SAVES):
            folder = tmp_path / f"{validates}-{number}"
            saves = ModelCheckpoint(folder, filename="{epoch}-{step}", save_top_k=-1, **how)
            assert run(feed_of().by_epoch(), callbacks=[saves]) == whole
            checkpoints = sorted(folder.glob("*.ckpt"))
            assert checkpoints
            for path in checkpoints:
                done = torch.load(path)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
                assert run(feed_of().by_epoch(), resume=path) == whole[done:], f"{how} {path.name}"


def test_another_batch_within_an_epoch_is_refused(feed_of, tmp_path):
    """Lightning goes on counting batches, and would leave the rest of the pass."""
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}", save_top_k=-1)
    fit(feed_of().by_epoch(), callbacks=[saves])
    with pytest.raises(mr.ConfigError, match="begun with batch=3, and Lightning goes on counting"):
        fit(feed_of(batch=2).by_epoch(), resume=tmp_path / "step=2.ckpt")


def test_another_batch_from_the_end_of_an_epoch_is_not(feed_of, tmp_path):
    """Also where a sample is left to nobody, which the smaller batch could deliver: Lightning's epoch is over."""
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}", save_top_k=-1)
    fit(feed_of(last="drop").by_epoch(), callbacks=[saves])
    seen = fit(feed_of(batch=1, last="drop").by_epoch(), resume=tmp_path / "step=3.ckpt").seen
    assert [sample for batch in seen for sample in batch] == feed_of().order.samples(np.arange(10, 20)).tolist()


def test_a_checkpoint_without_a_state_of_the_loader_is_refused_within_an_epoch(feed_of, tmp_path):
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}", save_top_k=-1)
    fit(feed_of().by_epoch(), callbacks=[saves])
    for step in (2, 4):
        path = tmp_path / f"step={step}.ckpt"
        checkpoint = torch.load(path)
        del checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        torch.save(checkpoint, path)
    with pytest.raises(mr.ConfigError, match=r"saved within an epoch and holds no state of feed\.by_epoch\(\)"):
        fit(feed_of().by_epoch(), resume=tmp_path / "step=2.ckpt")


def test_steps_on_padding_that_nobody_chose_are_warned_of_once(feed_of, warned_of_padding):
    def messages(train, **options):
        return warned_of_padding(lambda: fit(train.by_epoch(), feed_of().by_epoch(repeat=True), **options))

    (message,) = messages(feed_of())
    assert message.startswith("10 samples do not fill batches of 3: the last one holds 1 samples and 2 repeats of the")
    assert message.endswith("Lightning takes a step on it; give the feed last='drop', or last='pad' to keep it")
    for quiet in (feed_of(last="pad"), feed_of(last="drop"), feed_of(last="short"), feed_of(batch=5)):
        assert messages(quiet) == []
    assert messages(feed_of(), limit_train_batches=3) == []


def test_validation_sees_every_sample_once_every_time(feed_of):
    model = fit(feed_of().by_epoch(), feed_of().by_epoch(repeat=True), max_epochs=3)
    sanity, *whole = model.validated
    assert len(sanity) == 6
    assert len(whole) == 3
    assert whole[0] == whole[1] == whole[2]
    assert sorted(whole[0]) == list(range(10))


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        (lambda feed_of: feed_of(), None, r"give it feed\.by_epoch\(\)"),
        (lambda feed_of: feed_of(epochs=3), None, r"give it feed\.by_epoch\(\)"),
        (lambda feed_of: feed_of().by_epoch(repeat=True), None, r"train with feed\.by_epoch\(\)"),
        (lambda feed_of: [feed_of().by_epoch()] * 2, None, "give each its own feed"),
        (None, lambda feed_of: feed_of(epochs=1), r"feed\.by_epoch\(repeat=True\)"),
        (None, lambda feed_of: feed_of().by_epoch(), r"feed\.by_epoch\(repeat=True\)"),
        (lambda feed_of: in_loader(DataLoader, feed_of(epochs=1)), None, r"give it feed\.by_epoch\(\) itself"),
        (lambda feed_of: in_loader(DataLoader, feed_of()), None, r"give it feed\.by_epoch\(\) itself"),
        (
            lambda feed_of: in_loader(StatefulDataLoader, feed_of().by_epoch()),
            None,
            r"give it feed\.by_epoch\(\) itself",
        ),
        (None, lambda feed_of: in_loader(DataLoader, feed_of(epochs=1)), r"feed\.by_epoch\(repeat=True\)"),
    ],
    ids=[
        "endless",
        "finite",
        "repeated",
        "one feed twice",
        "val feed",
        "val passes that go on",
        "DataLoader",
        "endless DataLoader",
        "StatefulDataLoader",
        "val DataLoader",
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_line_that_is(train, val, message, feed_of):
    loader = feed_of().by_epoch() if train is None else train(feed_of)
    with pytest.raises(mr.ConfigError, match=message):
        fit(loader, None if val is None else val(feed_of))


def test_a_dataset_of_the_users_own_is_seen_through(feed_of):
    """Also beside a loader that Lightning knows, and where the loader is ours, but for another framework."""

    class Own(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from feed_of().by_epoch()

    def own():
        return DataLoader(Own(), batch_size=None)

    message = r"through another one, and restores only what it knows; give it feed\.by_epoch\(\) itself"
    for loader in (own(), {"known": feed_of().by_epoch(), "own": own()}, Loader(feed_of().by_epoch())):
        with pytest.raises(mr.ConfigError, match=message):
            fit(loader)


def test_what_lightning_cannot_count_or_repeat_is_refused(feed_of):
    class Taker(Model):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return super().training_step(batch, 0)

    with pytest.raises(mr.ConfigError, match=r"write training_step\(batch, batch_idx\)"):
        fit(feed_of().by_epoch(), model=Taker())
    with pytest.raises(mr.ConfigError, match=r"overfit_batches= wants the same batches.*mr\.Subset"):
        fit(feed_of().by_epoch(), overfit_batches=2)


def in_loader(kind, feed):
    return kind(millrace.torch.IterableDataset(feed), batch_size=None)


def test_a_feed_that_a_model_reads_by_itself_is_its_own_business(feed_of):
    """Only who asks for the iterator counts, not who called him."""
    own, loader = feed_of(batch=2), feed_of(batch=2).by_epoch()

    class Reader(Model):
        def training_step(self, batch, batch_idx):
            assert len(list(loader)) == 5
            for _ in own:
                break
            return super().training_step(batch, batch_idx)

    assert len(fit(feed_of().by_epoch(), model=Reader()).seen) == 8


def test_marks_and_ragged_columns_survive_what_lightning_does_to_a_batch(events, feed_of):
    """It converts floats before it moves the batch, and so rebuilds it."""

    class Ragged(Model):
        def training_step(self, batch, batch_idx):
            assert batch["hits"].values.dtype == torch.bfloat16
            assert len(batch["hits"]) == len(batch["key"]) == 4
            assert batch.valid.sum() == (2 if (batch_idx % 3) == 2 else 4)
            self.seen.append(batch.samples.tolist())
            return self.layer(batch["hits"].values[:, :1]).mean()

    model = fit(mr.Feed(events, batch=4, seed=1).by_epoch(), model=Ragged(), precision="bf16-true")
    assert sorted(np.concatenate(model.seen[:3])) == [-1, -1, *range(10)]
    assert fit(feed_of().by_epoch(), precision="bf16-mixed").seen == fit(feed_of().by_epoch()).seen


def steps(folder):
    return {int(path.stem.split("=")[1]): path for path in folder.glob("step=*.ckpt")}


def test_loaders_of_other_lengths_are_validated_whole_after_a_checkpoint(feed_of, tmp_path):
    """The shorter one begins again within the epoch that is resumed."""

    class Pair(Model):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["long"], batch_idx)

    def loaders():
        short = mr.Feed(mr.Subset(feed_of().view, range(6)), batch=3, seed=2)
        return {"long": feed_of(batch=2).by_epoch(), "short": short.by_epoch()}

    def run(**more):
        return fit(loaders(), feed_of().by_epoch(repeat=True), model=Pair(), num_sanity_val_steps=0, **more)

    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}", save_top_k=-1)
    whole = run(callbacks=[saves])
    assert [len(one) for one in whole.validated] == [10, 10]
    for step, path in steps(tmp_path).items():
        again = run(resume=path)
        assert again.seen == whole.seen[step:]
        assert all(len(one) == 10 for one in again.validated), step


def test_a_loader_may_be_used_for_another_run(feed_of, tmp_path):
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}", save_top_k=-1)
    whole = fit(feed_of().by_epoch(), callbacks=[saves]).seen
    for last in (4, 8):  # of an epoch, and of the run
        loader = feed_of().by_epoch()
        assert fit(loader, resume=steps(tmp_path)[last]).seen == whole[last:]
        assert len(fit(loader).seen) == 8
        assert fit(loader, resume=steps(tmp_path)[last]).seen == whole[last:]
        assert [len(list(loader)) for _ in range(2)] == [4, 4]
        assert fit(loader, resume=steps(tmp_path)[2]).seen == whole[2:]
    checkpoint = torch.load(steps(tmp_path)[2])
    del checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    torch.save(checkpoint, tmp_path / "without.ckpt")
    with pytest.raises(mr.ConfigError, match="saved within an epoch and holds no state"):
        fit(loader, resume=tmp_path / "without.ckpt")


def test_a_pass_that_somebody_else_ended_is_no_end_of_the_epoch(feed_of):
    class Peek(Model):
        def on_train_start(self):
            next(iter(self.trainer.train_dataloader))

    with pytest.raises(mr.ConfigError, match=r"another iter\(\) of this loader ended the pass that Lightning reads"):
        fit(feed_of().by_epoch(), model=Peek())


def test_one_feed_may_train_and_validate(feed_of, tmp_path):
    def run(**more):
        feed = feed_of()
        return fit(feed.by_epoch(), feed.by_epoch(repeat=True), val_check_interval=2, **more).seen

    saves = ModelCheckpoint(tmp_path, every_n_epochs=1, filename="{step}", save_top_k=-1)
    whole = run(callbacks=[saves])
    assert len(steps(tmp_path)) == 4
    for step, path in steps(tmp_path).items():
        assert run(resume=path) == whole[step:]


def test_what_begins_within_an_epoch_or_is_an_iterator_is_refused(feed_of):
    loader = feed_of().by_epoch()
    loader.load_state_dict(feed_of().state_at(2))
    with pytest.raises(mr.ConfigError, match=r"resume by trainer\.fit\(\.\.\., ckpt_path=\.\.\.\)"):
        fit(loader)
    over = feed_of(last="drop").by_epoch()
    over.load_state_dict(feed_of(last="drop").state_at(3))  # nothing is left but what is dropped
    assert fit(over, max_epochs=1).seen[0] == feed_of().order.samples(np.arange(10, 13)).tolist()
    for made in (feed_of(epochs=1), feed_of().by_epoch()):
        with pytest.raises(mr.ConfigError, match=r"give it feed\.by_epoch\(\) itself, without iter\(\)"):
            fit(iter(made))
