"""A feed in the Trainer of Hugging Face: exact resume by its checkpoints, exact evaluation, no label shifted twice."""

import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import millrace as mr
import millrace.torch
from millrace.accelerate import Loader
from millrace.transformers import FeedMixin, FeedTrainer, last_checkpoint

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


@pytest.mark.parametrize("options", [{}, {"max_steps": 3}])
def test_the_trainer_itself_names_the_feed_trainer_when_it_is_constructed(tokens, options, tmp_path):
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, **options)
    feed = mr.Feed(tokens, batch=4, rename=NAMES)
    for dataset in (feed, feed.by_epoch(), mr.Feed(tokens, batch=4, epochs=1), millrace.torch.IterableDataset(feed)):
        with pytest.raises(
            mr.ConfigError, match=r"use millrace.transformers.FeedTrainer\(model, args, train_dataset=feed.by_"
        ):
            Trainer(model_of(), arguments, train_dataset=dataset)
    FeedTrainer(model_of(), arguments, train_dataset=feed.by_epoch())

    class Own(Trainer):
        def get_train_dataloader(self):
            return Loader(self.train_dataset)

    assert len(Own(model_of(), arguments, train_dataset=feed.by_epoch()).train_dataset) == 5


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


def test_steps_on_padding_that_nobody_chose_are_warned_of_once(tokens, feed_of, warned_of_padding, tmp_path):
    """Its labels count for nothing, where they can: 20 blocks in batches of 6."""

    def run(**options):
        dataset = mr.Feed(tokens, batch=6, seed=1, rename=NAMES, **options).by_epoch()
        evaluated = mr.Feed(tokens, batch=6, rename=NAMES)
        trained = train(tmp_path, dataset, eval_dataset=evaluated, eval_on_start=True, num_train_epochs=2)
        assert len(trained.seen) == 2 * len(dataset)
        return trained

    (message,) = warned_of_padding(run)
    assert (
        "the last one holds 2 samples and 4 repeats of the first of them, and the Trainer takes a step on it" in message
    )
    for last in ("pad", "drop"):
        assert warned_of_padding(lambda last=last: run(last=last)) == []
    floats = mr.Feed(
        feed_of().view, batch=4, rename={"y": "labels"}, transform=lambda batch, rng: {"x": batch.x, "y": batch.x / 2}
    )
    assert len(warned_of_padding(lambda: train(tmp_path, floats.by_epoch(), model=Plain(), num_train_epochs=1))) == 1


def test_the_labels_of_padding_count_for_nothing_in_training(tokens, tmp_path):
    model = model_of()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    feed = mr.Feed(tokens, batch=20 - 6, seed=1, rename=NAMES, last="pad")
    last = tokens[feed.order.samples(np.arange(14, 20))]
    found = losses(train(tmp_path, feed.by_epoch(), num_train_epochs=1, model=model, learning_rate=0.0))[-1]
    with torch.no_grad():
        logits = model(torch.from_numpy(last["x"])).logits
    assert found == pytest.approx(
        functional.cross_entropy(logits.transpose(1, 2), torch.from_numpy(last["y"])).item(), rel=1e-5
    )


def test_what_the_trainer_would_count_wrongly_is_refused(tokens, feed_of, tmp_path):
    alone = mr.Feed(tokens, batch=6, seed=1, rename=NAMES, rank=0, world=2, last="pad")
    with pytest.raises(mr.ConfigError, match=r"padding alone to rank 1 of 2, whose loss would be NaN; .*last='drop'"):
        train(tmp_path, alone.by_epoch())
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


@pytest.fixture(scope="module")
def texts():
    """12 records of 1 to 4 tokens."""
    offsets = np.concatenate(([0], np.cumsum(np.arange(12) % 4 + 1)))
    ids = np.random.default_rng(1).integers(1, 16, offsets[-1])
    return mr.from_arrays({"input_ids": ids, "target": ids}, offsets)


def test_labels_whose_padding_would_count_are_refused(texts, tmp_path):
    """Zeros are a class; what is padded by -100, made by a transform, or masked by the model itself, is right."""

    def trainer_of(view, **options):
        feed = mr.Feed(view, **{"batch": 4, "rename": {"target": "labels"}, **options})
        return FeedTrainer(model_of(), TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True),
                           train_dataset=feed.by_epoch(), eval_dataset=feed)  # fmt: skip

    columns = {"columns": ["input_ids", "target"], "pad": 4}
    message = (
        r"target is padded by 0, which the loss counts as a class; give mr\.Records\(\.\.\., fill=\{'target': -100\}\)"
    )
    for view in (
        mr.Records(texts, **columns),
        mr.Subset(mr.Records(texts, **columns, fill={"target": -1}), [1, 2, 3, 4]),
    ):
        for loader in ("get_train_dataloader", "get_eval_dataloader"):
            with pytest.raises(mr.ConfigError, match=message.replace("by 0", "by (0|-1)")):
                getattr(trainer_of(view), loader)()
    masked = mr.Records(texts, **columns, mask=True)
    with pytest.raises(mr.ConfigError, match="which the loss counts"):  # the loss of transformers does not look there
        trainer_of(masked, rename={"target": "labels", "row_mask": "attention_mask"}).get_train_dataloader()
    same_lengths = mr.Subset(mr.Records(texts, **columns), [3, 7, 11, 3])  # without padding
    ignored = mr.Records(texts, **columns, fill={"target": -100})
    made = {"rename": None, "transform": lambda batch, rng: {"input_ids": batch.input_ids, "labels": batch.target}}
    for view, options in ((masked, {}), (same_lengths, {}), (ignored, {}), (mr.Records(texts, **columns), made)):
        assert len(trainer_of(view, **options).get_train_dataloader()) > 0


def test_labels_padded_by_minus_100_give_the_loss_of_the_real_ones(texts, tmp_path):
    view = mr.Records(texts, columns=["input_ids", "target"], pad=4, fill={"target": -100})
    pick = lambda batch, rng: {"input_ids": batch["input_ids"], "labels": batch["target"]}  # noqa: E731 - without lengths
    feed = mr.Feed(view, batch=12, transform=pick)
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True)
    model, losses = model_of().eval(), []
    model.loss_type = "ForCausalLM"  # else the Trainer divides by the first tokens too, which nothing predicts
    found = FeedTrainer(model, arguments, eval_dataset=feed).evaluate()["eval_loss"]
    for record in (mr.Records(texts)[k]["input_ids"] for k in range(12)):
        ids = torch.from_numpy(record)
        losses += functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none").tolist()
    assert found == pytest.approx(np.mean(losses), rel=1e-5)


def test_arguments_of_the_trainer_that_a_feed_leaves_unused_are_named(tokens, tmp_path):
    def messages(*, feed=None, collator=None, **options):
        arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, **options)
        feed = mr.Feed(tokens, batch=10, rename=NAMES).by_epoch() if feed is None else feed
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            FeedTrainer(model_of(), arguments, collator, train_dataset=feed, eval_dataset=feed)
        return [str(own.message) for own in caught if "FeedTrainer" in str(own.message)]

    assert messages() == messages(per_device_train_batch_size=10, learning_rate=1.0) == []
    (message,) = messages(per_device_train_batch_size=16, dataloader_num_workers=2, data_seed=3, collator=list)
    assert message == (
        "FeedTrainer does not use per_device_train_batch_size=16, dataloader_num_workers=2, data_seed=3, data_collator=: the feed "
        "makes the batches; give batch=, seed=, workers= and transform= to the feed"
    )
    assert "per_device_eval_batch_size=3" in messages(per_device_eval_batch_size=3)[0]
    assert messages(feed=[{"input_ids": [1]}], dataloader_num_workers=2, collator=list) == []


def test_a_trainer_that_skips_batches_of_a_loader_is_refused(tokens, tmp_path):
    """Its own way to resume: the loader knows where it stands."""

    class Own(Trainer):
        def get_train_dataloader(self):
            return Loader(mr.Feed(tokens, batch=5, rename=NAMES).by_epoch())

    arguments = TrainingArguments(
        str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, max_steps=2, save_steps=1
    )
    Own(model_of(), arguments).train()
    with pytest.raises(mr.ConfigError, match=r"skip_first_batches\(\).*use millrace\.transformers\.FeedTrainer"):
        Own(model_of(), arguments).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


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


RANKS = """
import json, os, sys
import numpy as np
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import millrace as mr

def evaluate(rank, world, path, batches):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # asked for, but the ranks meet by a file
    import torch
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=world)
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed
    from millrace.transformers import FeedTrainer
    set_seed(0)
    config = GPT2Config(vocab_size=16, n_positions=4, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    store = mr.from_arrays({"tokens": np.random.default_rng(0).integers(0, 16, 83)})
    arguments = TrainingArguments(path + "-out", report_to="none", use_cpu=True, disable_tqdm=True)
    found = []
    for batch in batches:
        feed = mr.Feed(mr.Blocks(store, length=4), batch=batch, rename={"x": "input_ids", "y": "labels"})
        found.append(FeedTrainer(model, arguments, eval_dataset=feed).evaluate()["eval_loss"])
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)

if __name__ == "__main__":
    multiprocessing.start_processes(evaluate, (2, sys.argv[1], (6, 8, 12, 20)), nprocs=2, start_method="spawn")
"""


def test_ranks_evaluate_to_the_loss_of_one_though_the_last_batch_is_padded(tokens, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "group")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    every = tokens[np.arange(20)]
    with torch.no_grad():
        logits = model_of().eval()(torch.from_numpy(every["x"])).logits
    expected = functional.cross_entropy(logits.transpose(1, 2), torch.from_numpy(every["y"])).item()
    assert done.stdout, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx([expected] * 4, rel=1e-6)


def test_what_shifts_labels_once_more_or_repeats_is_refused(tokens, tmp_path):
    feed = mr.Feed(tokens, batch=5, rename=NAMES)
    with pytest.raises(mr.ConfigError, match="label_smoothing_factor= shifts labels once more; deliver"):
        train(tmp_path, feed.by_epoch(), label_smoothing_factor=0.1)
    with pytest.raises(mr.ConfigError, match=r"train with feed\.by_epoch\(\)"):
        train(tmp_path, feed.by_epoch(repeat=True))


def test_a_finite_feed_resumes_with_its_batch_alone(tokens, tmp_path):
    train(tmp_path, mr.Feed(tokens, batch=5, rename=NAMES, epochs=2), max_steps=4)
    with pytest.raises(mr.ConfigError, match="saved with batch=5"):
        train(
            tmp_path, mr.Feed(tokens, batch=10, rename=NAMES, epochs=2), max_steps=4, resume=tmp_path / "checkpoint-2"
        )


def test_predict_takes_a_feed(tokens, tmp_path):
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True)
    found = FeedTrainer(model_of(), arguments).predict(mr.Feed(tokens, batch=6, rename=NAMES))
    assert found.predictions.shape[0] == 20


def test_a_checkpoint_that_was_killed_while_it_was_saved_is_passed_over(tokens, tmp_path):
    feed = mr.Feed(tokens, batch=5, rename=NAMES, seed=1)
    whole = train(tmp_path, feed.by_epoch(), num_train_epochs=1)
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text('{"step')
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    again = Seen(model_of(), whole.args, train_dataset=mr.Feed(tokens, batch=5, rename=NAMES, seed=1).by_epoch())
    again.train(resume_from_checkpoint=True)
    assert again.seen == whole.seen[2:]
    assert last_checkpoint(tmp_path / "none") is None
