"""Mixtures as views of a feed: shares, resume, other weights, ranks, processes, skips, explanations."""

import json
import os

import numpy as np
import pytest

import millrace as mr
from millrace.feed.journal import start_of_step

WORKERS = {"processes": hasattr(os, "memfd_create"), "workers": 2}  # threads on other platforms


def blocks(n, first=0, length=2):
    return mr.Blocks(
        mr.from_arrays({"tokens": np.arange(first, first + n + length, dtype=np.uint32)}), length=length, stride=1
    )


A, B, C = blocks(100), blocks(31, 1000), blocks(7, 5000)


def mixture(*weights, **options):
    return mr.Mixture(list(zip((A, B, C), weights, strict=True)), **options)


def feed_of(view, batch=12, **options):
    return mr.Feed(view, batch=batch, seed=5, device="numpy", **options)


def taken(feed, count):
    with feed:
        iterator = iter(feed)
        return [next(iterator) for _ in range(count)]


def add_noise(batch, rng):
    return {"x": batch.x, "drawn": rng.integers(0, 1 << 40)}


def test_batches_hold_the_shares_and_the_rows_of_their_samples():
    view = mixture(6, 3, 3)
    for batch in taken(feed_of(view), 20):
        assert np.bincount(view.parts(batch.samples)[0]).tolist() == [6, 3, 3]
        assert np.array_equal(batch.x, view[batch.samples]["x"])


@pytest.mark.parametrize("options", [{}, {"transform": add_noise}, {"transform": add_noise, **WORKERS}])
def test_resume_with_other_ranks_and_batch_goes_on_exactly(options):
    whole = np.concatenate([batch.samples for batch in taken(feed_of(mixture(5, 2, 1)), 30)])
    first = feed_of(mixture(5, 2, 1), **options)
    assert np.array_equal(np.concatenate([batch.samples for batch in taken(first, 4)]), whole[:48])
    state = json.loads(json.dumps(first.state_dict()))
    found = []
    for rank in range(2):
        feed = feed_of(mixture(5, 2, 1), batch=20, rank=rank, world=2, **options)
        feed.load_state_dict(state)
        found.append([batch.samples for batch in taken(feed, 5)])
    assert np.array_equal(np.concatenate([part for step in zip(*found, strict=True) for part in step]), whole[48:148])


def test_a_run_goes_on_with_other_weights_and_back():
    feed = feed_of(mixture(1, 1, 0))
    seen = [batch.samples for batch in taken(feed, 2)]
    other = feed_of(mixture(1, 0, 3))
    other.load_state_dict(feed.state_dict())
    seen += [batch.samples for batch in taken(other, 2)]
    again = feed_of(mixture(1, 0, 3))
    again.load_state_dict(other.state_dict())
    assert len(again.order.segments) == 2
    assert np.bincount(mixture(1, 1, 1).parts(np.concatenate(seen))[0]).tolist() == [18, 12, 18]
    in_a = np.concatenate(seen)[np.concatenate(seen) < len(A)]
    assert len(set(in_a.tolist())) == 18
    with pytest.raises(mr.ResumeMismatch, match="another view"):
        feed_of(mr.Mixture([(A, 1), (B, 1)])).load_state_dict(
            {**feed.state_dict(), "store": feed_of(mr.Mixture([(A, 1), (B, 1)])).state_dict()["store"]}
        )


def test_weights_by_token_count_rows():
    ragged = mr.Records(mr.from_arrays({"hits": np.arange(90.0)}, offsets=[0, 10, 40, 90]))
    short = mr.Records(mr.from_arrays({"hits": np.arange(30.0)}, offsets=[0, 10, 20, 30]))
    order = mr.Mixture([(ragged, 1), (short, 1)], by="token").default_order(0)
    assert order.segments[0].parts == (16384, 49152)
    one, two = (
        mr.Packed(mr.from_arrays({"tokens": np.arange(ends[-1], dtype=np.uint16)}, offsets=ends), length=6)
        for ends in ([0, 6, 8], [0, 2, 4])  # blocks of 6 and 2 tokens, and one of 4
    )
    assert mr.Mixture([(one, 1), (two, 1)], by="token").default_order(0).segments[0].parts == (32768, 32768)


def test_classes_come_equally_often():
    labels = np.repeat([3, 1, 8], [50, 5, 20])
    view = mr.Records(
        mr.from_arrays({"hits": np.arange(75.0), "label": labels}, offsets=np.arange(76), per={"label": "record"})
    )
    even = mr.balanced(view, "label")
    drawn = np.concatenate([batch["label"] for batch in taken(feed_of(even, batch=30), 10)])
    assert np.unique(drawn, return_counts=True)[1].tolist() == [100, 100, 100]
    with pytest.raises(mr.ConfigError, match="2 weights for the 3 classes"):
        mr.balanced(view, "label", [1, 2])
    with pytest.raises(mr.ConfigError, match="'labels' is unknown"):
        mr.balanced(view, "labels")


def test_explain_and_steps_of_answer_through_a_mixture():
    feed = feed_of(mixture(5, 2, 1))
    batches = taken(feed, 25)
    for step in (0, 7, 24):
        found = feed_of(mixture(5, 2, 1)).explain(step)
        assert found.samples.tolist() == batches[step].samples.tolist()
        assert [row["part"] for row in found.rows] == mixture(1, 1, 1).parts(found.samples)[0].tolist()
    fresh = feed_of(mixture(5, 2, 1))
    first = {int(sample): step for step, batch in reversed(list(enumerate(batches))) for sample in batch.samples}
    assert fresh.steps_of(list(first)).tolist() == list(first.values())
    assert feed.steps_of(batches[-1].samples[-1:]).tolist() == [24]


def test_a_mixture_has_no_epochs():
    with pytest.raises(mr.ConfigError, match="epochs=2 of a mixture"):
        feed_of(mixture(1, 1, 1), epochs=2)
    for repeat in (False, True):
        with pytest.raises(mr.ConfigError, match="has no epochs"):
            feed_of(mixture(1, 1, 1)).by_epoch(repeat=repeat)
    with pytest.raises(mr.ConfigError, match="has no samples"):
        mr.Mixture([(A, 1), (mr.Subset(A, []), 1)])
    with pytest.raises(mr.ConfigError, match="at least one view"):
        mr.Mixture([A, B])
    with pytest.raises(mr.ConfigError, match="by='byte'"):
        mixture(1, 1, 1, by="byte")


def test_skipped_positions_are_left_out_also_after_a_resume(tmp_path):
    whole = np.concatenate([batch.samples for batch in taken(feed_of(A), 12)])
    feed = feed_of(A, run=tmp_path)
    taken(feed, 3)
    feed.skip(20)
    state = feed.state_dict()
    assert feed.state_dict()["position"] == 56
    rest = [batch.samples for batch in taken(feed, 2)]
    resumed = feed_of(A)
    resumed.load_state_dict(state)
    assert np.array_equal(np.concatenate(rest), whole[56:80])
    assert np.array_equal(np.concatenate([batch.samples for batch in taken(resumed, 2)]), np.concatenate(rest))
    assert [start_of_step(tmp_path, step)[1] for step in (3, 4, 5)] == [24, 56, 68]  # three steps came before
    with pytest.raises(mr.ConfigError, match="expected 0 or more"):
        feed.skip(-1)
    with pytest.raises(mr.ConfigError, match="passes the end"):
        feed_of(A, epochs=1).skip(101)


def test_balanced_reads_each_part_of_a_concat_and_refuses_what_is_no_class():
    one, two = (
        mr.Records(mr.from_arrays({"hits": np.arange(6.0), "label": np.array(labels)}, np.arange(0, 7, 2)))
        for labels in ([0, 0, 1], [1, 1, 0])
    )
    for view in (mr.Concat([one, two]), mr.Subset(mr.Concat([one, two]), [5, 0, 2])):
        for label, part in enumerate(mr.balanced(view, "label", weights=np.array([0.5, 0.5])).views):
            assert {int(part[k]["label"]) for k in range(len(part))} == {label}
    with pytest.raises(mr.ConfigError, match="'hits' has no single value per record"):
        mr.balanced(one, "hits")


def test_what_is_no_source_and_no_schedule_is_refused():
    with pytest.raises(mr.ConfigError, match="source 1 of the mixture is a Mixture"):
        mr.Mixture([(A, 1), (mixture(1, 1, 1), 1)])
    with pytest.raises(mr.ConfigError, match="source 0 is Store, not a view"):
        mr.Mixture([(A.store, 1)])
    for schedule in ([10, [1, 1, 1]], {10: [1, 1, 1]}, 5):
        with pytest.raises(mr.ConfigError, match=r"expected \[\(position, weights\), ...\]"):
            mixture(1, 1, 1, schedule=schedule)
    parts = mixture(1e308, 5e307, 5e307).default_order(0).segments[0].parts
    assert parts == (32768, 16384, 16384)


@pytest.mark.parametrize("later", [[1], [1, 1, 1, 1], 1, "x", ["a", "b", "c"]])
def test_weights_that_are_no_number_for_each_source_are_refused(later):
    with pytest.raises(mr.ConfigError, match="weights"):
        mixture(1, 1, 1, schedule=[(10, later)])


def test_a_curriculum_is_a_schedule_over_slices_of_a_sorted_view():
    scores = np.random.default_rng(0).permutation(90)
    view = mr.Records(mr.from_arrays({"hits": np.arange(180.0), "score": scores}, np.arange(0, 181, 2)))
    easy, middle, hard = np.split(np.arange(90), 3)
    ordered = mr.sorted_by(view, "score")
    sources = [(mr.Subset(ordered, ids), weight) for ids, weight in ((easy, 1), (middle, 0), (hard, 0))]
    growing = mr.Mixture(sources, schedule=[(24, [1, 1, 0]), (48, [1, 1, 1])])
    largest = [int(batch["score"].max()) // 30 for batch in taken(feed_of(growing), 8)]
    assert largest == [0, 0, 1, 1, 2, 2, 2, 2]
