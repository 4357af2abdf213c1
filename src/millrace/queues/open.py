"""``open_queue``: a queue by its URL."""

from __future__ import annotations

from millrace.distribution import install_command
from millrace.errors import ConfigError
from millrace.queues.address import read_address
from millrace.queues.memory import MemoryQueue, server
from millrace.queues.protocol import Queue


def open_queue(url: str) -> Queue:
    """The queue at a URL; connects when it is first used. ``memory://NAME`` is for threads of this process."""
    address = read_address(url)
    if address.scheme == "memory":
        return MemoryQueue(server(address.host), address)
    try:
        from millrace.queues.redis import RedisQueue
    except ModuleNotFoundError as error:
        raise ConfigError(f"a queue on Redis needs {error.name}; {install_command('redis')}") from error
    return RedisQueue(address)
