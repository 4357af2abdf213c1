"""Where a queue is, from its URL, and the password, which never is in the URL.

``redis://user@host:6379/0?deadline_s=2&lease_s=10``; ``rediss://`` is TLS, with ``ca=``, ``cert=`` and ``key=`` files.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from millrace.errors import ConfigError, did_you_mean

EXAMPLE = "redis://host:6379/0"
PASSWORD_FILE, PASSWORDS = "MILLRACE_REDIS_PASSWORD_FILE", ("MILLRACE_REDIS_PASSWORD", "REDIS_PASSWORD")
SECONDS = {"deadline_s": 2.0, "lease_s": 10.0, "alive_s": 10.0, "ttl_s": 300.0, "timeout_s": 5.0}
FILES = ("ca", "cert", "key")
SWITCHES = ("insecure", "compress")


@dataclass(frozen=True)
class Address:
    """A server and how to speak to it. It holds no secret."""

    scheme: str
    host: str
    port: int
    db: int
    username: str | None
    files: dict[str, str]
    seconds: dict[str, float]
    insecure: bool
    compress: bool

    @property
    def is_tls(self) -> bool:
        return self.scheme == "rediss"

    @property
    def is_local(self) -> bool:
        """Whether what is sent stays on this machine."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        user = f"{self.username}@" if self.username else ""
        return (
            f"{self.scheme}://{host}"
            if self.scheme == "memory"
            else f"{self.scheme}://{user}{host}:{self.port}/{self.db}"
        )


def read_address(url: str) -> Address:
    """The address that a URL names. Messages never repeat a password."""
    try:
        parts = urlsplit(url)
        host, port, has_password = parts.hostname, parts.port, parts.password is not None
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(f"this is no URL of a queue; expected one such as {EXAMPLE}") from None
    if has_password:
        raise ConfigError(
            f"the URL of the queue on {host} holds a password, which process lists and run folders would show; leave it out and "
            f"set {PASSWORDS[0]}, or {PASSWORD_FILE} to a file that holds it"
        )
    if parts.scheme not in ("redis", "rediss", "memory") or not host:
        raise ConfigError(f"queue={url!r}; expected a URL such as {EXAMPLE}, or rediss://... for TLS")
    db = parts.path.strip("/") or "0"
    if not db.isdigit():
        raise ConfigError(f"queue={url!r} names database {db!r}; expected a number, as in {EXAMPLE}")
    options = _options(url, parts.query)
    return Address(
        parts.scheme, host, port or 6379, int(db), unquote(parts.username) if parts.username else None,
        {name: options[name] for name in FILES if name in options},
        {name: options.get(name, default) for name, default in SECONDS.items()},
        *(bool(options.get(name)) for name in SWITCHES),
    )  # fmt: skip


def _options(url: str, query: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name in SECONDS:
            try:
                options[name] = float(text)
            except ValueError:
                options[name] = 0.0
            if not 0 < options[name] < 1e6:
                raise ConfigError(f"queue={url!r}: {name}={text}; expected seconds above 0")
        elif name in SWITCHES:
            if text not in ("0", "1"):
                raise ConfigError(f"queue={url!r}: {name}={text}; expected 0 or 1")
            options[name] = text == "1"
        elif name in FILES:
            if not os.path.isfile(text):
                raise ConfigError(f"queue={url!r}: there is no file {text} for {name}=; give the path of a PEM file")
            options[name] = text
        else:
            known = (*SECONDS, *SWITCHES, *FILES)
            raise ConfigError(
                f"queue={url!r}: option {name!r} is unknown{did_you_mean(name, known)}; expected {', '.join(known)}"
            )
    return options


def read_password() -> str | None:
    """From the file or the variable that the environment names."""
    if path := os.environ.get(PASSWORD_FILE):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().strip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{PASSWORD_FILE} names {path}, which cannot be read ({type(error).__name__})") from error
    return next((os.environ[name] for name in PASSWORDS if os.environ.get(name)), None)


def check_exposure(address: Address, password: str | None) -> None:
    """Refuses to send data or a password over a network in the clear, unless that is allowed."""
    if address.insecure or address.is_local or address.scheme == "memory":
        return
    if not address.is_tls:
        raise ConfigError(
            f"{address} is another machine, and redis:// sends batches in the clear; use rediss:// (TLS), or allow it in a "
            "network that you trust with ?insecure=1"
        )
    if not password:
        raise ConfigError(
            f"{address} is another machine, and there is no password; set {PASSWORDS[0]} or {PASSWORD_FILE}, or allow it in a "
            "network that you trust with ?insecure=1"
        )
