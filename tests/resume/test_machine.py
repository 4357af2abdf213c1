"""Any sequence of steps, saves, restores, breaks and passes by epoch, against a model that is one integer."""

import json

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import millrace as mr


def same(batch, rng):
    return {"x": batch.x, "drawn": rng.integers(0, 1 << 40)}


class Training(RuleBasedStateMachine):
    """One rank of one is enough here: shares are tried elsewhere."""

    @initialize(n=st.integers(1, 30), seed=st.integers(0, 3), epochs=st.sampled_from([None, 1, 3]))
    def start(self, n, seed, epochs):
        self.view = mr.Blocks(mr.from_arrays({"tokens": np.arange(n + 1)}), length=1)
        self.n, self.seed, self.epochs = n, seed, epochs
        self.order = mr.Shuffled(n, seed)
        self.position, self.saved, self.drawn = 0, [], {}
        self.make(4, None)

    def make(self, batch, workers):
        threads = {} if workers is None else {"transform": same, "workers": workers, "depth": workers}
        self.batch, self.iterator, self.stop = batch, None, None
        self.begun = None  # where the pass ends that the last iterator was of, once it has delivered something
        self.has_delivered = False  # since it was made or restored
        self.feed = mr.Feed(self.view, batch=batch, seed=self.seed, epochs=self.epochs, device="numpy", **threads)

    @property
    def end(self):
        return float("inf") if self.epochs is None else self.epochs * self.n

    @rule()
    def step(self):
        if self.iterator is None:
            if self.has_delivered and self.position >= self.end:
                with pytest.raises(mr.ConfigError, match="delivered all"):
                    iter(self.feed)
                return
            self.iterator, self.stop, self.is_pass, self.begun = iter(self.feed), self.end, False, None
        self.take()

    @rule(again=st.booleans())
    def step_of_a_pass(self, again):
        if self.iterator is None or (again and self.is_pass):
            loader = self.feed.by_epoch()
            assert len(loader) == -(-self.n // self.batch)
            start = self.position if self.begun is None else self.begun
            if self.has_delivered and start >= self.end:
                with pytest.raises(mr.ConfigError, match="delivered all"):
                    iter(loader)
                self.iterator = None
                return
            self.iterator, self.is_pass = iter(loader), True
            self.position = start
            self.stop = min(self.end, (start // self.n + 1) * self.n)
        self.take()

    def take(self):
        last = min(self.position + self.batch, self.stop)
        try:
            batch = next(self.iterator)
        except StopIteration:
            assert self.position >= self.stop
            self.iterator = None
            return
        expected = np.arange(self.position, last)
        assert np.array_equal(batch.positions[batch.valid], expected)
        assert np.array_equal(batch.samples[batch.valid], self.order.samples(expected))
        assert np.array_equal(batch.x[batch.valid, 0], batch.samples[batch.valid])
        if "drawn" in batch:
            for position, number in zip(expected.tolist(), batch.drawn[batch.valid].tolist(), strict=True):
                assert self.drawn.setdefault(position, number) == number
        self.position, self.has_delivered = int(last), True
        self.begun = self.stop if self.is_pass else None
        assert self.feed.state_dict()["position"] == self.position

    @rule()
    def drop_the_iterator(self):
        self.iterator = None

    @rule()
    def close(self):
        self.feed.close()
        self.iterator = None

    @rule()
    def save(self):
        self.saved.append(json.dumps(self.feed.state_dict()))

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), batch=st.integers(1, 40), workers=st.sampled_from([None, 1, 3]))
    def restore_as_another_job(self, data, batch, workers):
        state = json.loads(data.draw(st.sampled_from(self.saved)))
        self.make(batch, workers)
        self.feed.load_state_dict(state)
        self.position = state["position"]

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def go_back_in_the_same_feed(self, data):
        self.feed.close()
        self.iterator = None
        self.feed.load_state_dict(json.loads(data.draw(st.sampled_from(self.saved))))
        self.begun, self.has_delivered = None, False
        self.position = self.feed.state_dict()["position"]

    def teardown(self):
        if hasattr(self, "feed"):
            self.feed.close()


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
