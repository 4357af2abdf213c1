"""A user's own vocabulary: tokenizer.json, .tiktoken, a sentencepiece model."""

from __future__ import annotations

import base64
import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from millrace.errors import ConfigError
from millrace.native import core
from millrace.text.kinds import GPT2_PATTERN
from millrace.text.load import load_tokenizer, tokenizer_by_name
from millrace.text.ranks import SEPARATOR, RankEncoder
from millrace.text.sentencepiece_file import SentencePieceTokenizer

GPT4 = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITTERS = {
    "level": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "split": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GPT4), "isolated"), LEVEL]),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "words": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+"), "isolated"), LEVEL]),
}

FASTEST = "millrace" if core else "tiktoken"


@pytest.fixture(scope="session")
def backends(real):
    """Trained vocabularies of every make."""

    def train(splitter) -> str:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer, backend.decoder = splitter, decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
            special_tokens=["<|endoftext|>"],
        )  # fmt: skip
        backend.train_from_iterator((document.decode() for document in real[:12]), trainer)
        return backend.to_str()

    return {name: train(splitter) for name, splitter in SPLITTERS.items()}


@pytest.fixture
def saved(tmp_path):
    """The tokenizer millrace makes of a backend, and the backend's own ids."""

    def save(backend: Tokenizer) -> SimpleNamespace:
        (tmp_path / "own.json").write_text(backend.to_str())
        return SimpleNamespace(
            tokenizer=tokenizer_by_name(str(tmp_path / "own.json")),
            encode=lambda document: backend.encode(document.decode(), add_special_tokens=False).ids,
        )

    return save


def assert_same_ids(saved: SimpleNamespace, documents: list[bytes]) -> None:
    ids, lengths = saved.tokenizer.encode_documents(documents)
    assert [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] == list(map(saved.encode, documents))


@pytest.mark.parametrize("make", ["level", "split"])
def test_byte_level_bpe_runs_on_the_fast_encoder_with_hugging_faces_ids(backends, saved, real, odd, make):
    own = saved(Tokenizer.from_str(backends[make]))
    assert own.tokenizer.encoder == (FASTEST if make == "level" else "tiktoken")
    assert own.tokenizer.check([*real[40:60], *odd])
    assert_same_ids(own, [*odd, *real[60:80], b"<|endoftext|>"])
    for document in [*odd, *real[60:63]]:
        if b"<|endoftext|>" not in document:
            assert own.tokenizer.decode(own.encode(document)) == document.decode()


@pytest.mark.parametrize("make", ["digits", "prefix"])
def test_other_makes_run_on_tokenizers_with_the_same_ids(backends, saved, real, odd, make):
    own = saved(Tokenizer.from_str(backends[make]))
    assert own.tokenizer.encoder == "tokenizers"
    assert not own.tokenizer.check(odd)
    assert_same_ids(own, [*odd, *real[60:64]])


def test_a_normalizer_is_left_to_tokenizers(backends, saved, odd):
    backend = Tokenizer.from_str(backends["level"])
    backend.normalizer = normalizers.NFC()
    own = saved(backend)
    assert own.tokenizer.encoder == "tokenizers"
    assert_same_ids(own, odd)


def test_a_panic_of_tokenizers_is_an_error_of_the_tokenizer(saved):
    """A pattern whose search grows without end: Hugging Face's encoder gives up by a panic, which is no Exception."""
    backend = Tokenizer(
        models.BPE(vocab={letter: k for k, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("(a+)+$"), "isolated"), LEVEL])
    own = saved(backend).tokenizer
    assert len(own.encode("aaab")) == 4
    for use in (lambda: own.encode_documents([b"a" * 40 + b"b"]), lambda: own.encode("a" * 40 + "b")):
        with pytest.raises(
            ConfigError, match=r"tokenizer own.json failed in Hugging Face's encoder \(.*retry-limit.*; correct"
        ):
            use()


def test_word_pieces_are_left_to_tokenizers(saved):
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "[SEP]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    own = saved(backend)
    assert (own.tokenizer.encoder, own.tokenizer.end, own.tokenizer.vocab_size) == ("tokenizers", 3, 4)
    assert own.tokenizer.encode("ab c a").tolist() == [1, 2, 0, 1]
    assert own.tokenizer.decode([1, 2, 1]) == "ab a"


def test_a_pattern_that_leaves_text_out_goes_to_tokenizers_where_it_does(backends, saved, odd):
    own = saved(Tokenizer.from_str(backends["words"]))
    assert own.tokenizer.encoder == "tiktoken"  # it converts, and "word" alone shows no difference
    assert own.tokenizer.check([b"word"])
    assert_same_ids(own, [b"word", b"two words, and more", *odd])
    assert not own.tokenizer.check([b"two words"])
    assert own.tokenizer.encoder == "tokenizers"


def test_added_tokens_are_recognised_as_hugging_face_does(backends, saved, odd):
    backend = Tokenizer.from_str(backends["level"])
    backend.add_special_tokens([AddedToken("<|user|>", lstrip=True, rstrip=True)])
    backend.add_tokens([AddedToken("hello", single_word=True), "世界"])
    own = saved(backend)
    assert own.tokenizer.encoder == FASTEST
    documents = [b"a <|user|> b", b"hello hellos", "世界你好".encode(), b"plain", b"<|endoftext|>x", b"", *odd]
    assert_same_ids(own, documents)
    assert own.tokenizer.encode("世界").tolist() == [backend.token_to_id("世界")]
    assert own.tokenizer.check(documents)
    assert own.tokenizer.decode(own.encode("世界你好".encode())) == "世界你好"


def test_truncation_padding_and_templates_are_not_applied(backends, saved):
    backend = Tokenizer.from_str(backends["level"])
    plain = backend.encode("one two three four").ids
    end = backend.token_to_id("<|endoftext|>")
    backend.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    own = saved(backend)
    assert own.tokenizer.encode("one two three four").tolist() == plain
    own.tokenizer.use("tokenizers")
    assert own.tokenizer.encode("one two three four").tolist() == plain


def test_a_vocabulary_without_an_end_gets_one_more_id(saved):
    backend = Tokenizer(
        models.BPE({character: k for k, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own = saved(backend)
    assert (own.tokenizer.end, own.tokenizer.vocab_size) == (256, 257)


@pytest.mark.parametrize("make", SPLITTERS)
def test_a_tokenizer_json_comes_back_from_a_store(backends, saved, odd, make):
    own = saved(Tokenizer.from_str(backends[make]))
    back = load_tokenizer(own.tokenizer.describe(), own.tokenizer.to_file(), "tokenizer.json")
    assert back.describe() == own.tokenizer.describe()
    assert_same_ids(SimpleNamespace(tokenizer=back, encode=own.encode), odd)


@pytest.fixture
def ranks_file(tmp_path, reference):
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in list(reference.ranks.items())[:5000]]
    (tmp_path / "own.tiktoken").write_text("\n".join(lines) + "\n")
    return tmp_path / "own.tiktoken"


def test_ranks_without_their_pattern_are_refused(ranks_file):
    with pytest.raises(ConfigError, match=r"own\.tiktoken has no pattern; put .*own\.json"):
        tokenizer_by_name(str(ranks_file))


@pytest.mark.parametrize("key", ["pattern", "pat_str"])
def test_ranks_with_their_pattern_give_tiktokens_ids(ranks_file, reference, real, odd, key):
    special = {"<|endoftext|>": 5001, "<pad>": 70_000}
    ranks_file.with_suffix(".json").write_text(json.dumps({key: GPT4, "special_tokens": special}))
    tokenizer = tokenizer_by_name(str(ranks_file))
    assert (tokenizer.end, tokenizer.vocab_size, tokenizer.dtype) == (5001, 70_001, np.dtype(np.uint32))
    ranks = dict(list(reference.ranks.items())[:5000])
    encoding = tiktoken.Encoding("own", pat_str=GPT4, mergeable_ranks=ranks, special_tokens=special)
    own = SimpleNamespace(tokenizer=tokenizer, encode=lambda document: encoding.encode_ordinary(document.decode()))
    assert_same_ids(own, [*odd, *real[:10]])
    assert_same_ids(own, [b"a", f"a {SEPARATOR} b".encode(), b"b"])
    back = load_tokenizer(tokenizer.describe(), tokenizer.to_file(), "tokenizer.json")
    assert back.describe() == tokenizer.describe()
    assert_same_ids(SimpleNamespace(tokenizer=back, encode=own.encode), odd)
    assert [back.decode(own.encode(document)) for document in odd] == [document.decode() for document in odd]


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no pattern"),
        ('{"pattern": 1}', "holds no pattern"),
        ('{"pattern": "(unclosed"}', "cannot encode"),
        ('{"pattern": "x"}', "skips some of the text"),
        ('{"pattern": "a", "special_tokens": ["b"]}', "special_tokens is not"),
        ('{"pattern": "a", "special_tokens": {"b": -1}}', "special_tokens is not"),
        ('{"pattern": "a", "special_tokens": {"b": 17}}', r"take the numbers \[17\] of others"),
    ],
)
def test_a_file_beside_the_ranks_that_is_none_is_refused(ranks_file, beside, message):
    ranks_file.with_suffix(".json").write_text(beside)
    with pytest.raises(ConfigError, match=rf"own\..*{message}"):
        tokenizer_by_name(str(ranks_file))


@pytest.mark.parametrize(
    ("more", "message"),
    [(b"no base64!\n", "line 5001: .*is not 'base64 rank'"), (b"YWJjZGVm 7\n", "one rank to several tokens"),
     (b"YWJjZGVm -7\n", "line 5001"), (b"YWJjZGVm 99999999999999\n", "line 5001")],
)  # fmt: skip
def test_damaged_ranks_are_refused_with_their_line(ranks_file, more, message):
    ranks_file.with_suffix(".json").write_text(json.dumps({"pattern": GPT2_PATTERN}))
    ranks_file.write_bytes(ranks_file.read_bytes() + more)
    with pytest.raises(ConfigError, match=rf"own\.tiktoken.*{message}"):
        tokenizer_by_name(str(ranks_file))
    ranks_file.write_bytes(b"YQ== 0\n")
    with pytest.raises(ConfigError, match="lacks the single bytes"):
        tokenizer_by_name(str(ranks_file))


def test_ranks_without_tiktoken_name_the_extra(ranks_file, monkeypatch):
    ranks_file.with_suffix(".json").write_text(json.dumps({"pattern": GPT2_PATTERN}))
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ConfigError, match=r"needs tiktoken; pip install '\.\[text\]'"):
        tokenizer_by_name(str(ranks_file))


def test_the_encoder_refuses_to_lose_text():
    ranks = {bytes([byte]): byte for byte in range(256)}
    with pytest.raises(ValueError, match="skips some"):
        RankEncoder(r"\w+", ranks).encode_documents([b"two", b"a b"])


@pytest.fixture(scope="session")
def model(real):
    proto = io.BytesIO()
    lines = [line for document in real[:40] for line in document.decode().splitlines() if line.strip()][::20]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=proto, vocab_size=600, byte_fallback=True, minloglevel=2,
        character_coverage=0.99, normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
    )  # fmt: skip
    return proto.getvalue()


def test_a_sentencepiece_model_gives_its_ids_and_comes_back(model, tmp_path, real, odd):
    (tmp_path / "own.model").write_bytes(model)
    tokenizer = tokenizer_by_name(str(tmp_path / "own.model"))
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    own = SimpleNamespace(tokenizer=tokenizer, encode=lambda document: processor.encode(document.decode()))
    documents = [*odd, *real[40:44]]
    assert_same_ids(own, documents)
    assert (tokenizer.end, tokenizer.vocab_size) == (processor.eos_id(), 600)
    back = load_tokenizer(tokenizer.describe(), tokenizer.to_file(), "tokenizer.json")
    assert back.describe() == tokenizer.describe()
    assert_same_ids(SimpleNamespace(tokenizer=back, encode=own.encode), documents)
    assert [back.decode(back.encode(document.decode())) for document in real[40:44]] == [
        d.decode() for d in real[40:44]
    ]


def test_the_last_id_of_a_model_is_decoded_and_its_end_is_none_of_them(model, tmp_path):
    """With an end of its own, and without one: then the end is one id more."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    own = SentencePieceTokenizer(model, "own.model")
    last = processor.get_piece_size() - 1
    assert own.decode_bytes([last]) == processor.decode([last]).encode() != b""
    assert own.decode([last, own.end]) == processor.decode([last]) + "<|endoftext|>"
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words", "and some more"] * 20), model_writer=proto, vocab_size=30, eos_id=-1,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    endless = SentencePieceTokenizer(proto.getvalue(), "endless.model")
    size = sentencepiece.SentencePieceProcessor(model_proto=proto.getvalue()).get_piece_size()
    assert (endless.end, endless.vocab_size) == (size, size + 1)
    assert endless.decode_bytes([size - 1]) != b""
    assert endless.decode_bytes([size]) == b""
    ids, lengths = endless.encode_with_ends([b"some words", b""])
    assert ids.tolist()[-2:] == [size, size]
    assert lengths.tolist() == [len(ids) - 1, 1]


@pytest.mark.parametrize("data", [b"", b"no model"])
def test_a_file_that_is_no_model_is_refused(tmp_path, data):
    (tmp_path / "own.model").write_bytes(data)
    with pytest.raises(ConfigError, match=r"tokenizer own\.model is (empty|not a sentencepiece model)"):
        tokenizer_by_name(str(tmp_path / "own.model"))


def test_a_model_without_sentencepiece_names_the_package(model, tmp_path, monkeypatch):
    (tmp_path / "own.model").write_bytes(model)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.delitem(sys.modules, "millrace.text.sentencepiece_file", raising=False)
    with pytest.raises(ConfigError, match="pip install sentencepiece"):
        tokenizer_by_name(str(tmp_path / "own.model"))


def test_a_file_of_unknown_ending_is_refused(tmp_path):
    (tmp_path / "own.vocab").write_text("a")
    with pytest.raises(ConfigError, match=r"unknown ending '\.vocab'; expected \.json, \.tiktoken or \.model"):
        tokenizer_by_name(str(tmp_path / "own.vocab"))
