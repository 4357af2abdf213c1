"""The connection for payloads: whole values or an error, and never the answer to another request."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.queues.address import read_address
from millrace.queues.protocol import MAX_PAYLOAD, QueueFull
from millrace.queues.wire import PayloadConnection
from millrace.testing.servers import Proxy, RedisServer

SIZES = [0, 1, 4000, 4090, 4096, 5000, 1 << 16, (1 << 20) + 1, 3 << 20]


@pytest.fixture(scope="module")
def server():
    with RedisServer() as server:
        yield server


def connect(url):
    return PayloadConnection(read_address(url), None)


def value(size, seed=0):
    return bytes((k * 31 + seed) % 251 for k in range(4096)) * (size // 4096) + bytes(size % 4096)


@pytest.mark.parametrize("size", SIZES)
def test_values_come_back_and_a_second_set_changes_nothing(server, size):
    wire = connect(server.url)
    server.client().flushall()
    assert wire.get(b"b:1", bytearray) is None
    assert wire.set_new(b"b:1", value(size), 60_000)
    assert not wire.set_new(b"b:1", b"other", 60_000)
    assert wire.get(b"b:1", bytearray) == value(size)
    assert server.client().get("b:1") == value(size)
    assert 0 < server.client().pttl("b:1") <= 60_000
    wire.close()


@given(cut=st.integers(0, 9000), size=st.sampled_from([0, 10, 4090, 8000, 9000]))
@settings(max_examples=60)
def test_after_a_cut_anywhere_the_next_answer_is_its_own(server, cut, size):
    client = server.client()
    client.set("b:1", value(size, 1))
    client.set("b:2", value(size, 2))
    with Proxy(server.port) as proxy:
        wire = connect(f"{proxy.url}?timeout_s=20")
        assert wire.get(b"b:2", bytearray) == value(size, 2)
        proxy.cut_after = cut
        try:
            assert wire.get(b"b:1", bytearray) == value(size, 1)  # the answer was shorter
        except mr.QueueUnreachable:
            assert proxy.num_cuts > 0
        proxy.cut_after = -1
        assert wire.get(b"b:2", bytearray) == value(size, 2)
        wire.close()


def test_an_answer_that_comes_after_the_timeout_is_not_taken_for_the_next(server):
    client = server.client()
    client.set("b:1", value(100, 1))
    client.set("b:2", value(100, 2))
    with Proxy(server.port) as proxy:
        wire = connect(f"{proxy.url}?timeout_s=0.05")
        proxy.is_silent = True
        with pytest.raises(mr.QueueUnreachable):
            wire.get(b"b:1", bytearray)
        proxy.is_silent = False
        again = connect(f"{proxy.url}?timeout_s=20")
        wire._address = again._address
        assert wire.get(b"b:2", bytearray) == value(100, 2)
        wire.close()


@pytest.mark.parametrize(("kind", "becomes"), [(ValueError, mr.QueueUnreachable), (MemoryError, MemoryError)])
def test_who_refuses_the_size_gets_no_byte_and_the_next_answer_is_right(server, kind, becomes):
    server.client().set("b:1", value(1 << 16))
    wire = connect(server.url)

    def refuse(size):
        raise kind(f"{size} is too much")

    with pytest.raises(becomes, match="65536 is too much"):
        wire.get(b"b:1", refuse)
    assert wire.get(b"b:1", bytearray) == value(1 << 16)
    wire.close()


def test_a_value_of_another_kind_is_an_error_and_no_value(server):
    client = server.client()
    client.delete("b:list")
    client.rpush("b:list", 1)
    client.set("b:1", b"x")
    wire = connect(server.url)
    with pytest.raises(mr.QueueError, match="WRONGTYPE"):
        wire.get(b"b:list", bytearray)
    assert wire.get(b"b:1", bytearray) == b"x"
    wire.close()


@pytest.mark.parametrize(
    "line", [b"$%d\r\n" % (MAX_PAYLOAD + 1), b"$-7\r\n", b"$x\r\n", b":5\r\n", b"*1\r\n", b"x" * 9000]
)
def test_answers_that_no_server_gives_are_refused_before_anything_is_allocated(line):
    import socket

    ours, theirs = socket.socketpair()
    wire = connect("redis://127.0.0.1:1/0")
    wire._socket = ours
    theirs.sendall(line)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(mr.QueueUnreachable):
        wire.get(b"b:1", lambda size: pytest.fail("it was allocated"))
    assert ours.fileno() == -1
    theirs.close()


def test_a_full_server_says_so():
    with RedisServer("--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        wire = connect(server.url)

        def fill():
            for k in range(10):
                wire.set_new(b"b:%d" % k, value(1 << 20), 60_000)

        with pytest.raises(QueueFull, match="raise maxmemory"):
            fill()
        assert wire.get(b"b:none", bytearray) is None
        wire.close()
