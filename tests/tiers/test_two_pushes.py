"""Two pushes to one URL, in every order of their requests: readers see one whole store, and nothing is left of the other."""

import shutil
import threading
import weakref

import numpy as np
import pytest

import millrace as mr
from millrace.store.remote.contents import MANIFEST, Contents
from millrace.store.remote.download import is_whole
from millrace.store.remote.objects import Objects
from millrace.store.remote.transfer import Transfer
from millrace.store.verify import verify_store


class Turns:
    """Lets the requests of several programs pass one at a time, in a given order."""

    def __init__(self, monkeypatch):
        self._changed, self._local = threading.Condition(), threading.local()
        self._order, self._ended, self._is_busy = [], set(), False
        self._name_of, self.counts = weakref.WeakKeyDictionary(), {}
        turns, init, tried = self, Objects.__init__, Objects.tried

        def named_init(objects, *arguments, **options):
            turns._name_of[objects] = getattr(turns._local, "name", None)
            init(objects, *arguments, **options)

        def tried_in_turn(objects, *arguments, **options):
            name = turns._name_of.get(objects)
            if name is None:
                return tried(objects, *arguments, **options)
            turns._begin(name)
            try:
                return tried(objects, *arguments, **options)
            finally:
                turns._end()

        monkeypatch.setattr(Objects, "__init__", named_init)
        monkeypatch.setattr(Objects, "tried", tried_in_turn)

    def _begin(self, name):
        with self._changed:
            self.counts[name] = self.counts.get(name, 0) + 1
            if self.counts[name] > self._last.get(name, 10**9):
                raise Killed
            while self._is_busy or self._next() not in (name, None):
                assert self._changed.wait(60)
            self._is_busy = True
            self._order = self._order[1:]

    def _end(self):
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()

    def _next(self):
        while self._order and self._order[0] in self._ended:
            self._order = self._order[1:]
        return self._order[0] if self._order else None

    def run(self, order, programs, last=None):
        """What each program returns or raises. ``order`` names whose request is next; after its end anybody's is.

        ``last`` is the request after which a program is killed.
        """
        self._order, self._last, self._ended, self.counts, outcomes = list(order), last or {}, set(), {}, {}

        def work(name, program):
            self._local.name = name
            try:
                outcomes[name] = program()
            except BaseException as error:  # noqa: BLE001 - it is the outcome
                outcomes[name] = error
            with self._changed:
                self._ended.add(name)
                self._changed.notify_all()

        threads = [threading.Thread(target=work, args=item) for item in programs.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        return outcomes


class Killed(BaseException):
    """As kill -9 ends a push: nothing is tidied up."""


@pytest.fixture
def turns(monkeypatch):
    return Turns(monkeypatch)


@pytest.fixture
def direct(s3, s3_port, monkeypatch):
    """The same server without the proxy before it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")
    return s3


def write(path, numbers, **options):
    with mr.StoreWriter(path, columns={"x": mr.Column("int64")}, shard_bytes=80, **options) as writer:
        for value in numbers:
            writer.append({"x": np.full(10, value)})
    return path


@pytest.fixture
def stores(tmp_path):
    """Two stores with the same names and sizes, and one that the first has grown to."""
    grown = write(tmp_path / "grown", [1])
    shutil.copytree(grown, tmp_path / "a")
    with mr.StoreWriter(grown, append=True) as writer:
        writer.append({"x": np.full(10, 3)})
    return {"a": tmp_path / "a", "b": write(tmp_path / "b", [2]), "grown": grown}


def whole_store(url):
    """The fingerprint of the store at the URL; every byte of it is right."""
    there = Objects(url)
    contents = Contents.read(there)
    assert all(is_whole(there, file) for file in contents.files())
    assert mr.open_store(url, snapshot=contents.fingerprint).fingerprint == contents.fingerprint
    return contents.fingerprint


def objects_of(url):
    return {name for name in Objects(url).listed("") if not name.endswith("provenance.json")}


def needed_objects(url):
    """The objects that the newest snapshot and those before it need."""
    there, names = Objects(url), {MANIFEST}
    for name in there.listed("snapshots"):
        contents = Contents.read(there, there.read(name, 1 << 20))
        names |= {name, contents.manifest.shards.name, contents.manifest.hashes.name}
        names |= {file.stored_name for file in contents.files()}
    return names


def pushing(path, url):
    return lambda: mr.push(path, url, workers=1)


def num_requests(turns, path, url):
    turns.run([], {"alone": pushing(path, url)})
    return turns.counts["alone"]


def is_refused(outcome):
    return isinstance(outcome, (mr.ConfigError, mr.StoreLocked))


def check_one_won(stores, url, outcomes):
    """Of different stores exactly one was acknowledged; a store and what it has grown to are both, or the larger one."""
    assert not any(thread.name == "push" for thread in threading.enumerate())
    won = {name for name, outcome in outcomes.items() if not is_refused(outcome)}
    assert won, outcomes
    reports = [outcome for name, outcome in outcomes.items() if name in won]
    assert all(isinstance(report, Transfer) for report in reports), reports
    assert won in ({"a"}, {"b"}) if "b" in outcomes else won in ({"grown"}, {"a", "grown"})
    assert whole_store(url) == mr.open_store(stores["grown" if "grown" in won else won.pop()]).fingerprint


ORDERS = [("a", "b"), ("a", "grown"), ("grown", "a")]


@pytest.mark.parametrize(
    ("one", "other"), [ORDERS[0], *(pytest.param(*order, marks=pytest.mark.soak) for order in ORDERS[1:])]
)
def test_a_whole_push_at_every_request_of_another(direct, turns, stores, one, other):
    for number in range(1 + num_requests(turns, stores[one], f"{direct}-alone")):
        url = f"{direct}-{number}"
        outcomes = turns.run([one] * number + [other] * 99, {name: pushing(stores[name], url) for name in (one, other)})
        check_one_won(stores, url, outcomes)
        assert objects_of(url) == needed_objects(url)  # nothing is left of the one that was refused


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.soak), 8])
@pytest.mark.parametrize(("one", "other"), ORDERS)
def test_two_pushes_that_stop_for_each_other(direct, turns, stores, one, other, step):
    """So many requests of one, so many of the other, then the rest of each."""
    counts = [num_requests(turns, stores[name], f"{direct}-alone-{name}") for name in (one, other)]
    for first in range(1, counts[0], step):
        for second in range(1, counts[1], step):
            url = f"{direct}-{first}-{second}"
            order = [one] * first + [other] * second + [one] * 99
            check_one_won(stores, url, turns.run(order, {name: pushing(stores[name], url) for name in (one, other)}))
            assert objects_of(url) == needed_objects(url)


def test_readers_see_the_old_store_or_the_new_one_at_every_request_of_a_push(direct, turns, stores):
    mr.push(stores["a"], f"{direct}-alone")
    count = num_requests(turns, stores["grown"], f"{direct}-alone")
    old, new = (mr.open_store(stores[name]).fingerprint for name in ("a", "grown"))
    seen = []
    for number in range(0, count + 1, 2):
        url = f"{direct}-{number}"
        mr.push(stores["a"], url)
        order = ["push"] * number + ["reader"] * 99
        seen.append(
            turns.run(order, {"push": pushing(stores["grown"], url), "reader": lambda url=url: whole_store(url)})[
                "reader"
            ]
        )
        assert mr.open_store(url, snapshot=old).fingerprint == old
    assert seen == [old] * seen.count(old) + [new] * seen.count(new)
    assert {old, new} == set(seen)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.soak), 7])
def test_what_a_killed_push_leaves_is_used_or_removed(direct, turns, stores, step):
    count = num_requests(turns, stores["a"], f"{direct}-alone")
    for number in range(1, count, step):
        for name in ("a", "b", "grown"):
            url = f"{direct}-{number}-{name}"
            killed = turns.run([], {"killed": pushing(stores["a"], url)}, {"killed": number})["killed"]
            assert isinstance(killed, Killed)
            is_there = MANIFEST in Objects(url).listed("")
            try:
                mr.push(stores[name], url, workers=1)
            except mr.ConfigError:
                assert is_there
                assert name == "b"
                mr.push(stores["a"], url)
                name = "a"
            assert whole_store(url) == mr.open_store(stores[name]).fingerprint
            assert objects_of(url) == needed_objects(url)


def test_a_killed_push_goes_on_where_it_was(direct, turns, stores):
    first = num_requests(turns, stores["grown"], f"{direct}-alone")
    turns.run([], {"killed": pushing(stores["grown"], direct)}, {"killed": first - 9})
    assert 0 < mr.push(stores["grown"], direct).sent_files < 4


@pytest.mark.parametrize("compress", [None, "lz4"])
def test_two_pushes_to_one_folder(tmp_path, turns, stores, compress):
    """One has it; the other is refused whenever it comes."""

    def push(name, out):
        return lambda: mr.push(stores[name], out, compress=compress, workers=1)

    turns.run([], {"alone": push("a", tmp_path / "alone")})
    count = turns.counts["alone"]
    assert count > 1
    for number in range(1, count + 1):
        out = tmp_path / f"out-{number}"
        outcomes = turns.run(["a"] * number + ["b"] * 99, {name: push(name, out) for name in "ab"})
        assert len([outcome for outcome in outcomes.values() if is_refused(outcome)]) == 1, outcomes
        won = next(name for name, outcome in outcomes.items() if not is_refused(outcome))
        assert mr.open_store(out).fingerprint == mr.open_store(stores[won]).fingerprint
        assert verify_store(out).damage == []
        assert not list(tmp_path.glob("*.partial"))


def test_a_server_that_decides_nothing_shows_one_whole_store(rclone, turns, stores):
    """It writes whatever the condition is. Of two pushes under way at once none goes on; the other acknowledges nothing."""
    count = num_requests(turns, stores["a"], f"{rclone}-alone")
    acknowledged = []
    for number in range(count + 1):
        url = f"{rclone}-{number}"
        outcomes = turns.run(["a"] * number + ["b"] * 99, {name: pushing(stores[name], url) for name in "ab"})
        acknowledged.append(sorted(name for name, outcome in outcomes.items() if not is_refused(outcome)))
        if acknowledged[-1]:
            check_one_won(stores, url, outcomes)
        else:
            assert MANIFEST not in Objects(url).listed("")
            mr.push(stores["a"], url)  # they left nothing in the way
    assert ["a"] in acknowledged
    assert ["b"] in acknowledged
