"""The handler of a signal may raise between any two steps of ``next()``: still the state counts what the loop got."""

import dis
import sys
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.feed import iteration as iterate

VIEW = mr.Blocks(mr.from_arrays({"tokens": np.arange(21)}), length=1)  # 20 samples in 3 batches, the last one of 4
FEED_FILES = str(Path(iterate.__file__).parent)


class Own(mr.Blocks):
    """A view that only Python knows."""


class Interrupt(BaseException):
    pass


class RaiseAt:
    """Raises before step ``number``: any of the iterator's own code, and in the rest those at which Python handles signals.

    That is after a call or a jump back, never at a return, nor between a lock and the ``with`` that releases it.
    """

    def __init__(self, number):
        self.left, self.is_done, self.last = number, False, {}

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(FEED_FILES) or self.is_done:
            return None
        frame.f_trace_opcodes = True
        if event == "call":
            self.last[id(frame)] = "RESUME"
        if event != "opcode":
            return self
        step, before = dis.opname[frame.f_code.co_code[frame.f_lasti]], self.last[id(frame)]
        self.last[id(frame)] = step
        is_asked = (
            before.startswith(("RESUME", "CALL", "JUMP_BACKWARD")) or frame.f_code.co_filename == iterate.__file__
        )
        if is_asked and not step.startswith("RETURN"):
            self.left -= 1
            if self.left < 0:
                self.is_done = True
                raise Interrupt
        return self


def interrupted(function, number):
    """Whether the call was interrupted at this step, and what it returned."""
    before, tracer = sys.gettrace(), RaiseAt(number)
    sys.settrace(tracer)
    try:
        found = function()
    except Interrupt:
        return True, None
    finally:
        sys.settrace(before)
    return False, found


def same(batch, rng):
    return batch


FEEDS = {
    "core": {},
    "numpy": {"view": Own(VIEW.store, length=1)},
    "transform": {"transform": same, "workers": 1, "depth": 2},
    "renamed": {"rename": {"x": "input"}},
    "short": {"last": "short"},
    "tensors": {"device": "cpu"},
}


@pytest.mark.parametrize("batch", [1, 2], ids=["middle", "last"])
@pytest.mark.parametrize("how", FEEDS)
def test_a_batch_that_the_loop_did_not_get_does_not_count(how, batch):
    options = {"batch": 8, "epochs": 1, "order": mr.Sequential(20), "device": "numpy", "view": VIEW, **FEEDS[how]}
    number, was_interrupted = 0, True
    while was_interrupted:
        feed = mr.Feed(options["view"], **{key: value for key, value in options.items() if key != "view"})
        iterator = iter(feed)
        got = [next(iterator) for _ in range(batch)]
        was_interrupted, found = interrupted(iterator.__next__, number)
        got += [] if was_interrupted else [found]
        assert feed.state_dict()["position"] == min(8 * len(got), 20), number
        feed.close()
        got += [] if feed.position == 20 else list(feed)
        assert np.concatenate([part.samples[part.valid] for part in got]).tolist() == list(range(20)), number
        number += 1
    assert number > 50  # steps were seen


def test_an_iterator_that_was_interrupted_is_over_or_goes_on():
    """It goes on where ``next()`` had not begun; it never takes itself for another thread."""
    number, was_interrupted = 0, True
    while was_interrupted:
        feed = mr.Feed(VIEW, batch=8, epochs=1, device="numpy")
        iterator = iter(feed)
        was_interrupted, _ = interrupted(iterator.__next__, number)
        assert feed.position == 8 * (len(list(iterator)) + (not was_interrupted)) or feed.position == 20
        number += 1


@pytest.mark.parametrize("batch", [1, 2], ids=["middle", "last"])
def test_a_batch_of_a_pass_that_the_loop_did_not_get_does_not_count(batch):
    def loader_of():
        return mr.Feed(VIEW, batch=8, order=mr.Sequential(20), device="numpy").by_epoch()

    number, was_interrupted = 0, True
    while was_interrupted:
        loader, again = loader_of(), loader_of()
        iterator = iter(loader)
        got = [next(iterator) for _ in range(batch)]
        was_interrupted, found = interrupted(iterator.__next__, number)
        got += [] if was_interrupted else [found]
        state = loader.state_dict()
        assert state["position"] == min(8 * len(got), 20), number
        again.load_state_dict(state)
        got += [] if state["position"] == 20 else list(again)
        assert np.concatenate([part.samples[part.valid] for part in got]).tolist() == list(range(20)), number
        number += 1
    assert number > 50
