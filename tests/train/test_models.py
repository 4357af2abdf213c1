"""The models: what they may look at, what they are given, what they learn."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import millrace as mr
from millrace.train.config import parse_config
from millrace.train.data import build_model, training_view, vocabulary
from millrace.train.models import gpt as gpt_module
from millrace.train.models import layers
from millrace.train.models.forecaster import Forecaster, Shapes
from millrace.train.models.gpt import GPT, document_mask, documents_by
from millrace.train.optimizers import build_optimizer
from millrace.train.pace import memory_by_part
from millrace.train.precision import Precision
from millrace.train.trainer import Trainer, train

from .conftest import config_of, lines, losses, nano
from .test_equivalence import ALONE, batch_of, stepper_of

SMALL = {"layers": 2, "heads": 2, "width": 16}


def gpt(**options: object) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"vocabulary": 50, "length": 12, **SMALL, **options}).double()


def test_a_token_sees_only_earlier_ones():
    model, x = gpt(), torch.arange(12)[None] % 50
    before = model.logits(x)
    x[0, 7] = 33
    after = model.logits(x)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_with_a_document_mask_a_token_sees_only_its_document():
    """Ends of documents at 3 and 8: what lies before an end does not reach beyond it, the end itself belongs to its document."""
    model = gpt(separator=9)
    x = torch.tensor([[1, 2, 3, 9, 4, 5, 6, 7, 9, 8, 1, 2]])
    before = model.logits(x)
    x[0, 1] = 40
    after = model.logits(x)
    changed = (before != after).any(-1)[0].tolist()
    assert changed == [False, True, True, True] + [False] * 8
    mask = document_mask(documents_by(x, 9))[0]
    assert mask[3].tolist() == [True] * 4 + [False] * 8
    assert mask[9].tolist() == [False] * 9 + [True] + [False] * 2


def attend_run_by_run(q, k, v, starts, longest):
    """The slow twin of ``varlen``, which only a GPU has."""
    assert max(np.diff(starts.tolist())) <= longest
    runs = [[own[a:b].transpose(0, 1)[None] for own in (q, k, v)] for a, b in pairwise(starts.tolist())]
    mixed = [functional.scaled_dot_product_attention(*run, is_causal=True)[0].transpose(0, 1) for run in runs]
    return torch.cat(mixed)


@pytest.mark.parametrize("by", ["mask", "runs"])
def test_packed_documents_do_not_see_each_other(by, monkeypatch):
    """Other tokens in one document leave every bit of the others' scores as it was; positions begin anew in each."""
    if by == "runs":
        monkeypatch.setattr(layers, "varlen", lambda: attend_run_by_run)
        monkeypatch.setattr(gpt_module, "takes_runs", lambda x, head_width: True)
    lengths = [5, 4, 3, 6, 6]
    tokens = np.random.default_rng(0).integers(0, 50, sum(lengths)).astype(np.uint16)
    store = mr.from_arrays({"tokens": tokens}, np.concatenate(([0], np.cumsum(lengths))))
    block = {name: torch.from_numpy(array) for name, array in mr.Packed(store, length=12)[[0, 1]].items()}
    model = gpt()
    marks = block["document"], block["place"]
    before = model.logits(block["x"], *marks)
    other = block["x"].clone()
    is_first = block["document"] == 0
    other[is_first] = (other[is_first] + 1) % 50
    after = model.logits(other, *marks)
    assert torch.equal(before[~is_first], after[~is_first])
    assert not torch.equal(before[is_first], after[is_first])
    row, start = 0, int((block["document"][0] == 1).nonzero()[0])
    alone = model.logits(block["x"][row : row + 1, start:][:, (block["document"][row, start:] == 1)])
    torch.testing.assert_close(before[row, start : start + alone.shape[1]], alone[0])
    monkeypatch.undo()
    torch.testing.assert_close(model.logits(block["x"], *marks), before)


def test_a_gpt_trains_on_packed_documents(tmp_path: Path):
    lengths = np.random.default_rng(1).integers(2, 40, 60)
    tokens = np.concatenate([np.arange(n) % 16 for n in lengths]).astype(np.uint16)
    with mr.StoreWriter(tmp_path / "store", kind="text", columns={"tokens": mr.Column("uint16")}) as writer:
        writer.extend({"tokens": tokens}, np.concatenate(([0], np.cumsum(lengths))))
    data = {"store": str(tmp_path / "store"), "length": 32, "pack": True}
    model = {"kind": "gpt", "vocabulary": 64, "layers": 1, "heads": 2, "width": 16}
    config = parse_config(
        {"data": data, "model": model, "train": {"max_steps": 60, "batch": 8}, "optimizer": {"lr": 0.02}}
    )
    train(config, tmp_path / "run")
    found = losses(tmp_path / "run")
    assert found[60] < found[10] / 2


def test_masked_targets_do_not_count():
    model, batch = gpt(), {"x": torch.arange(12)[None], "y": torch.arange(1, 13)[None]}
    kept = torch.tensor([[1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]])
    loss = model({**batch, "mask": kept})
    scores = torch.log_softmax(model.logits(batch["x"]), -1)[0]
    expected = -torch.stack([scores[k, batch["y"][0, k]] for k in (0, 2, 11)]).mean()
    torch.testing.assert_close(loss, expected)
    assert model.targets({**batch, "mask": kept}) == 3


def test_the_vocabulary_is_the_stores_rounded_up(tokens):
    store = mr.open_store(tokens)
    assert vocabulary(store, config_of(tokens)) == 256
    assert vocabulary(store, config_of(tokens, model__vocabulary=201)) == 201


def test_presets_have_the_size_they_are_named_after(tokens):
    from millrace.train.config import load_config

    for name, expected in (("gpt-124m", 124e6), ("gpt-150m", 152e6), ("gpt-250m", 253e6)):
        config = load_config(Path(__file__).parents[2] / "configs" / f"{name}.toml", ["model.vocabulary=50304"])
        with torch.device("meta"):
            model = build_model(config, mr.open_store(tokens), None)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(expected, rel=0.01)


def test_nano_is_done_in_two_minutes_with_any_tokenizer(tokens):
    """Counted, not timed: a core does about 6e10 operations a second, and gpt2's vocabulary is the largest in use."""
    from millrace.train.config import load_config
    from millrace.train.evaluate import num_batches

    config = load_config("nano", ["model.vocabulary=50304"])
    with torch.device("meta"):
        model = build_model(config, mr.open_store(tokens), None)
    batch = {"x": torch.zeros(config.train.batch, config.data.length, dtype=torch.int64)}
    evaluations = config.train.max_steps // config.evaluation.every
    batches = evaluations * num_batches(config, samples=10**9, batch=config.train.batch)
    steps = config.train.max_steps + batches / 3  # forward only
    assert steps * model.flops(batch) <= 120 * 6e10


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with all that can be included: gaps, categories, static features, what is known ahead."""
    import pandas

    rng = np.random.default_rng(0)
    frames = []
    for sensor in range(6):
        hours = np.arange(120)
        frame = pandas.DataFrame(
            {"sensor": f"s{sensor}", "time": hours, "heat": np.sin(hours / 4 + sensor) * (sensor + 1)}
        )
        frame["load"] = rng.normal(size=120)
        frame["shift"] = np.where(hours % 24 < 12, "day", "night")
        frame["size"], frame["site"] = float(sensor), f"site-{sensor % 2}"
        frame.loc[rng.choice(120, 9, replace=False), "load"] = np.nan
        frames.append(frame)
    folder = tmp_path_factory.mktemp("table")
    pandas.concat(frames).to_parquet(folder / "t.parquet")
    mr.prepare_table(
        str(folder / "t.parquet"), folder / "store", entity=("sensor",), time="time", features=("heat", "load"), target=("heat",),
        static=("size", "site"), categorical=("shift",), known_future=("shift", "load"), nulls={"load": "mask"}, val_last=0.2,
    )  # fmt: skip
    return folder / "store"


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_forecasters_use_all_that_is_included(kind, table, tmp_path):
    """Each input changes the forecast; masked values do not."""
    include = ("mask", "categorical", "known_future", "static", "static_categorical")
    config = config_of(table, model__kind=kind, data__include=include, train__max_steps=3)
    train(config, tmp_path / "run")
    store = mr.open_store(table)
    view = training_view(store, config)
    torch.manual_seed(1)
    model = build_model(config, store, view).double().eval()
    torch.nn.init.normal_(model.leave.weight)
    items = view[np.arange(60)]
    batch = {
        name: torch.from_numpy(value).double() if value.dtype.kind == "f" else torch.from_numpy(value)
        for name, value in items.items()
    }
    before = model.forecast(batch)
    assert {"static", "static_categorical", "categorical", "known_future", "known_categorical", "mask"} <= set(batch)
    for name in ("static", "static_categorical", "categorical", "known_future", "known_categorical"):
        other = {**batch, name: 1 - batch[name]}
        assert not torch.allclose(model.forecast(other), before), name
    gone = batch["mask"] == 0
    assert gone.any()
    assert not gone[:, -1].all()
    # Whatever lies where nothing was observed, NaN too.
    hidden = {**batch, "x": torch.where(gone, torch.nan, batch["x"])}
    torch.testing.assert_close(model.forecast(hidden), before)
    unknown = {**batch, "categorical": torch.full_like(batch["categorical"], -1)}
    assert torch.isfinite(model.forecast(unknown)).all()


def test_a_target_that_is_not_an_input_has_no_baseline(table, tmp_path):
    train(config_of(table, model__kind="lstm", data__inputs=("load",), data__target=("heat",)), tmp_path / "run")
    (line,) = [line for line in lines(tmp_path / "run") if "val_loss" in line]
    assert "val_baseline" not in line


def test_an_untrained_forecaster_repeats_the_last_value():
    shapes = Shapes(features=3, outputs=2, targets=(2, 0), lookback=8, horizon=4)
    model = Forecaster(shapes, kind="lstm", **SMALL)
    x = torch.randn(5, 8, 3)
    torch.testing.assert_close(model.forecast({"x": x}), x[:, -1:, [2, 0]].expand(5, 4, 2))
    batch = {"x": x, "y": torch.randn(5, 4, 2)}
    torch.testing.assert_close(model(batch), model.baseline(batch)[0])


class Said(list):
    """A console that keeps its lines."""

    say = show = note = list.append


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_forecasters_have_the_mask_of_a_store_unasked(kind, gaps, tmp_path):
    """The run is the one that asks for it, its configuration says so, and the same command continues it."""
    from millrace.train.run_folder import read_run

    said, half = Said(), {"train__max_steps": 5, "optimizer__decay_steps": 10}
    train(config_of(gaps, model__kind=kind, data__include=("mask",)), tmp_path / "asked")
    train(config_of(gaps, model__kind=kind, **half), tmp_path / "unasked", console=said)
    assert len([line for line in said if "added 'mask' to data.include" in line]) == 1
    assert read_run(tmp_path / "unasked").config.data.include == ("mask",)
    train(config_of(gaps, model__kind=kind), tmp_path / "unasked", console=said)
    assert len([line for line in said if "include" in line or "began without" in line]) == 1
    assert losses(tmp_path / "unasked") == losses(tmp_path / "asked")
    with pytest.raises(mr.ConfigError, match=r'data.include was \["mask"\]'):
        train(config_of(gaps, model__kind=kind, data__include=("time",)), tmp_path / "unasked")


def test_a_run_that_began_without_the_mask_goes_on_without(gaps, tmp_path, monkeypatch):
    from millrace.train import data
    from millrace.train.run_folder import read_run

    with monkeypatch.context() as earlier:
        earlier.setattr(data, "with_mask", lambda config, store: config)
        train(config_of(gaps, model__kind="lstm", train__max_steps=5), tmp_path / "run")
    said = Said()
    train(config_of(gaps, model__kind="lstm"), tmp_path / "run", console=said)
    assert sorted(losses(tmp_path / "run")) == list(range(1, 11))
    assert read_run(tmp_path / "run").config.data.include == ()
    assert len([line for line in said if "began without the mask" in line]) == 1
    with pytest.raises(mr.ConfigError, match=r'data.include was \[\] .* and is \["mask"\] now'):
        train(config_of(gaps, model__kind="lstm", data__include=("mask",)), tmp_path / "run")


def test_a_mask_of_something_else_is_left_alone(tmp_path):
    columns = {"values": mr.Column("float32", (3,)), "mask": mr.Column("uint8")}
    with mr.StoreWriter(tmp_path / "store", kind="series", columns=columns) as writer:
        writer.append({"values": np.random.default_rng(0).normal(size=(100, 3)), "mask": np.zeros(100, np.uint8)})
    train(config_of(tmp_path / "store", model__kind="lstm"), tmp_path / "run")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_baseline_repeats_the_last_value_that_was_seen(precision, gaps, tmp_path):
    """Against a loop over windows: fillers are repeated by nobody, and a window that saw nothing has nothing to repeat."""
    config = config_of(
        gaps, model__kind="lstm", data__include=("mask",), train__max_steps=1, train__precision=precision
    )
    train(config, tmp_path / "run")
    (line,) = [line for line in lines(tmp_path / "run") if "val_loss" in line]
    view = mr.Windows(mr.open_store(gaps).split("val"), lookback=16, horizon=4, include=["mask"])
    squares, empty = [], 0
    for sample in range(len(view)):
        window = {name: value[0] for name, value in view[np.array([sample])].items()}
        heat = window["x"][:, 0][window["mask"][:, 0] != 0]
        empty += not len(heat)
        if len(heat):
            squares += (heat[-1] - window["y"])[window["y_mask"] != 0].tolist()
    assert empty
    assert line["val_baseline"] == pytest.approx(np.mean(np.square(squares)), rel=1e-5)


def test_targets_that_are_missing_do_not_count():
    shapes = Shapes(features=1, outputs=1, targets=(0,), lookback=4, horizon=2)
    model = Forecaster(shapes, kind="transformer", **SMALL)
    batch = {
        "x": torch.zeros(3, 4, 1),
        "y": torch.tensor([[[1.0], [float("nan")]]] * 3),
        "y_mask": torch.tensor([[[1], [0]]] * 3),
    }
    loss = model(batch)
    assert loss == 1.0
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert model.targets(batch) == 3


# What they learn; that a GPT learns the standard library is shown by the demo's test.


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_a_forecaster_beats_repeating_the_last_value(kind, waves, tmp_path):
    config = config_of(
        waves, model__kind=kind, train__max_steps=150, train__batch=32, optimizer__lr=5e-3, checkpoint__every=0
    )
    train(config, tmp_path / "run")
    (line,) = [line for line in lines(tmp_path / "run") if "val_loss" in line]
    assert line["val_loss"] <= 0.8 * line["val_baseline"]


# Precision and memory.


def test_fp16_counts_the_steps_it_skips_and_resumes_its_scale(tokens, tmp_path):
    """The first scale, 65,536, overflows a huge loss: those steps change nothing, then training goes on."""
    stepper = stepper_of(0, "fp16")
    stepper.precision.scaler.load_state_dict({**stepper.precision.scaler.state_dict(), "scale": 1e38})
    before = stepper.model.tokens.weight.clone()
    batch = batch_of(np.random.default_rng(0), masked=False)
    stepper.step(batch, 1)
    assert stepper.precision.skipped == 1
    assert torch.equal(before, stepper.model.tokens.weight)
    state = stepper.precision.state()
    again = Precision("fp16", torch.device("cpu"))
    again.load(state)
    assert again.scaler.get_scale() == stepper.precision.scaler.get_scale() == pytest.approx(5e37)
    train(config_of(tokens, train__precision="fp16", train__max_steps=12), tmp_path / "run")
    found = losses(tmp_path / "run")
    assert found[12] < found[1]
    assert all("skipped" in line for line in lines(tmp_path / "run") if "loss" in line)


def test_fp16_counts_skips_also_where_no_scale_is_left():
    stepper = stepper_of(0, "fp16")
    stepper.precision.scaler.load_state_dict({**stepper.precision.scaler.state_dict(), "scale": 1e-44})
    stepper.model.tokens.weight.register_hook(lambda gradient: gradient * torch.nan)
    for step in range(1, 6):
        stepper.step(batch_of(np.random.default_rng(0), masked=False), step)
    assert stepper.precision.scaler.get_scale() == 0
    assert stepper.precision.skipped == 5
    assert stepper.precision.has_given_up


def test_fp16_stops_where_no_scale_helps(waves, tmp_path):
    """Every gradient is NaN: with the first scale, 2^16, that of step 31 leaves less than 2^-14."""
    options = {"features": 3, "targets": 3, "at": 1}
    changes = {"train__precision": "fp16", "train__max_steps": 1000, "checkpoint__every": 10, "train__log_every": 1}
    config = config_of(waves, model__kind="own_models:NoGradient", model__options=options, **changes)
    message = (
        r"the gradient of step 31 is not finite, .* 31 steps were skipped: take bf16 or fp32; samples \[.* of step 30"
    )
    with pytest.raises(mr.TrainError, match=message) as stopped:
        train(config, tmp_path / "run")
    assert stopped.value.step == 31
    view = mr.Windows(mr.open_store(waves).split("train"), lookback=16, horizon=4)
    assert stopped.value.samples == mr.Feed(view, batch=12, seed=7, device="numpy").explain(30).samples.tolist()
    assert [line["skipped"] for line in lines(tmp_path / "run") if "skipped" in line] == list(range(1, 31))


def test_bf16_trains(tokens, tmp_path):
    train(config_of(tokens, train__precision="bf16", train__max_steps=12), tmp_path / "run")
    found = losses(tmp_path / "run")
    assert found[12] < found[1]


def test_adafactor_keeps_far_less_than_adamw(tokens):
    sizes = {}
    for name in ("adamw", "adafactor", "sgd"):
        stepper = stepper_of(0, "fp32", name=name)
        stepper.step(batch_of(np.random.default_rng(0), masked=False), 1)
        sizes[name] = memory_by_part(stepper.model, stepper.optimizer)
    parameters = sizes["adamw"]["parameters"]
    assert all(size["parameters"] == size["gradients"] == parameters for size in sizes.values())
    assert sizes["adamw"]["optimizer"] >= 2 * parameters
    assert sizes["adafactor"]["optimizer"] < 0.35 * parameters
    assert sizes["sgd"]["optimizer"] == 0


def test_vectors_do_not_decay():
    model = gpt()
    optimizer = build_optimizer(model, parse_config({"optimizer": {"weight_decay": 0.3}}).optimizer)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decays[id(p)] for name, p in model.named_parameters()} == {
        name: 0.3 if p.dim() >= 2 else 0.0 for name, p in model.named_parameters()
    }


def test_dropout_follows_the_step_and_nothing_else(tokens, tmp_path):
    """What was drawn before, here by a program of its own, does not matter."""
    config = config_of(tokens, model__dropout=0.3, train__max_steps=4)
    train(config, tmp_path / "a")
    torch.rand(1000)
    trainer = Trainer(config, tmp_path / "b", ALONE)
    torch.rand(17)
    trainer.run()
    trainer.close()
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_sources_of_two_tokenizers_train_where_that_is_allowed(tmp_path):
    """The ids of all fit into the model, whichever source is the first."""
    (tmp_path / "text.txt").write_text("to be or not to be " * 40)
    for name in ("char", "bytes"):
        mr.prepare_text(str(tmp_path / "text.txt"), tmp_path / name, tokenizer=name, val=0, workers=1)
    sources = [{"store": str(tmp_path / name), "weight": 1} for name in ("char", "bytes")]
    values = nano(tmp_path / "char", data__sources=sources, data__store="")
    store = mr.open_store(tmp_path / "char")
    with pytest.raises(mr.ConfigError, match=r"another tokenizer.*data\.allow_mixed_tokenizers = true"):
        training_view(store, parse_config(values))
    values["data"]["allow_mixed_tokenizers"] = True
    config = parse_config(values)
    assert len(training_view(store, config).stores) == 2
    assert vocabulary(store, config) == 320  # 257 of bytes


def test_a_run_reads_the_column_that_the_configuration_names():
    store = mr.from_arrays({"ids": np.arange(90, dtype=np.uint16), "more": np.zeros(90, np.uint16)})
    with pytest.raises(mr.ConfigError, match="ids, more; name one"):
        training_view(store, parse_config(nano("store")))
    config = parse_config(nano("store", data__column="ids"))
    assert training_view(store, config).column == "ids"
    assert (
        vocabulary(
            mr.from_arrays({"ids": np.arange(90), "more": np.zeros(90, np.int64)}, meta={"vocabulary": 5}), config
        )
        == 128
    )
