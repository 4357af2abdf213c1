"""Everything together: a mixture of filtered sources, packed or bounded by rows, transformed in worker processes.

Resumed with another world, batch and number of workers, the rest has the same samples and the same bytes.
"""

import json
import os

import numpy as np
import pytest

import millrace as mr
from millrace.feed import budget

PROCESSES = hasattr(os, "memfd_create")  # threads on other platforms
MANY = 330  # samples, more than any history here delivers


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(budget, "WINDOW", 32)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two stores of documents on disk, in several shards."""
    found = []
    for number, count in enumerate((90, 50)):
        rng = np.random.default_rng(number)
        path = tmp_path_factory.mktemp("together") / f"store{number}"
        columns = {"tokens": mr.Column("uint16"), "label": mr.Column("int64", per="record")}
        with mr.StoreWriter(path, columns=columns, shard_bytes=1000) as writer:
            for k in range(count):
                writer.append({"tokens": rng.integers(1, 5000, rng.integers(1, 25)), "label": k % 4})
        found.append(mr.open_store(path))
    return found


def with_noise(batch, rng):
    """What it draws follows the position, whoever makes the batch."""
    return {**batch, "noise": rng.integers(0, 1 << 40)}


def packed(stores):
    packed = mr.Packed(stores[1], length=32)
    return [mr.Packed(stores[0], length=32), mr.Subset(packed, np.arange(len(packed)) % 3 > 0)]


def bounded(stores):
    records = mr.Records(stores[1])
    return [mr.Records(stores[0].where("label != 3")), mr.Subset(records, np.arange(len(records)) % 3 > 0)]


KINDS = {"packed": (packed, {}), "bounded": (bounded, {"max_rows": 64})}


@pytest.fixture(params=KINDS)
def kind(request, stores):
    sources, options = KINDS[request.param]
    return sources(stores), options


def mixture_of(sources):
    return mr.Mixture([(sources[0], 0.7), (sources[1], 0.3)], by="token", schedule=[(70, [1, 1])])


def feed_of(view, options, batch, **more):
    return mr.Feed(view, batch=batch, seed=9, device="numpy", transform=with_noise, **options, **more)


def rows_of(batch):
    """Each sample with its bytes."""
    if batch.valid is None or not len(batch.samples):
        return []
    found = []
    for k in np.flatnonzero(batch.valid).tolist():
        contents = tuple(np.asarray(column[k]).tobytes() for _, column in sorted(batch.items()))
        found.append((int(batch.samples[k]), contents))
    return found


def first_of(feed, count):
    found = []
    with feed:
        for batch in feed:
            found += rows_of(batch)
            if len(found) >= count:
                return found
    return found


@pytest.mark.own_process
def test_the_rest_has_the_same_samples_and_bytes_for_any_world_batch_and_workers(kind):
    sources, options = kind
    view = mixture_of(sources)
    whole = first_of(feed_of(view, options, 1), MANY)
    rng = np.random.default_rng(4)
    got, state = [], None
    histories = [(3, 5, False), (2, 4, PROCESSES), (1, 3, False), (2, 6, False)]  # world, batch, processes
    for world, batch, processes in histories:
        workers, steps, parts, states = int(rng.integers(1, 4)), int(rng.integers(2, 5)), [], []
        for rank in range(world):
            more = {"rank": rank, "world": world, "workers": workers, "processes": processes}
            with feed_of(mixture_of(sources), options, batch, **more) as feed:
                if state is not None:
                    feed.load_state_dict(state)
                parts.append([rows_of(own) for _, own in zip(range(steps), feed, strict=False)])
                states.append(json.loads(json.dumps(feed.state_dict())))
        assert all(own == states[0] for own in states)
        state = states[0]
        got += [row for step in zip(*parts, strict=True) for share in step for row in share]
    assert len(got) > 30
    assert got == whole[: len(got)]


def test_explain_and_steps_of_answer_through_all_of_it(kind, stores):
    sources, options = kind
    view = mixture_of(sources)
    feed = feed_of(view, options, 3)
    batches = [batch for _, batch in zip(range(12), feed, strict=False)]
    feed.close()
    again = feed_of(mixture_of(sources), options, 3)
    for step, batch in enumerate(batches):
        found = again.explain(step)
        assert found.samples.tolist() == batch.samples.tolist()
        parts, inside = view.parts(batch.samples)
        assert [row["part"] for row in found["rows"]] == parts.tolist()
        for sample, epoch in zip(batch.samples.tolist(), found.epochs.tolist(), strict=True):
            assert again.steps_of([sample], epoch=epoch).tolist() == [step]
        for row, part, number in zip(found["rows"], parts.tolist(), inside.tolist(), strict=True):
            item, tokens = sources[part][number], stores[part].columns["tokens"]
            held = item["tokens"] if "tokens" in item else item["x"][item["document"] >= 0]
            explained = np.concatenate([tokens[slice(*piece["rows"])] for piece in row["pieces"]])
            assert explained.tolist() == held.tolist()


@pytest.mark.parametrize("world", [1, 3])
def test_evaluation_has_every_sample_of_each_source_and_of_their_concat_once(kind, world):
    sources, options = kind
    for view in (*sources, mr.Concat(sources)):
        samples, lengths = [], set()
        for rank in range(world):
            more = {"rank": rank, "world": world, "epochs": 1, "order": mr.Sequential(len(view))}
            batches = [rows_of(batch) for batch in feed_of(view, options, 4, **more)]
            samples += [sample for batch in batches for sample, _ in batch]
            lengths.add(len(batches))
        assert sorted(samples) == list(range(len(view)))
        assert len(lengths) == 1
