"""What goes wrong is said before the first step where it can be, with what to do about it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import millrace as mr
from millrace.testing import tiny_store
from millrace.train.dist import World
from millrace.train.open_run import load_model
from millrace.train.out_of_memory import is_out_of_memory
from millrace.train.trainer import Trainer, train

from .conftest import config_of, lines, losses, nano

ALONE = World(0, 1, torch.device("cpu"))
LINEAR = {"features": 3, "targets": 3}
HUGE = {"features": 1 << 30, "targets": 1 << 29}


def test_a_store_of_the_wrong_kind(tokens, waves, tmp_path):
    with pytest.raises(mr.ConfigError, match=r"is a text store, and model.kind = 'lstm' needs a series store"):
        train(config_of(tokens, model__kind="lstm"), tmp_path / "a")
    with pytest.raises(
        mr.ConfigError, match=r"is a series store, and model.kind = 'gpt' needs a text store; .* 'lstm'"
    ):
        train(config_of(waves), tmp_path / "b")
    with pytest.raises(mr.StoreNotFound):
        train(config_of(tmp_path / "nothing"), tmp_path / "c")
    with pytest.raises(mr.ConfigError, match="no data: give --store DIR"):
        train(config_of(tokens, data__store=""), tmp_path / "d")


def test_a_run_that_never_began_leaves_no_folder(tokens, waves, tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("new", "mine"):
        with pytest.raises(mr.ConfigError, match="is a series store"):
            train(config_of(waves), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    train(config_of(tokens, train__max_steps=1), tmp_path / "new")


def test_a_vocabulary_larger_than_the_models(tokens, tmp_path):
    with pytest.raises(
        mr.ConfigError,
        match=r"128 is smaller .* ids up to 199; set model.vocabulary to 200 or more, or leave it out$",
    ):
        train(config_of(tokens, model__vocabulary=128), tmp_path / "run")


def test_a_layout_that_does_not_say_its_vocabulary(tmp_path):
    (np.arange(5000) % 300).astype(np.uint16).tofile(tmp_path / "x.bin")
    with pytest.raises(mr.ConfigError, match=r"does not say its vocabulary; set model.vocabulary"):
        train(config_of(tmp_path / "x.bin"), tmp_path / "run")
    with pytest.raises(mr.ConfigError, match=r"ids up to 299; set model.vocabulary to 300 or more$"):
        train(config_of(tmp_path / "x.bin", model__vocabulary=256), tmp_path / "run")
    train(config_of(tmp_path / "x.bin", model__vocabulary=300, train__max_steps=2), tmp_path / "run")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_missing_gpu(tokens, tmp_path):
    with pytest.raises(mr.ConfigError, match="torch sees no GPU; take device = 'cpu'"):
        train(config_of(tokens, train__device="cuda"), tmp_path / "run")


def test_a_nan_stops_with_the_step_the_samples_and_their_rows(tmp_path):
    """Row 70 of the third series is NaN: the first step that holds it stops the run, and nothing of it is saved."""
    rng = np.random.default_rng(0)
    columns = {"values": mr.Column("float32", (3,)), "name": mr.Column("string", per="record")}
    with mr.StoreWriter(tmp_path / "store", kind="series", columns=columns) as writer:
        for k in range(4):
            values = rng.normal(size=(100, 3))
            values[70, 1] = np.nan if k == 2 else 0
            writer.append({"values": values, "name": f"sensor-{k}"})
    config = config_of(
        tmp_path / "store",
        model__kind="lstm",
        train__max_steps=50,
        train__batch=4,
        train__log_every=7,
        checkpoint__every=1,
    )
    with pytest.raises(
        mr.TrainError, match=r"the loss of step \d+ is nan; samples \[.*\] hold values that are not finite"
    ) as stopped:
        train(config, tmp_path / "run")
    view = mr.Windows(mr.open_store(tmp_path / "store"), lookback=16, horizon=4)
    feed = mr.Feed(view, batch=4, seed=7, device="numpy")
    step = stopped.value.step
    held = feed.explain(step - 1)
    bad = [
        row["sample"]
        for row in held.rows
        if row["columns"]["name"] == "sensor-2" and row["rows"][0] <= 270 < row["rows"][1]
    ]
    assert stopped.value.samples == sorted(bad)
    assert "name=sensor-2" in str(stopped.value)
    first, behind = next(row["rows"] for row in held.rows if row["sample"] in bad)
    assert f"rows {first:,} to {behind - 1:,} of record 2" in str(stopped.value)  # as explain tells them
    assert f"millrace explain {tmp_path / 'run'} --step {step}" in str(stopped.value)
    assert not any(270 in range(*row["rows"]) for k in range(step - 1) for row in feed.explain(k).rows)
    model = load_model(tmp_path / "run").model
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_a_loss_that_explodes_says_lower_the_rate(waves, tmp_path):
    config = config_of(waves, model__kind="own_models:Linear", model__options=LINEAR, optimizer__name="sgd", optimizer__lr=1e8,
                       optimizer__warmup=0, train__clip=0.0, train__max_steps=200)  # fmt: skip
    with pytest.raises(mr.TrainError, match=r"hold only finite values: lower optimizer.lr"):
        train(config, tmp_path / "run")


def test_a_gradient_that_is_not_finite_is_the_error_of_its_step_and_not_saved(waves, tmp_path):
    config = config_of(waves, model__kind="own_models:NoGradient", model__options={**LINEAR, "at": 5},
                       train__log_every=50, evaluation__every=5, checkpoint__every=2)  # fmt: skip
    with pytest.raises(
        mr.TrainError,
        match=r"the gradient of step 5 has norm nan, though its loss is \d.* hold only finite .* that of step 4",
    ) as stopped:
        train(config, tmp_path / "run")
    view = mr.Windows(mr.open_store(waves).split("train"), lookback=16, horizon=4)
    assert stopped.value.samples == mr.Feed(view, batch=12, seed=7, device="numpy").explain(4).samples.tolist()
    assert "more hold only" not in str(stopped.value)  # the list of 12 is complete
    trained = load_model(tmp_path / "run", own="own_models:NoGradient")
    assert trained.step == 4
    assert all(torch.isfinite(value).all() for value in trained.model.state_dict().values())


def test_a_step_without_checkpoints_before_it_says_so(waves, tmp_path):
    config = config_of(waves, model__kind="own_models:NoGradient", model__options={**LINEAR, "at": 2}, train__batch=25)
    with pytest.raises(
        mr.TrainError, match=r"the gradient of step 2 .* and 5 more hold only .* there is no checkpoint yet"
    ):
        train(config, tmp_path / "run")


def holey(path, cut: int, row: int):
    """A store whose sensor-2 has a NaN in one row; rows from ``cut`` on are the val split."""
    rng = np.random.default_rng(0)
    columns = {
        "values": mr.Column("float32", (3,)),
        "name": mr.Column("string", per="record"),
        "cuts": mr.Column("int64", (1,), per="record"),
    }
    with mr.StoreWriter(path, kind="series", columns=columns, cuts=mr.Cuts(("train", "val"))) as writer:
        for k in range(4):
            values = rng.normal(size=(100, 3))
            values[row, 1] = np.nan if k == 2 else 0
            writer.append({"values": values, "name": f"sensor-{k}", "cuts": [cut]})
    return path


def test_an_evaluation_does_not_hide_where_a_nan_came_from(tmp_path):
    """Evaluated after every step and looked at after 50: still the step and the samples of the train split."""
    store = holey(tmp_path / "store", cut=80, row=40)
    config = config_of(store, model__kind="lstm", train__max_steps=50, train__log_every=50, evaluation__every=1)
    with pytest.raises(mr.TrainError, match=r"the loss of step \d+ is nan; samples \[.*name=sensor-2"):
        train(config, tmp_path / "run")
    assert None not in [line["val_loss"] for line in lines(tmp_path / "run") if "val_loss" in line]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_nan_in_the_val_split_is_said_and_training_goes_on(ranks, tmp_path, start):
    store = holey(tmp_path / "store", cut=60, row=95)
    process = start(nano(store, model__kind="lstm", evaluation__every=4), tmp_path / "run", ranks)
    process.finish()
    assert [line["val_loss"] for line in lines(tmp_path / "run") if "val_loss" in line] == [None, None, None]
    view = mr.Windows(mr.open_store(store).split("val"), lookback=16, horizon=4)
    bad = [k for k in range(len(view)) if not np.isfinite(view[np.array([k])]["x"]).all()]
    bad += [k for k in range(len(view)) if not np.isfinite(view[np.array([k])]["y"]).all()]
    assert process.output.count("warning: step") == 3
    assert f"warning: step 4: no val_loss, it is not finite: samples [{min(bad)}, " in process.output
    assert "name=sensor-2" in process.output
    assert sorted(losses(tmp_path / "run")) == list(range(1, 11))
    assert load_model(tmp_path / "run").step == 10
    with pytest.raises(mr.ConfigError, match="has no best checkpoint"):
        load_model(tmp_path / "run", "best")


def test_out_of_memory_says_which_micro_batch_and_keeps_the_checkpoint(waves, tmp_path):
    options = {**LINEAR, "most": 5}
    config = config_of(waves, model__kind="own_models:Hungry", model__options=options, train__micro_batch=6)
    with pytest.raises(
        mr.TrainError, match=r"out of memory at step 1 with micro-batches of 6 samples; set train.micro_batch to 3"
    ):
        train(config, tmp_path / "run")


def test_micro_batches_are_halved_where_asked_and_nothing_else_changes(waves, tmp_path):
    options = {**LINEAR, "most": 5}
    changes = {"model__options": options, "train__precision": "fp64"}
    halved = config_of(waves, model__kind="own_models:Hungry", train__halve_on_oom=True, **changes)
    trainer = Trainer(halved, tmp_path / "halved", ALONE)
    trainer.run()
    trainer.close()
    assert trainer.stepper.micro_batches == 4
    assert trainer.model.seen[:7] == [12, 6, 3, 3, 3, 3, 3]
    fitting = config_of(waves, model__kind="own_models:Hungry", train__micro_batch=3, **changes)
    train(fitting, tmp_path / "fitting")
    assert losses(tmp_path / "halved") == losses(tmp_path / "fitting")


def test_ranks_halve_together_though_one_alone_runs_out(waves, tmp_path, start):
    changes = {"model__kind": "own_models:Hungry", "train__precision": "fp64", "train__batch": 11}
    halved = {"model__options": {**LINEAR, "most": 2, "rank": 1}, "train__halve_on_oom": True}
    ranks = start(nano(waves, **changes, **halved), tmp_path / "halved", 2)
    ranks.finish()
    fitting = {"model__options": {**LINEAR, "most": 9}, "train__micro_batch": 2}
    start(nano(waves, **changes, **fitting), tmp_path / "fitting", 2).finish()
    one, other = losses(tmp_path / "halved"), losses(tmp_path / "fitting")
    np.testing.assert_allclose([one[step] for step in other], list(other.values()), rtol=1e-9)


def test_out_of_memory_is_known_by_its_type_not_its_words():
    assert is_out_of_memory(torch.OutOfMemoryError("other words"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("CUDA out of memory. CUBLAS_STATUS_ALLOC_FAILED"))
    with pytest.raises(RuntimeError) as no_type:  # the CPU allocator has no error class of its own
        torch.empty(1 << 60)
    assert is_out_of_memory(no_type.value)


def test_out_of_memory_elsewhere_says_where(waves, tmp_path):
    """Real requests of a CPU that no machine can grant, and the optimiser's, which on a GPU is often the first to fail."""

    def endless(training: bool):
        options = {**LINEAR, "training": training}
        return config_of(waves, model__kind="own_models:Endless", model__options=options, checkpoint__every=0)

    with pytest.raises(mr.TrainError, match=r"out of memory at step 1 with micro-batches of 12 samples"):
        train(endless(True), tmp_path / "training")
    with pytest.raises(mr.TrainError, match=r"out of memory in the evaluation after step 10; set train.micro_batch"):
        train(endless(False), tmp_path / "evaluation")
    assert load_model(tmp_path / "evaluation", own="own_models:Endless").step == 10  # saved before it was evaluated
    with pytest.raises(mr.TrainError, match=r"out of memory while building the model; take a smaller model"):
        train(config_of(waves, model__kind="own_models:Linear", model__options=HUGE), tmp_path / "building")
    trainer = Trainer(
        config_of(waves, model__kind="own_models:Linear", model__options=LINEAR), tmp_path / "state", ALONE
    )

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 996 MiB")

    trainer.optimizer.register_step_pre_hook(fail)
    with pytest.raises(mr.TrainError, match=r"out of memory for the state of the optimiser at step 1; .*adafactor"):
        trainer.run()
    trainer.close()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dict", "returned dict; expected the loss of the batch"),
        ("vector", r"returned a tensor of shape \[1\]; expected"),
        ("constant", "returned a loss that does not depend on its parameters"),
        ("integer", "returned a loss of torch.int64"),
        ("targets", r"targets\(batch\) returned shape \[4, 3\]; expected one number"),
        ("complex", r"turns is torch.complex64, which a checkpoint cannot hold; register it with persistent=False"),
    ],
)
def test_a_model_that_returns_no_loss(what, message, waves, tmp_path):
    config = config_of(waves, model__kind="own_models:Returns", model__options={**LINEAR, "what": what})
    with pytest.raises(mr.ConfigError, match=f"model.kind = 'own_models:Returns'.*{message}"):
        train(config, tmp_path / "run")


def test_own_models_may_count_targets_in_plain_numbers_and_hold_complex_ones(waves, tmp_path):
    train(config_of(waves, model__kind="own_models:Returns", model__options={**LINEAR, "what": "loss"}), tmp_path / "a")
    trainer = Trainer(config_of(waves, model__kind="own_models:Turning", model__options=LINEAR), tmp_path / "b", ALONE)
    trainer.close()
    assert trainer.model.turns.tolist() == [1j] * 3


def test_options_that_a_model_does_not_take(waves, tmp_path):
    for options in ({"feature": 3, "targets": 3}, {}):
        with pytest.raises(mr.ConfigError, match=r"model.options = .*argument.* of own_models:Linear"):
            train(config_of(waves, model__kind="own_models:Linear", model__options=options), tmp_path / "run")
    with pytest.raises(mr.ConfigError, match="'own_models:Untrained' has no parameters that can be trained"):
        train(config_of(waves, model__kind="own_models:Untrained"), tmp_path / "run")


def test_a_model_that_is_none(waves, tmp_path):
    for kind, message in {
        "own_models:not_a_module": "gave int; expected a torch.nn.Module",
        "own_models:Nothing": "has no attribute 'Nothing'",
        "no_such_module:x": "No module named 'no_such_module'",
    }.items():
        with pytest.raises(mr.ConfigError, match=message):
            train(config_of(waves, model__kind=kind), tmp_path / "run")


MODULES = {
    "raises": ("raise ValueError('no weights here')", r"cannot be loaded: ValueError: no weights here \(.*raises.py, line 1\)"),
    "leaves": ("import sys; sys.exit(3)", r"cannot be loaded: SystemExit: 3 \(.*leaves.py, line 1\); correct it$"),
    "unfinished": ("def build(:", r"cannot be loaded: SyntaxError: invalid syntax \(unfinished.py, line 1\); correct it$"),
    "silent": ("class E(Exception):\n    def __str__(self): 1/0\nraise E", r"cannot be loaded: E: \(its message cannot"),
    "circular": ("from circular import build", "cannot be loaded: cannot import name 'build' from partially initialized"),
    "endless": ("def build(): return build()", "'endless:build' calls itself without end"),
    "circle": (
        "from torch import nn\nclass build(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.part = nn.ModuleDict({'head': nn.Linear(2, 2)})\n        self.part['trunk'] = self",
        "'circle:build' holds itself, as part.trunk, so it cannot be saved",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_ones_own_that_is_wrong_is_one_line(name, tokens, tmp_path, monkeypatch):
    text, message = MODULES[name]
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(mr.ConfigError, match=f"^model.kind = .*{message}"):
        train(config_of(tokens, model__kind=f"{name}:build"), tmp_path / "run")


def test_a_module_is_named_in_full(tokens, tmp_path):
    for kind in (".own_models:Linear", "..:x", "own_models.:x", ":x", "own_models:"):
        with pytest.raises(mr.ConfigError, match=r"expected module:function, with the whole name of the module$"):
            train(config_of(tokens, model__kind=kind), tmp_path / "run")


def test_own_models_take_the_view_that_the_kind_of_the_store_is_for(tmp_path):
    store = tiny_store("series", tmp_path / "store")
    config = config_of(
        store.path, model__kind="own_models:Linear", model__options=LINEAR, train__batch=4, data__lookback=4
    )
    train(config, tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 10


def test_no_val_split_is_one_line(tmp_path, start):
    with mr.StoreWriter(
        tmp_path / "store", kind="text", columns={"tokens": mr.Column("uint8")}, meta={"vocabulary": 9}
    ) as writer:
        writer.append({"tokens": np.arange(900) % 9})
    ranks = start(nano(tmp_path / "store", evaluation__every=2), tmp_path / "run")
    ranks.finish()
    assert ranks.output.count("no evaluation") == 1
    assert not any("val_loss" in line for line in lines(tmp_path / "run"))


def test_a_dead_rank_ends_the_others(tokens, tmp_path, start):
    ranks = start(nano(tokens, train__max_steps=100_000, train__timeout_s=20), tmp_path / "run", 2)
    ranks.reach(3)
    ranks.processes[1].kill()
    assert ranks.wait()[0] == 1
    assert "error: another rank has ended or does not answer" in ranks.output


def test_a_rank_whose_first_cannot_start_ends_with_an_error(tokens, tmp_path, start):
    """The folder is held by somebody else, which only the first rank sees."""
    from millrace.store.lock import FolderLock

    folder = tmp_path / "run"
    folder.mkdir()
    lock = FolderLock(folder, folder, folder)
    assert lock.acquire()
    ranks = start(nano(tokens, train__timeout_s=20), folder, 2)
    assert ranks.wait() == [1, 1]
    lock.release()
    assert "is being written by" in ranks.output
    assert "Traceback" not in ranks.output
