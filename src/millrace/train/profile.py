"""``millrace train --profile N``: a trace of N steps, and a page that shows where each of them spent its time.

RUN/profile/steps-4-23.json   a Chrome trace of torch's profiler, with our stages as ranges named ``millrace: ...``
RUN/profile/steps-4-23.html   the stages of every step, drawn

On a GPU each stage is waited for while steps are recorded. So its time is its own, and nothing overlaps but the feed's copies.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from millrace.report.html import page
from millrace.report.timeline import Step, timeline_report
from millrace.store import platform
from millrace.train.dist import World

WARM = 3  # steps that are left out: the first ones allocate and compile
NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
Stage = Callable[[str], AbstractContextManager[None]]


def no_stage(name: str) -> AbstractContextManager[None]:
    return NOTHING


class Profile:
    """Records some steps of one start on the first rank. With ``steps`` 0 it does nothing."""

    def __init__(self, run: Path, steps: int, world: World, say: Callable[[str], None]) -> None:
        self._folder, self._world, self._say = run / "profile", world, say
        self._wanted = steps if world.is_first else 0
        self._left, self._warm = self._wanted, WARM
        self._profiler: Any = None
        self._steps: list[Step] = []
        self._spans: list[tuple[str, float, float]] = []
        self._range: Any = None

    def begin_step(self, step: int) -> None:
        """A step begins: its wait for data comes next."""
        if not self._left:
            return
        if self._warm:
            self._warm -= 1
            return
        if self._profiler is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._world.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
            self._profiler.start()
        self._spans, self._start = [], self._now()
        self._range = torch.profiler.record_function(f"millrace: step {step}")
        self._range.__enter__()

    def stage(self, name: str) -> AbstractContextManager[None]:
        """A context around a part of a step."""
        return NOTHING if self._range is None else self._stage(name)

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start = self._now()
        with torch.profiler.record_function(f"millrace: {name}"):
            yield
            stop = self._now()
        self._spans.append((name, start - self._start, stop - self._start))

    def end_step(self, step: int) -> None:
        """The weights are changed; writes the files after the last step that was asked for."""
        if self._range is None:
            return
        self._end_range()
        self._steps.append(Step(step, self._now() - self._start, self._spans))
        self._left -= 1
        if not self._left:
            self.finish()

    def finish(self) -> None:
        """Writes what was recorded, if that was not done yet."""
        if self._wanted and self._profiler is None and not self._steps:
            self._say(f"note: nothing was profiled: the run ended within the first {WARM} steps of this start")
        self._wanted = self._left = 0
        if self._profiler is None:
            return
        profiler = self._stop()
        if not self._steps:
            return
        name = f"steps-{self._steps[0].number}-{self._steps[-1].number}"
        trace, html = self._folder / f"{name}.json", self._folder / f"{name}.html"
        with platform.writing(trace):
            platform.make_dir(self._folder)
            aside = self._folder / f".{name}.json"
            profiler.export_chrome_trace(str(aside))
            platform.rename(aside, trace)
        report = timeline_report(str(self._folder.parent), self._steps, waits=self._world.device.type == "cuda")
        with platform.writing(html):
            platform.write_file(html, page(report).encode(), mode=0o644)
        self._say(f"profile: wrote {html}, and {trace} for chrome://tracing or ui.perfetto.dev")

    def close(self) -> None:
        """Stops recording, also after an error; writes nothing."""
        self._left = self._wanted = 0
        if self._profiler is not None:
            self._stop()

    def _stop(self) -> Any:
        self._end_range()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        return profiler

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _now(self) -> float:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return time.perf_counter()
