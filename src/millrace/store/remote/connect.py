"""Connections: the library's access to a URL. obstore knows object storage, HTTP and folders; fsspec knows many others."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeVar

from millrace.distribution import install_command
from millrace.errors import ConfigError
from millrace.store import platform
from millrace.store.folder import no_store

SCHEMES = ("s3", "gs", "az", "http", "https", "file")  # of obstore
READS = {"read_timeout": "20s", "timeout": "24h"}  # a server that is silent for so long
# Of a request, since a server is silent until it has all bytes: 64 parts of 8 MiB side by side need 7 Mbit/s.
UPLOADS = {"timeout": "600s"}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
Result = TypeVar("Result")


def connect(url: str, create: bool, first_wait_s: float, retries: int = 0) -> tuple[Any, Any]:
    """The functions that make requests, and what they take first.

    The library tries nothing again by itself: errors in the middle of a body are seen above.
    """
    try:
        import obstore
        from obstore import store as stores
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise ConfigError(f"remote stores need obstore; {install_command('s3')}") from error
    if "://" not in url:
        if not create and not os.path.isdir(url):
            raise no_store(url)
        with platform.writing(url, "creating"):
            return obstore, stores.LocalStore(url, mkdir=create)
    if url.split("://")[0] not in SCHEMES:
        return ByFsspec(url), None
    may_http = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes") or url.startswith("http:")
    plain = [name for name in _ENDPOINTS if os.environ.get(name, "").startswith("http://")]
    if plain and not may_http and url.startswith("s3:"):
        raise ConfigError(f"{plain[0]} is an http:// address, without TLS; set AWS_ALLOW_HTTP=true to allow that")
    options: Any = {"connect_timeout": "10s", "user_agent": "millrace", **(UPLOADS if retries else READS)}
    if may_http:
        options["allow_http"] = True
    again: Any = {"max_retries": retries, "backoff": {"init_backoff": timedelta(seconds=first_wait_s)}}
    try:
        return obstore, stores.from_url(url, client_options=options, retry_config=again)
    except Exception as error:  # noqa: BLE001 - whatever the library does not like about the URL or the environment
        raise ConfigError(
            f"{url} cannot be opened ({type(error).__name__}); check the URL and the variables of its storage"
        ) from None


class _Found(NamedTuple):
    """An object, as obstore gives one."""

    meta: dict[str, Any]
    open: Callable[[], Any]
    start: int = 0
    stop: int | None = None

    def stream(self, chunk_bytes: int) -> Iterator[bytes]:
        stop = self.meta["size"] if self.stop is None else self.stop
        with _translated(), self.open() as file:
            file.seek(self.start)
            left = stop - self.start
            while left and (chunk := file.read(min(chunk_bytes, left))):
                yield chunk
                left -= len(chunk)

    def bytes(self) -> bytes:
        return b"".join(self.stream(4 << 20))


class ByFsspec:
    """What Objects asks of obstore, for a storage that only fsspec knows."""

    def __init__(self, url: str) -> None:
        scheme = url.split("://")[0]
        try:
            import fsspec
        except ModuleNotFoundError as error:
            raise ConfigError(f"{scheme}:// needs fsspec: pip install fsspec, and what it asks for") from error
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except ValueError:
            known = ", ".join(f"{own}://" for own in SCHEMES)
            raise ConfigError(
                f"{scheme}:// is not a storage that millrace or fsspec knows; expected {known} or a path"
            ) from None
        except ImportError as error:
            raise ConfigError(f"{scheme}:// needs another package: {error}") from None
        except Exception as error:  # noqa: BLE001 - whatever a library raises where it cannot connect
            raise ConfigError(
                f"{url} cannot be opened ({type(error).__name__}); check the URL and its options"
            ) from None
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def get(self, store: None, name: str, *, options: Any = None) -> _Found:
        path, wanted = self._path(name), (options or {}).get("range", (0, None))
        start, stop = (wanted["offset"], None) if isinstance(wanted, dict) else wanted
        return _Found(self.head(store, name), lambda: self._files.open(path, "rb"), start, stop)

    def head(self, store: None, name: str) -> dict[str, Any]:
        with _translated():
            info = self._files.info(self._path(name))
            if info["type"] == "directory":
                raise FileNotFoundError(name)
            return self._meta(info)

    def list(self, store: None, prefix: str | None, chunk_size: int) -> Iterator[list[dict[str, Any]]]:
        with _translated():
            found = self._files.find(self._path(prefix or ""), detail=True)
            yield [self._meta(info) for info in found.values() if info["type"] == "file"]

    def _meta(self, info: dict[str, Any]) -> dict[str, Any]:
        times = [info.get(key) for key in ("last_modified", "LastModified", "mtime", "modified", "created")]
        time = next((own for own in times if own is not None), 0)
        is_time = isinstance(time, datetime)
        changed = time if is_time else datetime.fromtimestamp(float(time) if isinstance(time, (int, float)) else 0, UTC)
        e_tag = info.get("ETag") or info.get("etag")
        path = info["name"].removeprefix(self._root).lstrip("/")
        return {"path": path, "size": info["size"], "last_modified": changed, "e_tag": e_tag, "version": None}

    def put(self, store: None, name: str, data: Any, *, mode: Any = "overwrite", **options: Any) -> None:
        """Written aside and renamed, so that nobody reads a part. Two writers are not told apart as a server does."""
        path = self._path(name)
        aside = f"{path}.{os.urandom(6).hex()}.tmp"
        with _translated():
            if mode == "create" and self._files.exists(path):
                raise FileExistsError(path)
            self._files.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                with self._files.open(aside, "wb") as file:
                    for part in _parts(data):
                        file.write(part)
                if self._files.exists(path):
                    self._files.rm_file(path)
                self._files.mv(aside, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._files.rm_file(aside)
                raise

    def delete(self, store: None, name: str) -> None:
        with _translated():
            self._files.rm_file(self._path(name))


def _parts(data: Any) -> Iterator[Any]:
    if isinstance(data, bytes):
        yield data
    elif isinstance(data, io.IOBase):
        while part := data.read(8 << 20):
            yield part
    else:
        yield from data


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Errors of a library of fsspec as those of obstore. What it says may hold secrets: only its kind is kept."""
    import obstore.exceptions as known

    try:
        yield
    except (FileNotFoundError, GeneratorExit, known.BaseError):
        raise
    except FileExistsError:
        raise known.AlreadyExistsError("exists") from None
    except PermissionError:
        raise known.PermissionDeniedError("403 Forbidden") from None
    except NotImplementedError:
        raise known.NotSupportedError("not supported") from None
    except Exception as error:  # noqa: BLE001 - any library
        raise known.GenericError(type(error).__name__) from None
