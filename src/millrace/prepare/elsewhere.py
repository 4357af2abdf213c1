"""Sources and outputs at a URL: files come into a folder beside the output, and a store is pushed when it is finished.

A source keeps its URL as its name, so plans and provenance do not depend on where it was staged. A store for a URL is
made in a working folder of the cache, where a run that was stopped continues.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from millrace.errors import ConfigError, SourceError, StoreWriteFailed
from millrace.identity import digest
from millrace.native import PRIVATE, cache_folder
from millrace.prepare.files import InputFile, describe_file
from millrace.prepare.progress import Progress
from millrace.store import platform
from millrace.store.folder import Folder
from millrace.store.plain_file import MAX_BYTES
from millrace.store.remote.contents import MANIFEST, PROVENANCE, Contents, read_manifest
from millrace.store.remote.objects import ObjectChanged, ObjectMissing, Objects, WrongBytes, is_url, normal_url
from millrace.store.remote.push import push
from millrace.store.remote.transfer import THREADS, in_threads

MAGIC = re.compile(r"[*\[]")


class Listed(NamedTuple):
    """An object that is a source, as its server describes it."""

    objects: Objects
    name: str
    size: int
    mtime_ns: int
    e_tag: str | None
    folders: tuple[str, ...]  # between what was given and the object

    @property
    def url(self) -> str:
        return self.objects.where(self.name)

    @property
    def place(self) -> str:
        """Where it is staged: another version of it has another place."""
        return os.path.join(
            digest(self.url, str(self.size), str(self.mtime_ns), self.e_tag or ""), Path(self.name).name
        )


def stage_sources(
    url: str, folder: Path, is_known: Callable[[str], object], is_left_out: Callable[[str, Sequence[str]], bool]
) -> list[InputFile]:
    """The files of a URL (an object, a folder of objects, or a pattern), brought into ``folder``.

    A file that is there from an earlier run is not fetched again. All of them are refused if there is no room.
    """
    chosen = [found for found in _listed(url, is_known) if not is_left_out(found.url, (*found.folders, found.name))]
    missing = [found for found in chosen if not _is_there(folder, found)]
    if missing:
        with platform.writing(folder, "creating"):
            platform.make_dir(folder)
        needed, free = sum(found.size for found in missing), shutil.disk_usage(folder).free
        if needed > free:
            raise StoreWriteFailed(
                f"{folder.parent} has {free:,} bytes free, and the files of {url} need {needed:,}; free space "
                "there, or choose a larger disk for the store",
                path=str(folder), errno=28,
            )  # fmt: skip
    in_threads(lambda found: _fetch(found, folder), missing, THREADS, *(found.objects for found in missing))
    return [
        msgspec.structs.replace(describe_file(str(folder / found.place), url), path=found.url, folders=found.folders)
        for found in chosen
    ]


def _listed(url: str, is_known: Callable[[str], object]) -> list[Listed]:
    """What a URL stands for, by name."""
    whole = normal_url(url)
    scheme, _, rest = whole.partition("://")
    parts = rest.split("/")
    magic = next((k for k, part in enumerate(parts) if MAGIC.search(part)), None)
    is_web = scheme in ("http", "https")
    if magic is None and len(parts) > 1 and not (is_web and url.endswith("/")):
        above = Objects(f"{scheme}://{'/'.join(parts[:-1])}")
        if (known := above.describe(parts[-1])) is not None:
            return [_listing(above, known, name=parts[-1])]
    if is_web:
        raise SourceError(
            f"{url} is not there; over {scheme}:// give single files, since it lists no folders", source=url
        )
    base = Objects(f"{scheme}://{'/'.join(parts[:magic])}")
    form = None if magic is None else _regex("/".join(parts[magic:]))
    found = []
    for name, known in sorted(base.listed("").items(), key=lambda entry: os.fsencode(entry[0])):
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        if not is_hidden and (is_known(name) if form is None else form.fullmatch(name)):
            found.append(_listing(base, known, name=name))
    if not found:
        raise ConfigError(f"{url!r} holds no files that fit; check the URL and the endings of its files")
    return found


def _regex(pattern: str) -> re.Pattern[str]:
    """A pattern of names: ``*`` stays in a folder, ``**`` does not."""
    tokens = re.split(r"(\*\*/|\*\*|\*|\[[^\]]*\])", pattern)
    forms = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    return re.compile("".join(forms.get(part, part if part[:1] == "[" else re.escape(part)) for part in tokens))


def _listing(objects: Objects, known: Mapping[str, Any], *, name: str) -> Listed:
    changed: datetime = known["last_modified"]
    mtime_ns = int(changed.timestamp()) * 10**9  # servers give seconds in one answer and more in another
    folders = tuple(name.split("/")[:-1])
    return Listed(objects, name, int(known["size"]), mtime_ns, known["e_tag"], folders)


def _is_there(folder: Path, found: Listed) -> bool:
    try:
        status = os.stat(folder / found.place)
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (found.size, found.mtime_ns)


def _fetch(found: Listed, folder: Path) -> None:
    """Brings one file, whole or not at all."""
    path = folder / found.place
    with platform.writing(path, "downloading"):
        platform.make_dir(path.parent)
        aside = platform.attempt_name(path)
        fd = platform.create(aside)
        done = 0

        def attempt() -> None:
            nonlocal done
            os.ftruncate(fd, done)
            os.lseek(fd, done, os.SEEK_SET)
            for chunk in found.objects.stream(found.name, done, e_tag=found.e_tag):
                platform.write(fd, memoryview(chunk), str(aside))
                done += len(chunk)
            if done != found.size:
                count, done = done, done if done < found.size else 0
                raise WrongBytes(f"{count:,} of {found.size:,} bytes came")

        try:
            try:
                if found.size:
                    found.objects.tried(found.name, attempt, lambda: done)
            except (ObjectChanged, ObjectMissing) as error:
                raise SourceError(
                    f"{found.url!r} changed while it was downloaded; run the same command again", source=found.url
                ) from error
            finally:
                os.close(fd)
            os.utime(aside, ns=(found.mtime_ns, found.mtime_ns))
            platform.rename(aside, path)
        except BaseException:
            platform.remove(aside)
            raise


class Target:
    """A URL that a store goes to when it is finished, and the working folder where it is made.

    The folder is ``<cache>/prepare/<hash of the URL>``: a run that was stopped continues there, and it ends with the push.
    """

    def __init__(self, url: str) -> None:
        self.objects = Objects(url, create=True)
        self.url = self.objects.url
        self.folder = Path(os.path.realpath(cache_folder())) / "prepare" / digest(self.url)[:16]
        self.out = self.folder / (Path(self.url).name or "store")

    def finished_store(self) -> Path | None:
        """A folder with what is known of the store at the URL, if there is one and none that waits to be sent."""
        if (self.out / MANIFEST).exists():
            return None
        try:
            data = read_manifest(self.objects)
            provenance = self.objects.read(PROVENANCE, MAX_BYTES)
        except ObjectMissing:
            return None
        shell = self.folder / "there" / self.out.name
        with platform.writing(shell, "creating"):
            platform.make_dir(shell, PRIVATE)
            platform.write_file(shell / PROVENANCE, provenance)
            platform.write_file(shell / MANIFEST, data)
        return shell

    def send(self, progress: Progress) -> None:
        """Pushes the finished store; what an earlier run has sent is not sent again."""
        total = Contents.of(Folder(self.out)).manifest.totals.bytes
        lock, done = threading.Lock(), 0

        def step(num_bytes: int) -> None:
            nonlocal done
            with lock:
                done += num_bytes
                progress("push", done, total, {})

        push(self.out, self.url, progress=step)

    def clear(self) -> None:
        """Removes the working folder."""
        gone = self.folder.with_suffix(".gone")
        with platform.writing(self.folder, "removing"):
            platform.remove(gone)
            if self.folder.exists():
                platform.rename(self.folder, gone)  # first: half a store must not look like one
                platform.remove(gone)


def target_of(out: str | os.PathLike[str], *, append: bool) -> Target | None:
    """Where a store is to be sent; None for a path."""
    url = os.fspath(out)
    if not is_url(url) or url.startswith("file://"):
        return None
    if url.split(":")[0] in ("http", "https"):
        raise ConfigError(f"--out {url}: http:// can only be read; give s3://, gs://, az:// or a path")
    if append:
        raise ConfigError(
            f"--append to {url}: a store at a URL is not appended to in place; run millrace pull {url} DIR, prepare with "
            f"--append --out DIR, and millrace push DIR {url}, which sends only the new shards"
        )
    return Target(url)
