"""A feed in the Trainer of Hugging Face: exact resume by its checkpoints, exact evaluation, no label shifted twice."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import millrace as mr
import millrace.torch
from millrace.transformers import FeedMixin, FeedTrainer

NAMES = {"x": "input_ids", "y": "labels"}


@pytest.fixture(scope="module")
def tokens():
    store = mr.from_arrays({"tokens": np.random.default_rng(0).integers(0, 16, 83)})
    return mr.Blocks(store, length=4)  # 20 blocks


def model_of():
    set_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=16, n_positions=4, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    )


class Plain(torch.nn.Module):
    """A model without a loss of transformers': it neither shifts labels nor takes other arguments."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, labels):
        predicted = self.layer(x.float())
        return {"loss": functional.mse_loss(predicted, labels.float()), "logits": predicted}


class Seen(FeedMixin, Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen = [*getattr(self, "seen", []), self._prepare_inputs(inputs).samples.tolist()]
        return super().training_step(model, inputs, num_items_in_batch)


def train(folder, dataset, *, resume=None, model=None, eval_dataset=None, **options):
    options = {"num_train_epochs": 3, "save_steps": 1, "disable_tqdm": True, **options}
    arguments = TrainingArguments(str(folder), report_to="none", use_cpu=True, logging_steps=1, **options)
    trainer = Seen(model or model_of(), arguments, train_dataset=dataset, eval_dataset=eval_dataset)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def losses(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize(
    ("passes", "options"),
    [
        (True, {}),
        (True, {"gradient_accumulation_steps": 2}),
        (False, {"max_steps": 9, "gradient_accumulation_steps": 2}),
    ],
    ids=["epochs", "accumulated", "endless"],
)
def test_every_checkpoint_resumes_exactly(passes, options, tokens, tmp_path):
    """The samples, the losses and the number of steps."""

    def dataset():
        feed = mr.Feed(tokens, batch=5, seed=1, rename=NAMES)
        return feed.by_epoch() if passes else feed

    whole = train(tmp_path, dataset(), **options)
    steps, batches = whole.state.global_step, len(whole.seen)
    assert batches == (12 if passes else 18)
    for step in range(1, steps + 1 if passes else steps):  # at the very end of max_steps the Trainer takes one more
        again = train(
            tmp_path / "again", dataset(), resume=tmp_path / f"checkpoint-{step}", save_strategy="no", **options
        )
        assert getattr(again, "seen", []) == whole.seen[step * batches // steps :]
        assert again.state.global_step == steps
        assert losses(again) == losses(whole)


def test_the_state_lies_in_the_last_file_of_a_checkpoint(tokens, tmp_path):
    feed = mr.Feed(tokens, batch=5, seed=1, rename=NAMES)
    train(tmp_path, feed.by_epoch(), num_train_epochs=1)
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    assert state["stateful_callbacks"]["FeedState"]["attributes"]["saved"]["position"] == 10
    assert path.stat().st_mtime_ns == max(other.stat().st_mtime_ns for other in path.parent.iterdir())
    restored = train(tmp_path / "b", mr.Feed(tokens, batch=5, seed=1, rename=NAMES).by_epoch(), num_train_epochs=1,
                     resume=path.parent, restore_callback_states_from_checkpoint=True)  # fmt: skip
    assert len(restored.seen) == 2
    del state["stateful_callbacks"]["FeedState"]
    path.write_text(json.dumps(state))
    with pytest.raises(mr.ConfigError, match="step 2 holds no state of a feed"):
        train(tmp_path / "b", feed.by_epoch(), num_train_epochs=1, resume=path.parent)


def test_evaluation_counts_every_sample_once(tokens, tmp_path):
    """Its loss is the mean over all blocks, though the last batch is padded."""
    trainer = FeedTrainer(
        model_of(), TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True),
        eval_dataset=mr.Feed(tokens, batch=6, rename=NAMES), compute_metrics=lambda found: {"count": len(found.predictions)},
    )  # fmt: skip
    every = tokens[np.arange(20)]
    with torch.no_grad():
        logits = trainer.model.eval()(torch.from_numpy(every["x"])).logits
        expected = functional.cross_entropy(logits.transpose(1, 2), torch.from_numpy(every["y"]))
    for _ in range(2):
        found = trainer.evaluate()
        assert found["eval_loss"] == pytest.approx(expected.item(), rel=1e-6)
        assert found["eval_count"] == 20


def test_next_tokens_are_not_shifted_once_more(tokens, tmp_path):
    """The loss is that of the tokens that follow, as the view delivers them."""
    model = model_of()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    every = tokens[np.arange(20)]
    with torch.no_grad():
        logits = model(torch.from_numpy(every["x"])).logits
    expected = functional.cross_entropy(logits.transpose(1, 2), torch.from_numpy(every["y"])).item()
    feed = mr.Feed(tokens, batch=20, seed=1, rename=NAMES)
    (found,) = losses(train(tmp_path, feed.by_epoch(), num_train_epochs=1, model=model))
    assert found == pytest.approx(expected, rel=1e-5)


def test_what_the_trainer_would_count_wrongly_is_refused(tokens, feed_of, tmp_path):
    feed = mr.Feed(tokens, batch=6, seed=1, rename=NAMES)
    with pytest.raises(mr.ConfigError, match="count padding as data; give the feed last='drop'"):
        train(tmp_path, feed.by_epoch())
    even = mr.Feed(tokens, batch=5, seed=1, rename=NAMES)
    with pytest.raises(mr.ConfigError, match="gradient_accumulation_steps=3 does not divide the 4 batches"):
        train(tmp_path, even.by_epoch(), gradient_accumulation_steps=3)
    train(tmp_path, even.by_epoch(), num_train_epochs=1)
    with pytest.raises(mr.ConfigError, match="saved with batch=5"):
        train(tmp_path, mr.Feed(tokens, batch=4, rename=NAMES, seed=1).by_epoch(), resume=tmp_path / "checkpoint-2")
    shared = mr.Feed(tokens, batch=5, rename=NAMES, rank=0, world=2)
    with pytest.raises(mr.ConfigError, match=r"batch=5 is no multiple of the 2 ranks.*take batch=4"):
        train(tmp_path, even.by_epoch(), eval_dataset=shared, eval_on_start=True)
    floats = mr.Feed(feed_of().view, batch=4, transform=lambda batch, rng: {"x": batch.x, "labels": batch.x / 2.0})
    trainer = train(
        tmp_path,
        mr.Feed(feed_of().view, batch=5, rename={"y": "labels"}).by_epoch(),
        model=Plain(),
        eval_dataset=floats,
    )
    with pytest.raises(mr.ConfigError, match="2 rows of padding, which a loss without integer labels counts"):
        trainer.evaluate()


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (lambda feed: millrace.torch.IterableDataset(feed), "sends rank 0's share to all ranks"),
        (lambda feed: feed.by_epoch(), "not samples by number"),
    ],
)
def test_a_plain_trainer_is_refused_with_the_one_that_works(dataset, message, tokens, tmp_path):
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, max_steps=2)
    trainer = Trainer(model_of(), arguments, train_dataset=dataset(mr.Feed(tokens, batch=5, rename=NAMES)))
    with pytest.raises(mr.ConfigError, match=rf"{message}.*millrace\.transformers\.FeedTrainer"):
        trainer.train()


def test_other_datasets_go_as_before(tokens, tmp_path):
    class Item(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, sample):
            return {"input_ids": torch.tensor(tokens[sample]["x"]), "labels": torch.tensor(tokens[sample]["x"])}

    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, max_steps=2)
    trainer = FeedTrainer(
        model_of(), arguments, train_dataset=Item(), eval_dataset=Item(), callbacks=[TrainerCallback()]
    )
    assert trainer.train().global_step == 2
    assert trainer.evaluate()["eval_loss"] > 0
