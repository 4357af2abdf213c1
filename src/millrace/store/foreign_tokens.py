"""Token files without an index: headerless and llm.c ``.bin``, and the folders that hold them.

A file is one record, since nothing says where its documents end.
"""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from typing import Any

from millrace.errors import ConfigError, StoreNotFound
from millrace.store import foreign_files as files
from millrace.store.foreign_files import Foreign, MappedFile, Numbers, corrupt
from millrace.store.foreign_megatron import has_index
from millrace.store.layout import DTYPES

METADATA = ("dataset_metadata.json", "metadata.json", "meta.json")
VOCABULARY_KEY, MAX_VOCABULARY = "vocab_size", 1 << 31
DTYPE_KEYS = ("dtype", "token_dtype")
LLMC_HEADER_BYTES = 1024  # 256 int32: magic, version, number of tokens, zeros
LLMC_EVALUATION = 20240522
LLMC_DTYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}


def read_bin(path: str, given: str | None) -> Foreign:
    """One ``.bin``: llm.c by its header, else headerless."""
    part = _read(files.map_file(path), None, given, "uint16", METADATA)
    what = "llm.c" if part.start else "headerless"
    return _foreign("bin", f"{what} .bin of {part.dtype} tokens", [part])


def read_bin_folder(folder: str, given: str | None) -> Foreign:
    """``train.bin``, ``val.bin``, ``test.bin`` side by side, as nanoGPT writes; ``meta.pkl`` is never opened."""
    names = [f"{split}.bin" for split in files.SPLITS if os.path.lexists(os.path.join(folder, f"{split}.bin"))]
    mapped = files.map_files(folder, names)
    parts = [_read(file, file.name.removesuffix(".bin"), given, "uint16", METADATA) for file in mapped]
    return _foreign("bin-folder", f"folder of {', '.join(names)} with {parts[0].dtype} tokens (nanoGPT)", parts)


def read_shards(folder: str, names: list[str], given: str | None) -> Foreign:
    """``*_train*.bin`` and ``*_val*.bin``, as llm.c shards a corpus: a shard per file, by name."""
    both = zip(files.map_files(folder, names), files.split_by_name(folder, names), strict=True)
    parts = [_read(file, split, given, "uint16", ()) for file, split in both]
    for part in parts:
        if not part.start and given is None:
            raise corrupt(
                part.file.path, "has no header of llm.c, as files of such a folder do",
                "copy it again, move it away, or give dtype= where none of them has one",
            )  # fmt: skip
    what = "llm.c" if all(part.start for part in parts) else "headerless"
    return _foreign("bin-shards", f"folder of {len(parts)} {what} .bin of {parts[0].dtype} tokens", parts)


def read_split_folders(folder: str, given: str | None) -> Foreign:
    """``dataset_metadata.json`` beside ``train/*.bin`` and ``val/*.bin``: a shard per file, by name.

    Its ``dtype`` and ``vocab_size`` are read, nothing else.
    """
    names = split_files(folder)
    if not names:
        problem = f"{folder} has dataset_metadata.json but no .bin in train/, val/ or test/"
        raise StoreNotFound(f"{problem}; check that preparation finished", path=folder)
    dtype = _headerless_dtype(folder, METADATA[:1], given) or "uint32"
    parts = [_read(file, file.name.split("/")[0], given, dtype, ()) for file in files.map_files(folder, names)]
    phrase = f"dataset_metadata.json with {len(parts)} .bin of {parts[0].dtype} tokens"
    return replace(_foreign("split-folders", phrase, parts), meta=_vocabulary(os.path.join(folder, METADATA[0])))


def _vocabulary(where: str) -> dict[str, int]:
    """The size of the vocabulary that metadata name, for models; nothing where they do not."""
    size = files.read_json(where, "correct it, or copy it again").get(VOCABULARY_KEY)
    if size is None:
        return {}
    if type(size) is not int or not 0 < size <= MAX_VOCABULARY:
        raise corrupt(
            where, f"{VOCABULARY_KEY} is {size!r:.60}, expected a whole number from 1 to {MAX_VOCABULARY:,}",
            "correct it, or remove it from the file", expected="a whole number", found=size,
        )  # fmt: skip
    return {"vocabulary": size}


def split_files(folder: str) -> list[str]:
    """``train/a.bin``, ``train/b.bin``, ``val/a.bin``, ...: the data files of a folder of split folders."""
    present = [split for split in files.SPLITS if os.path.isdir(os.path.join(folder, split))]
    return [f"{split}/{name}" for split in present for name in files.list_folder(os.path.join(folder, split), ".bin")]


def _read(file: MappedFile, split: str | None, given: str | None, default: str, metadata: tuple[str, ...]) -> Numbers:
    """The tokens of one file, its size checked."""
    headed = _llmc_dtype(file)
    if headed is not None:
        files.check_given(given, headed, file.path)
        return Numbers(file, headed, LLMC_HEADER_BYTES, split=split)
    folder, name = os.path.split(file.path)
    if has_index(file.path.removesuffix(".bin"), given):  # read_bin is not asked then, so this is one of a folder
        raise ConfigError(f"{file.path} has a Megatron index beside it; open that file alone", path=file.path)
    candidates = (*metadata, f"{name.removesuffix('.bin')}.json") if metadata else ()
    dtype = _headerless_dtype(folder, candidates, given) or default
    size = DTYPES[dtype][0].itemsize
    if file.num_bytes % size:
        raise corrupt(
            file.path, f"{file.num_bytes} bytes, expected a multiple of {size} ({dtype})",
            "give dtype= if it holds another type, else copy the file again",
            column="tokens", expected=f"a multiple of {size}", found=file.num_bytes,
        )  # fmt: skip
    return Numbers(file, dtype, split=split)


def _llmc_dtype(file: MappedFile) -> str | None:
    """The dtype by an llm.c header, whose token count must be that of the file; None without such a header."""
    if file.num_bytes < 8:
        return None
    magic, version = struct.unpack("<ii", file.data[:8].tobytes())
    if magic == LLMC_EVALUATION:
        raise ConfigError(
            f"{file.path} is an evaluation file of llm.c: questions with their answers, as of HellaSwag, and no stream of tokens; "
            "open its training files instead, or move it out of their folder",
            path=file.path,
        )
    if magic not in {known for known, _ in LLMC_DTYPES}:
        return None
    dtype = LLMC_DTYPES.get((magic, version))
    if dtype is None:
        raise corrupt(file.path, f"an llm.c header of unknown version {version}", "write it with a known version")
    count = struct.unpack("<i", file.data[8:12].tobytes())[0] if file.num_bytes >= LLMC_HEADER_BYTES else 0
    expected = LLMC_HEADER_BYTES + count * DTYPES[dtype][0].itemsize
    if file.num_bytes != expected:
        raise corrupt(
            file.path, f"{file.num_bytes} bytes, expected {expected} by its llm.c header ({count} {dtype} tokens)",
            column="tokens", expected=expected, found=file.num_bytes,
        )  # fmt: skip
    return dtype


def _headerless_dtype(folder: str, names: tuple[str, ...], given: str | None) -> str | None:
    """What ``dtype=`` says, else the metadata in a folder."""
    if given is not None:
        if not files.is_integer(given):
            raise ConfigError(f"dtype={given!r} given for tokens; expected an integer such as 'uint16'", path=folder)
        return given
    stated: list[tuple[str, str]] = []
    for name in names:
        where = os.path.join(folder, name)
        if os.path.lexists(where):
            body = files.read_json(where, "correct it, move it away, or give dtype= to do without it")
            stated += [(where, _stated(where, key, body[key])) for key in DTYPE_KEYS if key in body]
    if len({dtype for _, dtype in stated}) > 1:
        said = " and ".join(f"{os.path.basename(where)} {dtype}" for where, dtype in stated)
        raise corrupt(folder, f"its metadata disagree on the dtype ({said})", "correct or remove one of them")
    return stated[0][1] if stated else None


def _stated(where: str, key: str, value: Any) -> str:
    dtype = files.SPELLINGS.get(value) if isinstance(value, str) else None
    if dtype is None or not files.is_integer(dtype):
        raise corrupt(
            where, f"{key} is {value!r}, expected an integer type of tokens such as 'uint16' (little-endian)",
            "correct the file or give dtype=", expected="an integer dtype", found=value,
        )  # fmt: skip
    return dtype


def _foreign(layout: str, phrase: str, parts: list[Numbers]) -> Foreign:
    first = parts[0]
    for one in parts:
        if one.dtype != first.dtype:
            raise corrupt(
                one.file.path, f"{one.dtype} tokens, but {first.file.path} has {first.dtype}",
                "open them one by one, or prepare a store from them", expected=first.dtype, found=one.dtype,
            )  # fmt: skip
    return files.plain_numbers(layout, phrase, parts)
