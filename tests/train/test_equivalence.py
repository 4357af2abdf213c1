"""One gradient, however a batch is divided: over ranks, over micro-batches, in shards, with recomputed activations."""

from __future__ import annotations

import os
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import millrace as mr
from millrace.feed.batch import Batch
from millrace.train.config import parse_config
from millrace.train.dist import World
from millrace.train.evaluate import evaluate
from millrace.train.models.gpt import GPT
from millrace.train.open_run import load_model
from millrace.train.optimizers import build_optimizer
from millrace.train.parallel import distribute
from millrace.train.precision import Precision
from millrace.train.stepper import Stepper, micro_batches
from millrace.train.trainer import Trainer, train

from .conftest import config_of, lines, losses, nano, weights

ALONE = World(0, 1, torch.device("cpu"))


def close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    for name in left:
        scale = left[name].abs().max().item()
        assert (left[name] - right[name]).abs().max().item() <= tolerance * scale, name


# Micro-batches, in one process.


def batch_of(rng: np.random.Generator, *, masked: bool) -> Batch:
    x = torch.from_numpy(rng.integers(0, 50, (12, 8)))
    y = torch.from_numpy(rng.integers(0, 50, (12, 8)))
    # Samples with one target beside samples with eight, and one with none.
    kept = rng.random((12, 8)) < np.linspace(0, 1, 12)[:, None]
    return Batch({"x": x, "y": y, **({"mask": torch.from_numpy(kept.astype(np.uint8))} if masked else {})})


def stepper_of(micro: int, precision: str, recompute: bool = False, **optimizer: object) -> Stepper:
    options = {"name": "sgd", "lr": 0.5, "schedule": "constant", "weight_decay": 0.0, **optimizer}
    config = parse_config(
        {"train": {"batch": 12, "micro_batch": micro, "precision": precision, "clip": 0.0}, "optimizer": options}
    )
    torch.manual_seed(0)
    kind = Precision(precision, torch.device("cpu"))
    model = GPT(vocabulary=50, length=8, layers=2, heads=2, width=16).to(kind.dtype)
    model.blocks.recompute = recompute
    return Stepper(model, model, build_optimizer(model, config.optimizer), kind, config, ALONE)


def gradients(stepper: Stepper) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in stepper.model.named_parameters()}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("micro", [1, 5, 6])
def test_micro_batches_are_one_large_batch_in_float64(micro, masked):
    whole, parts = stepper_of(0, "fp64"), stepper_of(micro, "fp64")
    assert parts.micro_batches == -(-12 // micro)
    rng = np.random.default_rng(1)
    for step in range(1, 11):
        batch = batch_of(rng, masked=masked)
        loss, norm = whole.step(batch, step)
        loss_of_parts, norm_of_parts = parts.step(batch, step)
        torch.testing.assert_close(loss_of_parts, loss, rtol=1e-9, atol=0)
        torch.testing.assert_close(norm_of_parts, norm, rtol=1e-9, atol=0)
        close(gradients(whole), gradients(parts), 1e-9)
        close(whole.model.state_dict(), parts.model.state_dict(), 1e-9)


def test_micro_batches_are_one_large_batch_in_float32():
    whole, parts = stepper_of(0, "fp32"), stepper_of(5, "fp32")
    rng = np.random.default_rng(1)
    for step in range(1, 21):
        batch = batch_of(rng, masked=True)
        loss, loss_of_parts = whole.step(batch, step)[0], parts.step(batch, step)[0]
        if step == 1:
            close(gradients(whole), gradients(parts), 1e-4)
        torch.testing.assert_close(loss_of_parts, loss, rtol=1e-3, atol=0)


def test_a_batch_without_targets_changes_nothing():
    stepper = stepper_of(4, "fp64")
    before = {name: value.clone() for name, value in stepper.model.state_dict().items()}
    batch = batch_of(np.random.default_rng(1), masked=True)
    batch["mask"].zero_()
    loss, norm = stepper.step(batch, 1)
    assert loss == 0
    assert norm == 0
    assert all(torch.equal(before[name], value) for name, value in stepper.model.state_dict().items())


def test_every_step_is_one_of_training_whatever_the_model_did_before():
    stepper, modes = stepper_of(0, "fp32"), []
    stepper.model.blocks[1].register_forward_pre_hook(lambda block, _: modes.append(block.training))
    for step in range(1, 4):
        stepper.step(batch_of(np.random.default_rng(1), masked=False), step)
        stepper.model.blocks[1].eval()
    assert modes == [True] * 3


def test_recomputed_activations_give_the_same_gradient():
    plain, again = stepper_of(0, "fp64"), stepper_of(0, "fp64", recompute=True)
    batch = batch_of(np.random.default_rng(1), masked=True)
    plain.step(batch, 1)
    again.step(batch, 1)
    close(gradients(plain), gradients(again), 1e-12)


def test_deterministic_kernels_are_switched_on_by_their_key(tokens, tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        for wanted in (False, True):
            Trainer(config_of(tokens, train__deterministic=wanted), tmp_path / str(wanted), ALONE).close()
            assert torch.are_deterministic_algorithms_enabled() == wanted
            assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == wanted  # without it CUDA's products are refused
    finally:
        torch.use_deterministic_algorithms(False)


def test_recomputing_is_switched_on_by_its_key(tokens, tmp_path):
    """Each block then runs twice in a step, once of them in the backward pass."""
    for recompute in (False, True):
        trainer = Trainer(config_of(tokens, train__recompute=recompute), tmp_path / str(recompute), ALONE)
        runs = []
        trainer.model.blocks[0].register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        trainer.stepper.step(trainer.precision.to_device(next(iter(trainer.feed))), 1)
        trainer.close()
        assert len(runs) == 1 + recompute


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own, of its compiler
def test_compiling_is_switched_on_by_its_key():
    """Without running the compiler, which takes a minute: a call of the model would go through it."""
    for compiled in (False, True):
        model = nn.Linear(2, 2)
        assert distribute(model, parse_config({"train": {"compile": compiled}}), ALONE) is model
        assert (model._compiled_call_impl is not None) == compiled


def test_gradients_are_clipped_as_a_plain_loop_does():
    """Against gradients scaled by hand; the limit is below every norm."""
    limit = 0.05
    config = parse_config({
        "train": {"batch": 12, "precision": "fp64", "clip": limit},
        "optimizer": {"name": "sgd", "lr": 0.5, "schedule": "constant", "weight_decay": 0.0},
    })  # fmt: skip
    plain = stepper_of(0, "fp64").model
    clipped = stepper_of(0, "fp64")
    clipped.config = config
    rng = np.random.default_rng(1)
    for step in range(1, 6):
        batch = batch_of(rng, masked=False)
        _, norm = clipped.step(batch, step)
        plain.zero_grad()
        plain(batch).backward()
        whole = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
        assert whole > 2 * limit
        torch.testing.assert_close(norm, whole, rtol=1e-9, atol=0)
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.5 * p.grad * (limit / (whole + 1e-6))  # as torch has it
        close(plain.state_dict(), clipped.model.state_dict(), 1e-9)


def test_gradients_travel_once_per_step(tmp_path):
    """DDP over one rank, three micro-batches: each bucket is reduced with the last alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        stepper = stepper_of(4, "fp64")
        ddp = DistributedDataParallel(stepper.model)
        reduced = []

        def count(state, bucket):
            reduced.append(bucket.is_last())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        ddp.register_comm_hook(None, count)
        stepper.forward = ddp
        for step in (1, 2):
            stepper.step(batch_of(np.random.default_rng(1), masked=False), step)
            assert sum(reduced) == step
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_is_traced_whole_and_gives_the_same_gradient():
    """What ``torch.compile`` sees: no graph break, the batch included. Its code generator is not run, which takes a minute."""
    plain, traced = stepper_of(0, "fp64"), stepper_of(0, "fp64")
    traced.model.compile(backend="eager", fullgraph=True)
    batch = batch_of(np.random.default_rng(1), masked=True)
    plain.step(batch, 1)
    traced.step(batch, 1)
    close(gradients(plain), gradients(traced), 1e-12)


@pytest.mark.parametrize(
    ("batch", "size", "ranks", "expected"),
    [(12, 0, 1, 1), (12, 5, 1, 3), (12, 3, 4, 1), (10, 1, 4, 3), (10, 2, 4, 2), (7, 3, 2, 2), (5, 1, 4, 2)],
)
def test_every_rank_takes_the_same_number_of_micro_batches(batch, size, ranks, expected):
    assert micro_batches(batch, size, World(0, ranks, torch.device("cpu"))) == expected


# Ranks, in processes of their own.


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"train__batch": 10, "train__micro_batch": 2}),
        (4, {"model__kind": "own_models:Uneven", "model__options": {"features": 3, "targets": 3}, "train__batch": 10,
             "optimizer__name": "sgd", "optimizer__lr": 1e-3, "train__clip": 0.0}),
        (3, {"train__batch": 5, "train__micro_batch": 1, "train__halve_on_oom": True}),  # one rank has a sample less
        (3, {"train__batch": 5, "train__micro_batch": 1, "train__parallel": "fsdp2"}),
    ],
    ids=["gpt-2", "uneven-4", "late-3", "sharded-3"],
)  # fmt: skip
def test_ranks_are_one_process_in_float64(ranks, changes, tokens, waves, tmp_path, start):
    store = waves if "model__kind" in changes else tokens
    values = nano(store, train__precision="fp64", **changes)
    train(parse_config(values), tmp_path / "one")
    start(values, tmp_path / "several", ranks).finish()
    for key in ("loss", "grad_norm"):
        one, several = ([line[key] for line in lines(tmp_path / run) if key in line] for run in ("one", "several"))
        assert len(one) == 10
        np.testing.assert_allclose(several, one, rtol=1e-9)
    if values["train"].get("parallel") != "fsdp2":
        close(weights(tmp_path / "one"), weights(tmp_path / "several"), 1e-9)
    evaluations = [
        [line["val_loss"] for line in lines(tmp_path / run) if "val_loss" in line] for run in ("one", "several")
    ]
    np.testing.assert_allclose(evaluations[1], evaluations[0], rtol=1e-9)


def test_ranks_are_one_process_in_float32(tokens, tmp_path, start):
    """SGD with a constant rate: the first change of the weights is the gradient."""
    values = nano(
        tokens, train__max_steps=20, train__clip=0.0, optimizer__name="sgd", optimizer__lr=0.1, optimizer__schedule="constant",
        optimizer__warmup=0, optimizer__weight_decay=0.0, checkpoint__every=1, checkpoint__keep=30,
    )  # fmt: skip
    config = parse_config(values)
    trainer = Trainer(config, tmp_path / "start", ALONE)
    at_start = trainer.model.state_dict()
    trainer.close()
    train(config, tmp_path / "one")
    start(values, tmp_path / "two", 2).finish()
    first = [_step_weights(tmp_path / run, 1) for run in ("one", "two")]
    close(*[{name: at_start[name] - found[name] for name in found} for found in first], 1e-4)
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    np.testing.assert_allclose([two[step] for step in one], list(one.values()), rtol=1e-3)


def _step_weights(run, step: int) -> dict[str, Tensor]:
    from millrace.train.tensors import read_tensors

    return read_tensors(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def test_sharded_training_is_one_process_and_its_checkpoint_loads_without_shards(tokens, tmp_path, start):
    """FSDP2 on two ranks, continued by one process without it, and by two ranks with it again."""
    values = nano(tokens, train__precision="fp64", train__max_steps=12, checkpoint__every=4, optimizer__decay_steps=12)
    train(parse_config(values), tmp_path / "one")
    sharded = {**values, "train": {**values["train"], "parallel": "fsdp2", "max_steps": 4, "micro_batch": 2}}
    start(sharded, tmp_path / "run", 2).finish()
    folder = tmp_path / "run" / "checkpoints" / "step-00000004"
    assert len(list((folder / "model").glob("*.safetensors"))) == 2
    assert not [path for path in folder.rglob("*") if path.suffix in (".pt", ".pth", ".metadata", ".distcp")]
    alone = {**values, "train": {**values["train"], "max_steps": 8}}
    train(parse_config(alone), tmp_path / "run")
    sharded["train"]["max_steps"] = 12
    start(sharded, tmp_path / "run", 2).finish()
    one, several = losses(tmp_path / "one"), losses(tmp_path / "run")
    assert sorted(several) == list(range(1, 13))
    np.testing.assert_allclose([several[step] for step in one], list(one.values()), rtol=1e-9)
    loaded = load_model(tmp_path / "run").model
    close(weights(tmp_path / "one"), {name: value.double() for name, value in loaded.state_dict().items()}, 1e-6)


SPARE = {"model__kind": "own_models:Spare", "train__precision": "fp64", "train__micro_batch": 3}


def test_a_parameter_in_no_loss_is_the_same_on_ranks_as_on_one(waves, tmp_path, start):
    options = {"features": 3, "targets": 3}
    train(config_of(waves, **SPARE, model__options=options), tmp_path / "one")
    start(nano(waves, **SPARE, model__options=options), tmp_path / "two", 2).finish()
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    np.testing.assert_allclose([two[step] for step in one], list(one.values()), rtol=1e-9)
    close(weights(tmp_path / "one"), weights(tmp_path / "two"), 1e-9)


def test_a_parameter_in_the_losses_of_one_rank(waves, tmp_path, start):
    options = {"features": 3, "targets": 3, "rank": 1}
    start(nano(waves, **SPARE, model__options=options), tmp_path / "run", 2).finish()
    assert len(losses(tmp_path / "run")) == 10


def test_a_parameter_that_leaves_the_loss_is_named(waves, tmp_path, start):
    options = {"features": 3, "targets": 3, "until": 3 * 2}  # of two micro-batches each
    ranks = start(nano(waves, **SPARE, model__options=options), tmp_path / "run", 2)
    assert ranks.wait() == [1, 1]
    assert (
        "error: model.kind = 'own_models:Spare': the loss of step 4 does not depend on spare.weight, spare.bias"
        in ranks.output
    )
    assert "Traceback" not in ranks.output
    start(nano(waves, **SPARE, model__options=options, train__halve_on_oom=True), tmp_path / "late", 2).finish()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_running_buffers_are_those_of_the_first_rank_evaluated_saved_and_resumed(parallel, waves, tmp_path, start):
    changes = {
        "model__kind": "own_models:Normed",
        "model__options": {"features": 3, "targets": 3},
        "train__parallel": parallel,
        "train__micro_batch": 3,
        "optimizer__decay_steps": 8,
        "evaluation__every": 4,
        "checkpoint__every": 4,
    }
    start(nano(waves, **changes, train__max_steps=8), tmp_path / "whole", 2).finish()
    start(nano(waves, **changes, train__max_steps=4), tmp_path / "resumed", 2).finish()
    start(nano(waves, **changes, train__max_steps=8), tmp_path / "resumed", 2).finish()
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    found = {line["step"]: line["val_loss"] for line in lines(tmp_path / "whole") if "val_loss" in line}
    assert found == {line["step"]: line["val_loss"] for line in lines(tmp_path / "resumed") if "val_loss" in line}
    trained = load_model(tmp_path / "resumed", own="own_models:Normed")
    assert trained.model.is_used
    assert trained.model.norm.num_batches_tracked == 16
    view = mr.Windows(mr.open_store(waves).split("val"), lookback=16, horizon=4)
    batch = {name: torch.from_numpy(value) for name, value in view[np.arange(len(view))].items()}
    with torch.no_grad():
        np.testing.assert_allclose(found[8], trained.model(batch).item(), rtol=1e-5)


class Collecting(World):
    """One rank of several that keeps what it would have added to the others."""

    sums: ClassVar[list[Tensor]] = []

    def add(self, value: Tensor) -> Tensor:
        self.sums.append(value.clone())
        return value


@pytest.mark.parametrize("ranks", [1, 5])
def test_every_val_sample_counts_once_on_any_number_of_ranks(ranks, waves, tmp_path):
    """The mean over all samples, of a val split that does not divide into batches, also with shares of padding alone."""
    config = config_of(waves, model__kind="lstm", train__batch=70, train__precision="fp64")
    trainer = Trainer(config, tmp_path / "run", ALONE)
    trainer.close()
    torch.nn.init.normal_(trainer.model.leave.weight)
    view = mr.Windows(mr.open_store(waves).split("val"), lookback=16, horizon=4)
    assert 0 < len(view) % 70 <= 14  # of five ranks four have nothing in the last batch
    Collecting.sums.clear()
    for rank in range(ranks):
        trainer.stepper.world = Collecting(rank, ranks, torch.device("cpu"))
        evaluate(view, trainer.stepper)
    total, loss, compared, baseline = torch.stack(Collecting.sums).sum(0).tolist()
    everything = {name: torch.from_numpy(value).double() for name, value in view[np.arange(len(view))].items()}
    with torch.no_grad():
        expected = nn.functional.mse_loss(trainer.model.forecast(everything), everything["y"]).item()
    assert total == compared == everything["y"].numel()
    np.testing.assert_allclose(loss / total, expected, rtol=1e-9)
    np.testing.assert_allclose(
        baseline / total, (everything["x"][:, -1:] - everything["y"]).square().mean().item(), rtol=1e-9
    )


def test_evaluation_draws_nothing(tokens, tmp_path):
    """Dropout is off there: the loss is that of the saved model in evaluation mode, over the whole split."""
    train(config_of(tokens, model__dropout=0.5, train__max_steps=3), tmp_path / "run")
    (found,) = [line["val_loss"] for line in lines(tmp_path / "run") if "val_loss" in line]
    model = load_model(tmp_path / "run").model
    view = mr.Blocks(mr.open_store(tokens).split("val"), length=16)
    batch = {name: torch.from_numpy(np.asarray(value)) for name, value in view[np.arange(len(view))].items()}
    batch = {name: value.long() if name in "xy" else value for name, value in batch.items()}
    with torch.no_grad():
        np.testing.assert_allclose(found, model(batch).item(), rtol=1e-5)
