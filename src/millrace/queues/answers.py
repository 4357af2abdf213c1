"""What a server that fails or refuses means to the user. Nothing here repeats a password."""

from __future__ import annotations

from millrace.errors import ConfigError, QueueError, QueueUnreachable
from millrace.queues.address import PASSWORD_FILE, PASSWORDS, Address
from millrace.queues.protocol import QueueFull


def unreachable(address: Address, error: BaseException) -> QueueError | ConfigError:
    """The error for a server that does not answer, or that cannot be trusted."""
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
        return ConfigError(
            f"the certificate of {address} is not trusted; give ?ca=FILE of the authority that signed it ({text})"
        )
    is_cut = "closed" in text.lower() or "reset" in text.lower()
    hint = "; is its port for TLS? then use rediss://" if is_cut and not address.is_tls else ""
    hint = "; does it speak TLS? else use redis://" if "WRONG_VERSION" in text or "record layer" in text else hint
    return QueueUnreachable(f"the queue {address} does not answer: {type(error).__name__}: {text}{hint}")


def answer_error(address: Address, text: str) -> QueueError | ConfigError:
    """The error that a server answered."""
    if "OOM" in text:
        return QueueFull(f"{address} has reached its maxmemory; raise maxmemory, or lower depth= or the batch")
    if "WRONGPASS" in text or "invalid username-password" in text or "invalid password" in text:
        return ConfigError(
            f"{address} refuses the user name or password; check {' or '.join((PASSWORD_FILE, *PASSWORDS))}"
        )
    if "NOAUTH" in text or "Authentication required" in text:
        return ConfigError(
            f"{address} wants a password; set {PASSWORDS[0]}, or {PASSWORD_FILE} to a file that holds it"
        )
    if "NOPERM" in text or "no permissions" in text.lower():
        return ConfigError(f"the user of {address} lacks a permission ({text}); see the ACL in docs/guide/queue.md")
    if any(word in text for word in ("LOADING", "BUSY", "READONLY", "MASTERDOWN")):
        return QueueUnreachable(f"the queue {address} cannot answer now: {text}")
    return QueueError(f"{address} answered {text!r}; see its log")
