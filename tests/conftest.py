"""What every test shares: the seed, the hypothesis profile, and the platform without its best parts.

All that is random comes from one seed. It is 0 in ``make test``, so that it is the same everywhere, and another one each
time in ``make soak``; MILLRACE_SEED or --hypothesis-seed give it, and the last lines of a run tell it where it matters.

With ``MILLRACE_TEST_HIDE=1`` (``make hidden``) the C core, fcntl, memfd_create and madvise are not there, as on a
platform that has none of them; this must happen before millrace is imported, so it happens here.
"""

from __future__ import annotations

import mmap
import multiprocessing.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

# Where tests are started in the background Ctrl-C is ignored, and would be in every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

HIDDEN = os.environ.get("MILLRACE_TEST_HIDE") == "1"
IS_SOAK = bool(os.environ.get("MILLRACE_SOAK"))
SEED = "MILLRACE_SEED"


def _hide() -> None:
    assert not any(name.split(".")[0] == "millrace" for name in sys.modules), "too late to hide anything"
    sys.modules["millrace._core"] = None  # type: ignore[assignment]
    sys.modules["fcntl"] = None  # type: ignore[assignment]
    if hasattr(os, "memfd_create"):
        del os.memfd_create
    for name in [name for name in dir(mmap) if name.startswith("MADV_")]:
        delattr(mmap, name)
    mmap.mmap = _PlainMap  # type: ignore[misc]


class _PlainMap(mmap.mmap):
    @property
    def madvise(self) -> None:  # type: ignore[override]
        raise AttributeError("madvise is hidden")


if HIDDEN:
    _hide()

# A health check that measures time fails on a machine that others use.
hypothesis.settings.register_profile(
    "millrace", deadline=None, database=None, print_blob=True, derandomize=False,
    max_examples=300 if IS_SOAK else 60, suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
# One seed draws the same examples every time: half of them will do, and all are for soaks. Fewer still where things are
# hidden: what random examples find is found with the core too.
EXAMPLES = 1.0 if IS_SOAK else 0.15 if HIDDEN else 0.5
hypothesis.settings.load_profile("millrace")
# Else it also draws constants of whatever modules are loaded: a test alone would have other examples than among others.
providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Settles the seed, for hypothesis too; processes that run tests inherit it."""
    chosen = config.getoption("--hypothesis-seed")
    if chosen is None:
        chosen = os.environ.get(SEED) or (random.SystemRandom().randrange(1 << 32) if IS_SOAK else 0)
    os.environ[SEED] = config.option.hypothesis_seed = str(int(chosen))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    if reports or IS_SOAK:
        terminalreporter.write_line(f"{SEED}={os.environ[SEED]} is the seed of all that is random here")
    for report in reports:
        hidden, soak = "MILLRACE_TEST_HIDE=1 " * HIDDEN, "MILLRACE_SOAK=1 " * IS_SOAK
        terminalreporter.write_line(
            f"again: {SEED}={os.environ[SEED]} {hidden}{soak}{sys.executable} -m pytest '{report.nodeid}'"
        )


@pytest.fixture(scope="session")
def seed() -> int:
    return int(os.environ[SEED])


@pytest.fixture(autouse=True)
def seeded_generators() -> None:
    """What is drawn from generators that all share does not depend on the tests before."""
    random.seed(0)
    for name, draw in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if name in sys.modules:
            attrgetter(draw)(sys.modules[name])(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where things are hidden, tests of those and in processes that see them are left out; long ones are for ``make soak``.

    Tests that take the seed are marked: others with other seeds are for ``make soak``.
    """
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "seed" in getattr(item, "fixturenames", ()) and "seed" not in params:
            item.add_marker("seeded")
    functions = [item for item in items if isinstance(item, pytest.Function)]
    for test in {item.obj for item in functions}:
        _draw_fewer(test, "_hypothesis_internal_use_settings")
    for machine in {item.cls for item in functions}:
        _draw_fewer(machine, "settings")
    left_out = [item for item in items if _is_left_out(item)]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def _draw_fewer(test: object, name: str) -> None:
    settings = getattr(test, name, None)
    if isinstance(settings, hypothesis.settings):
        setattr(test, name, hypothesis.settings(settings, max_examples=max(3, round(EXAMPLES * settings.max_examples))))


def _is_left_out(item: pytest.Item) -> bool:
    is_hidden = HIDDEN or os.environ.get("MILLRACE_NATIVE") == "0"
    if is_hidden and (item.get_closest_marker("needs_core") or item.get_closest_marker("own_process")):
        return True
    if IS_SOAK:
        return False
    params = getattr(getattr(item, "callspec", None), "params", {})
    is_second = item.get_closest_marker("one_way") is not None and params.get("way") == "in line" and not HIDDEN
    return is_second or item.get_closest_marker("soak") is not None


IN_LINE_BYTES = "MILLRACE_TEST_IN_LINE_BYTES"


@pytest.fixture(scope="module", params=["in line"] if HIDDEN else ["in line", "ring"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How a feed makes its batches: in line as tiny ones are, or ahead by threads; also in scripts that tests start."""
    from millrace.feed import compose as native

    before = native.IN_LINE_BYTES
    native.IN_LINE_BYTES = 0 if request.param == "ring" else before
    os.environ[IN_LINE_BYTES] = str(native.IN_LINE_BYTES)
    yield request.param
    native.IN_LINE_BYTES = before
    del os.environ[IN_LINE_BYTES]


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of this process alone: those of tests that run beside it would count among its leaks."""
    tmp_path_factory.getbasetemp()  # stays where it is
    multiprocessing.util.get_temp_dir()  # which Python removes at the very end
    with tempfile.TemporaryDirectory(prefix="pytest-own-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session")
def undisturbed_s() -> Callable[..., float]:
    """How long a command that makes ``out`` takes here and now: machines differ, and a kill must come before its end."""

    def measure(command: Sequence[str], out: Path, env: Mapping[str, str] | None = None) -> float:
        took = []
        for _ in range(2):
            began = time.monotonic()
            subprocess.run(command, check=True, env=env, stdin=subprocess.DEVNULL)
            took.append(time.monotonic() - began)
            shutil.rmtree(out)
        return min(took)

    return measure


@pytest.fixture(scope="session")
def kill_midway(undisturbed_s: Callable[..., float], seed: int) -> Callable[..., None]:
    """Kills a command that makes ``out`` up to ``rounds`` times while it works, then lets it finish.

    Where no kill came in time, others that kept this machine busy while it was measured have ended since, and it is measured
    again.
    """

    def run(command: Sequence[str], out: Path, rounds: int, env: Mapping[str, str] | None = None) -> None:
        from millrace.store.open import open_store
        from millrace.testing import kill_loop

        def look() -> None:
            if out.exists():
                open_store(out, check=True)

        kills = 0
        while not kills:
            shutil.rmtree(out, ignore_errors=True)
            whole_s = undisturbed_s(command, out, env)
            kills = kill_loop(
                list(command), rounds, seed, within_s=(0.2 * whole_s, 0.7 * whole_s),
                done=out.exists, between=look, env=env,
            )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def at_once() -> Callable[..., None]:
    """Runs functions in threads that take turns as often as they may, until all are done."""

    def run(*functions: Callable[[], None]) -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=function) for function in functions]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)

    return run


@pytest.fixture(scope="session")
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is one: for tests that sync ten thousand times on a disk that others use."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pytest-memory-", dir=base) as folder:
        yield Path(folder)
