"""A run's feeds leave a line per start, so that step 81,204 still means the same after restarts with other batches."""

import errno
import json

import numpy as np
import pytest

import millrace as mr
from millrace.feed import journal
from millrace.order.orders import order_from_spec
from millrace.testing import count_steps, iofault, tiny_text

VIEW = mr.Blocks(mr.from_arrays({"tokens": np.arange(31)}), length=1)


class Trainer:
    """Counts steps from 1 over restarts, as metrics.jsonl does, and remembers where each began."""

    def __init__(self, run):
        self.run, self.step, self.first, self.saved = run, 0, {}, {0: None}

    def train(self, steps, *, batch, after=None, by_epoch=False, **options):
        """Goes on after a saved step (default: the last) with a batch of its own."""
        self.step = self.step if after is None else after
        self.first = {step: position for step, position in self.first.items() if step <= self.step}
        feed = mr.Feed(VIEW, batch=batch, seed=4, run=self.run, device="numpy", **options)
        if self.saved[self.step] is not None:
            feed.load_state_dict(self.saved[self.step])
        while steps:
            for got in feed.by_epoch() if by_epoch else feed:
                self.step += 1
                self.first[self.step] = int(got.positions[0])
                self.saved[self.step] = feed.state_dict()
                steps -= 1
                if not steps:
                    break
        return feed

    def check(self):
        for step, position in self.first.items():
            assert journal.start_of_step(self.run, step)[1] == position


def test_steps_are_found_in_a_run_without_restarts(tmp_path):
    trainer = Trainer(tmp_path / "run")
    trainer.train(12, batch=7)
    trainer.check()
    start, position = journal.start_of_step(tmp_path / "run", 5)
    assert (start["step"], start["position"], start["batch"], start["seed"]) == (1, 0, 7, 4)
    assert position == 28


def test_steps_keep_their_meaning_when_the_batch_changes(tmp_path):
    trainer = Trainer(tmp_path / "run")
    for steps, batch in ((5, 8), (3, 16), (1, 3), (7, 5), (4, 8)):
        trainer.train(steps, batch=batch)
        trainer.check()
    assert [start["step"] for start in journal.starts(tmp_path / "run")] == [1, 6, 9, 10, 17]
    assert journal.start_of_step(tmp_path / "run", 10)[0]["batch"] == 5


def test_after_a_crash_the_later_history_counts(tmp_path):
    """Steps after the checkpoint were lost; what was done in their place is what they mean now."""
    trainer = Trainer(tmp_path / "run")
    trainer.train(10, batch=8)
    trainer.train(6, batch=4, after=7)
    trainer.check()
    trainer.train(9, batch=16, after=3)
    trainer.check()
    trainer.train(5, batch=2)
    trainer.check()
    assert trainer.step == 17


@pytest.mark.parametrize("seed", range(8))
def test_random_histories(tmp_path, seed):
    rng = np.random.default_rng(seed)
    trainer = Trainer(tmp_path)
    for _ in range(12):
        after = int(rng.integers(0, trainer.step + 1)) if rng.random() < 0.3 else None
        trainer.train(int(rng.integers(1, 9)), batch=int(rng.integers(1, 20)), after=after, by_epoch=rng.random() < 0.5)
        trainer.check()


def test_passes_by_epoch_keep_their_short_last_steps(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.train(13, batch=8, by_epoch=True)  # 4 steps a pass: 8, 8, 8 and 6 of 30 samples
    trainer.check()
    assert [trainer.first[step] for step in (1, 4, 5, 8, 9)] == [0, 24, 30, 54, 60]


def test_only_rank_0_writes(tmp_path):
    for rank in (2, 1):
        next(iter(mr.Feed(VIEW, batch=6, rank=rank, world=3, run=tmp_path / "run", device="numpy")))
    assert not (tmp_path / "run").exists()
    next(iter(mr.Feed(VIEW, batch=6, rank=0, world=3, run=tmp_path / "run", device="numpy")))
    assert len(journal.starts(tmp_path / "run")) == 1


def test_a_line_torn_by_a_kill_is_left_out_and_does_not_swallow_the_next(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.train(4, batch=8)
    trainer.train(4, batch=4)
    path = tmp_path / journal.NAME
    whole = path.read_bytes()
    for cut in (1, 2, 40, len(whole) - whole.index(b"\n") - 2):
        path.write_bytes(whole[:-cut])
        assert [start["batch"] for start in journal.starts(tmp_path)] == [8]
        trainer.train(2, batch=5, after=4)
        assert [start["batch"] for start in journal.starts(tmp_path)] == [8, 5]
        trainer.check()


def test_a_start_says_how_to_make_view_and_order_again(tmp_path):
    store = tiny_text(tmp_path / "text")
    whole = mr.Blocks(store.split("train"), length=6)
    view = mr.Subset(whole, np.arange(0, len(whole), 2))
    feed = mr.Feed(
        view, batch=4, order=mr.BlockShuffled(len(view), block=3, window=2, seed=9), run=tmp_path, device="numpy"
    )
    got = [batch for batch, _ in zip(feed, range(5), strict=False)]
    start, position = journal.start_of_step(tmp_path, 3)
    assert start["stores"] == {store.fingerprint: store.path}
    json.dumps(start)
    again = mr.from_spec(start["view"], mr.open_store(store.path), arrays=journal.arrays(tmp_path))
    samples = order_from_spec(start["order"]).samples(np.arange(position, position + 4))
    assert samples.tolist() == got[2].samples.tolist()
    assert np.array_equal(again[samples]["x"], got[2].x)


def test_what_is_not_known_is_refused(tmp_path):
    with pytest.raises(mr.ConfigError, match="started without run="):
        journal.start_of_step(tmp_path, 1)
    Trainer(tmp_path).train(1, batch=2)
    with pytest.raises(mr.ConfigError, match="steps count from 1"):
        journal.start_of_step(tmp_path, 0)


def test_a_folder_that_takes_no_line_is_an_error_that_says_so(tmp_path):
    """A file where the folder should be, no right to write, a full disk: no bare OSError; then it goes on."""
    (tmp_path / "file").write_text("")
    feed = mr.Feed(VIEW, batch=6, run=tmp_path / "file" / "run", device="numpy")
    with pytest.raises(mr.StoreWriteFailed, match=r"writing .*file: File exists"):
        iter(feed)
    view = mr.Subset(VIEW, [5, 1, 3])  # its ids are written beside the line
    feed = mr.Feed(view, batch=2, run=tmp_path / "run", device="numpy")
    with count_steps() as steps:
        iter(feed).close()
    writes = [number for number, (operation, _) in enumerate(steps, 1) if operation in ("mkdir", "write", "rename")]
    assert len(writes) == 3
    for number in writes:
        feed = mr.Feed(view, batch=2, run=tmp_path / f"run-{number}", device="numpy")
        with iofault(number, errno.ENOSPC), pytest.raises(mr.StoreWriteFailed, match=r"No space left.*free space"):
            iter(feed)
        iter(feed).close()
        assert len(journal.starts(tmp_path / f"run-{number}")) == 1
