"""A connection for payloads alone: GET into memory that the caller chose, SET from memory as it is.

redis-py with hiredis takes 1.4 ms for a value of 0.5 MiB, since it builds the reply from many pieces; a plain socket that
receives into a reused buffer takes 0.16 ms. After any failure the connection is closed: no answer can be taken for that
of another request.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any

from millrace.errors import ConfigError, QueueError
from millrace.queues.address import Address
from millrace.queues.answers import answer_error, unreachable
from millrace.queues.protocol import MAX_PAYLOAD

PIECE = 1 << 20  # sent at once: the timeout is for a piece, however slow the link
MAX_LINE = 4096


class PayloadConnection:
    """One connection, for one thread."""

    def __init__(self, address: Address, password: str | None) -> None:
        self._address, self._password = address, password
        self._socket: Any = None

    def get(self, key: bytes, memory: Callable[[int], Any]) -> Any:
        """The value, received into ``memory(num_bytes)``; None without one. If ``memory`` raises, nothing is received."""
        line, rest = self._ask(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
        try:
            size = int(line[1:]) if line[:1] == b"$" else -2
            if size == -1 and not rest:
                return None
            if not 0 <= size <= MAX_PAYLOAD:
                raise ValueError
            target = memory(size)
            self._fill(memoryview(target), rest)
            return target
        except (OSError, ValueError) as error:
            raise self._broken(error) from error
        except BaseException:
            self.close()  # the value is still on its way
            raise

    def set_new(self, key: bytes, value: Any, ttl_ms: int) -> bool:
        """Sets a value unless there is one; whether it did."""
        data, ttl = memoryview(value).cast("B"), b"%d" % ttl_ms
        head = b"*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(data))
        tail = b"\r\n$2\r\nNX\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
        return self._ask(head, data, tail)[0] == b"+OK"

    def _ask(self, *request: Any) -> tuple[bytes, bytes]:
        """Sends a request; returns the first line of the answer, and what came after it."""
        try:
            if self._socket is None:
                self._connect()
            for part in request:
                for begin in range(0, len(part), PIECE):
                    self._socket.sendall(part[begin : begin + PIECE])
            line, rest = self._line()
        except (OSError, ValueError) as error:
            raise self._broken(error) from error
        except BaseException:
            self.close()
            raise
        if line[:1] == b"-":
            raise answer_error(self._address, line[1:].decode(errors="replace"))
        return line, rest

    def _line(self) -> tuple[bytes, bytes]:
        data = b""
        while b"\r\n" not in data:
            if len(data) > MAX_LINE or not (more := self._socket.recv(MAX_LINE)):
                raise ConnectionError("the answer ended early")
            data += more
        line, _, rest = data.partition(b"\r\n")
        return line, rest

    def _fill(self, target: memoryview, rest: bytes) -> None:
        size, have = len(target), min(len(rest), len(target))
        target[:have] = rest[:have]
        while have < size:
            count = self._socket.recv_into(target[have:])
            if not count:
                raise ConnectionError(f"the value ended after {have:,} of {size:,} bytes")
            have += count
        end = rest[size:]
        while len(end) < 2:
            if not (more := self._socket.recv(2 - len(end))):
                raise ConnectionError("the value ended early")
            end += more
        if end != b"\r\n":
            raise ValueError("what follows the value is no end of it")

    def _connect(self) -> None:
        address, timeout = self._address, self._address.seconds["timeout_s"]
        plain = socket.create_connection((address.host, address.port), timeout)
        self._socket = plain
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.is_tls:
            context = ssl.create_default_context(cafile=address.files.get("ca"))
            if "cert" in address.files:
                context.load_cert_chain(address.files["cert"], address.files.get("key"))
            self._socket = context.wrap_socket(plain, server_hostname=address.host)
        words = [b"AUTH", *filter(None, [(address.username or "").encode(), (self._password or "").encode()])]
        if self._password:
            self._tell(*words)
        self._tell(b"SELECT", b"%d" % address.db)

    def _tell(self, *words: bytes) -> None:
        self._socket.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
        line, _ = self._line()
        if line != b"+OK":
            raise answer_error(self._address, line[1:].decode(errors="replace"))

    def _broken(self, error: Exception) -> QueueError | ConfigError:
        self.close()
        return unreachable(self._address, error)

    def close(self) -> None:
        broken, self._socket = self._socket, None
        if broken is not None:
            with contextlib.suppress(OSError):
                broken.close()
