"""What differs between platforms: memory maps, descriptors, and every write to disk.

All writes go through the few functions here, so that a test can stop, kill or fail the process at each of them
(``millrace.testing.iofault``). Where a call or the C core is missing, its replacement is here too.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError, MillraceError, write_failed

try:
    from millrace import _core
except ImportError:  # no compiler at install time: the twins below serve
    _core = cast(Any, None)

O_BINARY = getattr(os, "O_BINARY", 0)
O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
O_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
REMOVERS = 4  # threads
HAS_DIR_FD = os.open in os.supports_dir_fd and os.stat in os.supports_dir_fd
HAS_CORE = hasattr(_core, "Map")  # a folder of C sources alone is not the core
# A map from mmap.mmap holds a descriptor before Python 3.13; ours and the newer ones hold none.
MAPS_HOLD_DESCRIPTORS = not HAS_CORE and sys.version_info < (3, 13)

_seek_lock = threading.Lock()
_attempts: ContextVar[str | None] = ContextVar("attempts", default=None)
before_write: Callable[[str, str], None] | None = None
"""Called as (operation, path) before each change of the disk; only ``millrace.testing`` sets it."""


def _step(operation: str, path: str | Path) -> None:
    if before_write is not None:
        before_write(operation, str(path))


@contextlib.contextmanager
def writing(path: str | Path, doing: str = "writing") -> Iterator[None]:
    """Turns an ``OSError`` of the body into a ``StoreWriteFailed`` that names the path and the remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, MillraceError):
            raise
        raise write_failed(error, str(error.filename or path), doing) from error


def make_dir(path: str | Path, mode: int = 0o777) -> None:
    """A folder, if it is not there; the names of parents that had to be made are durable, its own is not yet."""
    parent = os.path.dirname(path)
    if parent and not os.path.isdir(parent):
        make_dir(parent, mode)
        sync_dir(os.path.dirname(parent) or ".")
    _step("mkdir", path)
    while not os.path.isdir(path):
        try:
            os.mkdir(path, mode)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # another writer was done with it just then: once more
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    raise


def create(path: str | Path) -> int:
    """A descriptor of a new file; an existing one is an error, a link is never followed."""
    _step("open", path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | O_NOFOLLOW | O_BINARY, 0o644)


def write(fd: int, data: memoryview | bytes, path: str | Path) -> None:
    """Writes all of ``data`` with write(2): a full disk is then an error, where through a map it is a SIGBUS."""
    _step("write", path)
    view = memoryview(data).cast("B")
    while len(view):
        try:
            view = view[os.write(fd, view) :]
        except OSError as error:
            error.filename = str(path)  # the call knows only a descriptor
            error.offset = os.lseek(fd, 0, os.SEEK_CUR)  # type: ignore[attr-defined]
            raise


def sync(fd: int, path: str | Path) -> None:
    _step("fsync", path)
    try:
        os.fsync(fd)
    except OSError as error:
        error.filename = str(path)  # the call knows only a descriptor
        raise


def truncate(path: str | Path) -> None:
    _step("truncate", path)
    os.truncate(path, 0)


def sync_dir(path: str | Path) -> None:
    """Makes the names in a folder durable."""
    _step("fsync", path)
    if O_DIRECTORY:  # Windows has no such call
        fd = os.open(path, os.O_RDONLY | O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def rename(source: str | Path, target: str | Path) -> None:
    _step("rename", target)
    with contextlib.suppress(OSError):
        # As root, a file written to /dev/null would otherwise be /dev/null for the whole machine.
        if stat.S_IFMT(os.lstat(target).st_mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            raise ConfigError(f"{target} is a device or a pipe, and no file may take its place; give another name")
    os.replace(source, target)


def attempt_name(path: str | Path) -> Path:
    """Where one attempt at ``path`` is written: no other attempt has this name, in whichever process it runs."""
    name, folder = f"{path}.{os.urandom(6).hex()}.tmp", _attempts.get()
    return Path(name) if folder is None else Path(folder) / os.path.basename(name)


@contextlib.contextmanager
def attempts_in(folder: str | None) -> Iterator[None]:
    """Inside, attempts are written in this folder, not beside what they are to become; where it is gone, none can begin."""
    token = _attempts.set(folder)
    try:
        yield
    finally:
        _attempts.reset(token)


def make_attempt(path: str | Path) -> Path:
    """A new folder for one attempt at the folder ``path``."""
    aside = attempt_name(path)
    if _attempts.get() is None:
        make_dir(aside)
    else:
        _step("mkdir", aside)
        os.mkdir(aside)  # not its parent: that is gone when the run is over
    return aside


def place(attempt: str | Path, final: str | Path) -> bool:
    """Gives a whole folder its name. False where another attempt was first: then this one is removed."""
    try:
        rename(attempt, final)
    except OSError:
        if not os.path.isdir(final):
            raise
        remove(attempt)
        return False
    return True


def remove(path: str | Path) -> None:
    """Removes a file or a whole folder, if it is there; links are removed, never followed."""
    if os.path.isdir(path) and not os.path.islink(path):
        for entry in sorted(os.listdir(path)):
            remove(os.path.join(path, entry))
        remove_empty(path)
    elif os.path.lexists(path):
        _step("unlink", path)
        if os.name == "nt":
            os.chmod(path, stat.S_IWRITE)
        os.unlink(path)


def remove_empty(folder: str | Path) -> None:
    _step("rmdir", folder)
    os.rmdir(folder)


def empty(folder: str | Path) -> None:
    """Removes what is in a folder, if it is there, by several threads: the system needs a while to free large files."""
    if os.path.isdir(folder) and not os.path.islink(folder):
        with ThreadPoolExecutor(REMOVERS) as threads:
            list(threads.map(remove, [os.path.join(folder, entry) for entry in sorted(os.listdir(folder))]))


def boot_id() -> str | None:
    """Names this start of the machine: what was written since is there, synced or not; None where nobody knows."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return None


def write_file(path: str | Path, data: bytes | Iterable[bytes], *, mode: int = 0o444, durable: bool = True) -> None:
    """A file exists whole or not at all: written aside, synced, renamed; the caller syncs the folder.

    ``data`` may come block by block. One that is not ``durable`` survives the end of this process, not that of the machine.
    """
    aside = f"{path}.tmp"
    remove(aside)
    fd = create(aside)
    try:
        try:
            for block in (data,) if isinstance(data, bytes) else data:
                write(fd, block, path)
            with contextlib.suppress(AttributeError):
                os.fchmod(fd, mode)
            if durable:
                sync(fd, path)
        finally:
            os.close(fd)
        rename(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            remove(aside)
        raise


def map_file(fd: int, length: int, *, random: bool = False) -> npt.NDArray[np.uint8]:
    """The first ``length`` bytes of a file as a read-only array; the caller checked the size and closes ``fd``.

    ``random`` switches the kernel's read-ahead off for the map.
    """
    if length == 0:
        return np.frombuffer(b"", np.uint8)
    if HAS_CORE:
        return np.frombuffer(cast(bytes, _core.Map(fd, length, random)), np.uint8)
    area = mmap.mmap(fd, length, access=mmap.ACCESS_READ, **({"trackfd": False} if sys.version_info >= (3, 13) else {}))
    if random and hasattr(area, "madvise"):
        area.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(area, np.uint8)


def memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes of their own, in huge pages where the kernel has them: random reads then miss fewer translations."""
    if num_bytes == 0:
        return np.zeros(0, np.uint8)
    area = mmap.mmap(-1, num_bytes)
    if hasattr(area, "madvise") and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8)


def num_maps() -> int:
    return _core.num_maps() if HAS_CORE else 0  # those of this process


def random_twin(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same bytes through a map of its own without the kernel's read-ahead; an array that is no map as it is."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    owner = owner.obj if isinstance(owner, memoryview) else owner
    if not HAS_CORE or not isinstance(owner, _core.Map) or not array.flags.c_contiguous:
        return array
    whole, twin = np.frombuffer(cast(bytes, owner), np.uint8), owner.random()
    if twin is None:
        return array
    first = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    part = np.frombuffer(cast(bytes, twin), np.uint8)[first : first + array.nbytes]
    return part.view(array.dtype).reshape(array.shape)


def pread(fd: int, length: int, offset: int) -> bytes:
    """Exactly ``length`` bytes, or fewer at the end of the file."""
    parts: list[bytes] = []
    while length > 0 and (part := _pread(fd, min(length, 1 << 30), offset)):
        parts.append(part)
        length, offset = length - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def pread_now(fd: int, length: int, offset: int) -> bytes | None:
    """The same bytes if they lie in memory; else None, and the kernel begins to read them."""
    if not hasattr(os, "RWF_NOWAIT") or not hasattr(os, "posix_fadvise"):
        return None
    data = bytearray(length)
    with contextlib.suppress(OSError):  # not in memory, or a file system that does not know
        if os.preadv(fd, [data], offset, os.RWF_NOWAIT) == length:
            return bytes(data)
    os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
    return None


def pread_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fills ``buffer`` from ``offset``; returns how many bytes there were."""
    done = 0
    while done < len(buffer):
        if hasattr(os, "preadv"):
            got = os.preadv(fd, [buffer[done:]], offset + done)
        else:
            part = _pread(fd, len(buffer) - done, offset + done)
            got = len(part)
            buffer[done : done + got] = part
        if got == 0:
            break
        done += got
    return done


def _pread(fd: int, length: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, length, offset)
    with _seek_lock:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, length)


def read_past_cache(fd: int) -> bool:
    """Reads by this descriptor go past the page cache from here on, where the filesystem can."""
    try:
        import fcntl

        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except (ImportError, AttributeError, OSError):
        return False
    return True


def descriptor_limit() -> int:
    """How many descriptors this process may hold."""
    try:
        import resource
    except ImportError:
        return 512
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else int(soft)
