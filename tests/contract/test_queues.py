"""What every queue promises to trainers and workers. A new one is a line in ``QUEUES``, and passes the same tests."""

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import millrace as mr
from millrace.queues import memory
from millrace.queues.address import read_address
from millrace.queues.memory import MemoryQueue, Server
from millrace.queues.open import open_queue
from millrace.queues.protocol import Offer, Status
from millrace.testing.servers import RedisServer

RUN, LINK, FOLDER = "exp1", "a0", "/runs/exp1"
LINE = f"{LINK}-1"
WORKER = {"threads": 2}
QUEUES = ["memory", "redis"]
SHORT_S = 0.01  # how long a queue waits for something to do


class Place:
    """A server of either kind: ``queue()`` opens it once more, ``flush()`` empties it."""

    def __init__(self, kind, server):
        self._kind, self._redis, self._memory, self._opened = kind, server, Server(), []
        self.flush()

    def queue(self, options="timeout_s=5"):
        if self._kind == "memory":
            return MemoryQueue(self._memory, read_address(f"memory://here?{options}"))
        self._opened.append(open_queue(f"{self._redis.url}?{options}"))
        self._opened[-1]._wait_s = SHORT_S
        return self._opened[-1]

    def flush(self):
        self._memory.flush()
        if self._kind == "redis":
            self._redis.client().flushall()

    def close(self):
        for queue in self._opened:
            queue.close()


@pytest.fixture(scope="module")
def redis_server():
    with RedisServer("--hz", "500") as server:  # it looks for timeouts so often
        yield server


@pytest.fixture(params=QUEUES)
def place(request, redis_server, monkeypatch):
    monkeypatch.setattr(memory, "WAIT_S", SHORT_S)
    place = Place(request.param, redis_server)
    yield place
    place.close()


@pytest.fixture
def queue(place):
    return place.queue()


def tickets(count, line=LINE):
    return [f"{line}:{8 * k}:8" for k in range(count)]


def offer(queue, wanted, unwanted=(), run=RUN, folder=FOLDER, line=LINE):
    return queue.offer(run, line.split("-")[0], folder, [Offer(line, b"record", wanted, unwanted)])


def lease(queue, worker="w1", run=RUN):
    return queue.lease(run, worker, WORKER)


def get(queue, ticket, run=RUN):
    found = queue.get(run, ticket, bytearray)
    return None if found is None else bytes(found)


def lease_in_time(queue, worker):
    """The next lease that comes within a minute."""
    deadline = time.monotonic() + 60
    while (found := lease(queue, worker)).state != "ticket" and time.monotonic() < deadline:
        pass
    return found.ticket


def test_tickets_are_leased_in_order_each_once_and_become_payloads(queue):
    wanted = tickets(12)
    offer(queue, wanted)
    assert [lease(queue).ticket for _ in wanted] == wanted
    assert lease(queue).state == "idle"
    for k, ticket in enumerate(wanted):
        assert queue.put(RUN, "w1", ticket, bytes([k]) * 1000)
    assert offer(queue, wanted) == (2, wanted)  # the threads of a worker that is alive, and what is ready
    assert [get(queue, ticket) for ticket in wanted] == [bytes([k]) * 1000 for k in range(12)]
    assert sorted(queue.await_ready(RUN, LINE)) == sorted(wanted)


def test_a_second_payload_changes_nothing(queue):
    offer(queue, tickets(1))
    assert queue.put(RUN, "w1", tickets(1)[0], b"first")
    assert not queue.put(RUN, "w2", tickets(1)[0], b"second")
    assert get(queue, tickets(1)[0]) == b"first"


def test_the_lease_of_a_dead_worker_goes_to_another_and_a_zombie_does_no_harm(place):
    queue = place.queue("lease_s=0.05")
    (ticket,) = tickets(1)
    offer(queue, [ticket])
    assert lease(queue, "dead").ticket == ticket
    assert lease_in_time(queue, "w2") == ticket
    assert queue.renew(RUN, "dead", WORKER, [ticket]) == [ticket]  # lost
    assert queue.put(RUN, "w2", ticket, b"batch")
    assert not queue.put(RUN, "dead", ticket, b"batch")
    assert lease(queue).state == "idle"


def test_a_lease_that_is_renewed_lasts_longer(queue):
    """However slow this machine is: left alone, the time left only falls."""
    offer(queue, tickets(1))
    lease(queue, "w1")
    (held,) = queue.status(RUN).leases
    deadline = time.monotonic() + 60
    while queue.status(RUN).leases[0].left_s <= held.left_s and time.monotonic() < deadline:
        assert queue.renew(RUN, "w1", WORKER, tickets(1)) == []
    assert queue.status(RUN).leases[0].worker == "w1"
    assert time.monotonic() < deadline
    assert lease(queue, "w2").state == "idle"
    assert queue.renew(RUN, "w2", WORKER, tickets(1)) == tickets(1)  # only its holder can


def test_an_expired_ticket_is_the_next(place):
    queue = place.queue("lease_s=0.05")
    first, *_ = offered = tickets(3)
    offer(queue, offered)
    assert lease(queue, "dead").ticket == first
    time.sleep(0.1)  # until the lease has ended
    assert lease(queue, "w2").ticket == first


def test_a_worker_that_leaves_gives_back_what_it_held(queue):
    offer(queue, tickets(2))
    assert [lease(queue).ticket for _ in range(2)] == tickets(2)
    queue.leave(RUN, "w1")
    assert offer(queue, []).threads == 0
    assert sorted(lease(queue, "w2").ticket for _ in range(2)) == tickets(2)


def test_a_run_is_absent_then_there_then_ended_then_there_again(queue):
    assert lease(queue).state == "absent"
    offer(queue, [])
    assert lease(queue).state == "idle"
    queue.offer(RUN, "b0", FOLDER, [])  # another rank
    queue.end(RUN, LINK)
    assert lease(queue).state == "idle"
    queue.end(RUN, "b0")
    assert lease(queue).state == "ended"
    offer(queue, tickets(1))
    assert lease(queue).ticket == tickets(1)[0]


def test_a_trainer_that_is_gone_leaves_no_work(place):
    queue = place.queue("alive_s=0.05")
    offer(queue, tickets(2))
    time.sleep(0.1)  # until it counts as gone
    assert lease(queue).state == "absent"
    queue.offer(RUN, "b0", FOLDER, [])  # one that is alive
    assert lease(queue).state in ("idle", "absent")  # not the ticket of the other


def test_a_run_that_was_continued_after_a_kill_ends_too(place):
    queue = place.queue("alive_s=0.5")
    offer(queue, [])  # of a trainer that is killed now
    queue.offer(RUN, "b0", FOLDER, [])  # and of the one that continues
    queue.end(RUN, "b0")
    states = set()
    while not states & {"absent", "ended"}:  # until the first counts as gone
        states.add(lease(queue).state)
    assert states - {"idle"} == {"ended"}


def test_what_is_offered_again_is_not_added_again_and_after_a_flush_all_is(place, queue):
    wanted = tickets(3)
    offer(queue, wanted)
    offer(queue, wanted)
    leased = lease(queue).ticket
    offer(queue, wanted)
    assert [lease(queue).ticket for _ in range(2)] == wanted[1:]
    assert lease(queue).state == "idle"
    place.flush()
    assert lease(queue).state == "absent"
    assert get(queue, leased) is None
    offer(queue, wanted)
    assert [lease(queue).ticket for _ in range(3)] == wanted


def test_unwanted_tickets_are_gone_with_their_payloads(queue):
    waiting, leased, ready = wanted = tickets(3)
    offer(queue, [leased, ready, waiting])
    for ticket in (leased, ready):
        assert lease(queue).ticket == ticket
    queue.put(RUN, "w1", ready, b"batch")
    assert offer(queue, [], unwanted=wanted).ready == []
    assert lease(queue).state == "idle"
    assert get(queue, ready) is None
    assert queue.renew(RUN, "w1", WORKER, [leased]) == [leased]


def test_a_line_that_is_closed_is_forgotten_and_wakes_who_waits(queue):
    offer(queue, tickets(2))
    queue.put(RUN, "w1", tickets(2)[0], b"batch")
    queue.await_ready(RUN, LINE)
    queue.close_lines(RUN, [LINE], tickets(2))
    assert queue.record(RUN, LINE) is None
    assert get(queue, tickets(2)[0]) is None
    assert queue.await_ready(RUN, LINE) == []
    assert lease(queue).state == "idle"
    queue.put(RUN, "late", tickets(2)[1], b"batch")
    assert get(queue, tickets(2)[1]) is None


def test_a_failed_ticket_is_announced_without_a_payload(queue):
    offer(queue, tickets(1))
    queue.put(RUN, "w1", lease(queue).ticket, None)
    assert queue.await_ready(RUN, LINE) == tickets(1)
    assert get(queue, tickets(1)[0]) is None


def test_another_folder_with_the_name_of_a_live_run_is_refused(queue):
    offer(queue, [], folder="/mine/exp1")
    with pytest.raises(mr.ConfigError, match="/mine/exp1"):
        offer(queue, [], folder="/yours/exp1", line="b0-1")
    queue.end(RUN, LINK)
    offer(queue, [], folder="/yours/exp1", line="b0-1")


def test_the_name_of_a_run_that_died_is_free_again(place):
    queue = place.queue("alive_s=0.05")
    offer(queue, [], folder="/mine/exp1")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            offer(queue, [], folder="/yours/exp1", line="b0-1")
            break
        except mr.ConfigError:
            continue
    else:
        pytest.fail("it stays taken")


def test_runs_do_not_meet(queue):
    offer(queue, tickets(1))
    offer(queue, tickets(1), run="exp2", folder="/runs/exp2")
    lease(queue)
    queue.put(RUN, "w1", tickets(1)[0], b"of exp1")
    assert get(queue, tickets(1)[0], "exp2") is None
    assert lease(queue, run="exp2").ticket == tickets(1)[0]
    assert queue.runs() == ["exp1", "exp2"]
    queue.drain(RUN)
    assert queue.runs() == ["exp2"]
    assert queue.status("exp2").is_live


def test_records_and_arrays_come_back(queue):
    offer(queue, [])
    assert queue.record(RUN, LINE) == b"record"
    assert queue.record(RUN, "a0-9") is None
    assert not queue.has_arrays(RUN, ["ids"])
    queue.put_array(RUN, "ids", memoryview(b"12345678"))
    assert queue.has_arrays(RUN, ["ids"])
    assert queue.array(RUN, "ids") == b"12345678"
    assert queue.array(RUN, "other") is None


def test_the_status_counts_tickets_leases_payloads_and_workers(queue):
    offer(queue, tickets(5))
    held = [lease(queue, "w1").ticket, lease(queue, "w1").ticket]
    queue.put(RUN, "w1", held[0], b"batch")
    status = queue.status(RUN)
    assert (status.run, status.is_live, status.depth, status.ready) == (RUN, True, 3, 1)
    assert status.oldest_s >= 0
    assert [(lease.ticket, lease.worker, lease.left_s > 0) for lease in status.leases] == [(held[1], "w1", True)]
    assert status.workers["w1"]["threads"] == 2
    assert status.workers["w1"]["seen_s"] >= 0
    assert queue.drain(RUN) > 0
    assert queue.status(RUN) == Status(RUN, False, 0, None, [], 0, {})


def facts(status):
    return status.is_live, status.depth, {held.ticket: held.worker for held in status.leases}, status.ready


class Twins(RuleBasedStateMachine):
    """Whatever is asked, Redis answers as the queue in memory does."""

    server: RedisServer

    def __init__(self):
        super().__init__()
        self.memory = Server()
        self.server.client().flushall()
        self.queues = [
            MemoryQueue(self.memory, read_address("memory://twin")),
            open_queue(f"{self.server.url}?timeout_s=5"),
        ]
        self.queues[1]._wait_s = 0.001  # most have nothing to wait for

    def both(self, ask):
        ours, theirs = (ask(queue) for queue in self.queues)
        assert ours == theirs
        return ours

    numbers = st.lists(st.integers(0, 5), max_size=4, unique=True)
    workers = st.sampled_from(["w1", "w2"])
    lines = st.sampled_from([LINE, f"{LINK}-2", "b0-1"])

    @rule(wanted=numbers, unwanted=numbers, line=lines)
    def offer(self, wanted, unwanted, line):
        wanted = [k for k in wanted if k not in unwanted]
        names = tickets(6, line)
        self.both(lambda queue: offer(queue, [names[k] for k in wanted], [names[k] for k in unwanted], line=line))

    @rule(worker=workers)
    def lease(self, worker):
        self.both(lambda queue: lease(queue, worker))

    @rule(worker=workers, number=st.integers(0, 5), line=lines, data=st.none() | st.binary(max_size=3))
    def put(self, worker, number, line, data):
        self.both(lambda queue: queue.put(RUN, worker, tickets(6, line)[number], data))

    @rule(worker=workers, numbers=numbers, line=lines)
    def renew(self, worker, numbers, line):
        names = tickets(6, line)
        self.both(lambda queue: queue.renew(RUN, worker, WORKER, [names[k] for k in numbers]))

    @rule(worker=workers)
    def leave(self, worker):
        self.both(lambda queue: queue.leave(RUN, worker))

    @rule(line=lines)
    def await_ready(self, line):
        self.both(lambda queue: queue.await_ready(RUN, line))

    @rule(line=lines, numbers=numbers)
    def close_line(self, line, numbers):
        self.both(lambda queue: queue.close_lines(RUN, [line], [tickets(6, line)[k] for k in numbers]))

    @rule(link=st.sampled_from([LINK, "b0"]))
    def end(self, link):
        self.both(lambda queue: queue.end(RUN, link))

    @precondition(lambda self: self.memory.runs)
    @rule()
    def flush(self):
        self.memory.flush()
        self.server.client().flushall()

    @invariant()
    def they_hold_the_same(self):
        names = [ticket for line in (LINE, f"{LINK}-2", "b0-1") for ticket in tickets(6, line)]
        self.both(lambda queue: [get(queue, name) for name in names])
        self.both(
            lambda queue: (lambda s: (s.is_live, s.depth, {h.ticket: h.worker for h in s.leases}, s.ready))(
                queue.status(RUN)
            )
        )

    def teardown(self):
        self.queues[1].close()


def test_redis_and_memory_are_twins(redis_server, monkeypatch):
    monkeypatch.setattr(memory, "WAIT_S", 0.001)
    Twins.server = redis_server
    machine = Twins.TestCase()
    machine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
    machine.runTest()
