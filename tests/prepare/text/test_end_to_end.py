"""From real text to a store: every record is what a straight-line reading of the same files gives."""

import io
import json
import os
import sys

import numpy as np
import pytest
import xxhash

import millrace as mr
from millrace.cli import run
from millrace.native import core
from millrace.prepare.text import text as prepare
from millrace.prepare.text.tokens import worker_tokenizer as loaded
from millrace.store.verify import verify_store

SMALL = {"part_bytes": 20_000, "workers": 1}


@pytest.fixture
def paths(corpus):
    return [str(corpus / "b.txt"), str(corpus / "a.txt"), *sorted(map(str, (corpus / "code").iterdir()))]


def expected(documents, encode, end):
    return [(d.source, d.offset, [*encode(d.text), end]) for d in documents]


@pytest.mark.parametrize("dedup", ["exact", "none"])
@pytest.mark.parametrize("normalize", [True, False])
def test_gpt2_records_are_tiktokens_ids_document_by_document(paths, tmp_path, tools, normalize, dedup):
    mr.prepare_text(paths, tmp_path / "out", normalize=normalize, dedup=dedup, val=0.1, shard_tokens=5_000, **SMALL)
    store = mr.open_store(tmp_path / "out")
    documents = tools.oracle(*paths, normalize=normalize, dedup=dedup == "exact")
    for split in ("train", "val"):
        mine = [d for d in documents if d.is_val(0.1) == (split == "val")]
        assert tools.records(store.split(split)) == expected(mine, tools.gpt2().encode_ordinary, 50256)
    assert store.columns["tokens"].dtype == np.uint16


def test_bytes_are_the_bytes_and_256(paths, tmp_path, tools):
    mr.prepare_text(paths, tmp_path / "out", tokenizer="bytes", val=0, **SMALL)
    found = tools.records(mr.open_store(tmp_path / "out"))
    assert found == expected(tools.oracle(*paths), str.encode, 256)


def test_char_numbers_the_characters_of_the_corpus(paths, tmp_path, tools):
    mr.prepare_text(paths, tmp_path / "out", tokenizer="char", val=0, **SMALL)
    documents = tools.oracle(*paths)
    alphabet = sorted({character for d in documents for character in d.text})
    found = tools.records(mr.open_store(tmp_path / "out"))
    assert found == expected(documents, lambda text: [alphabet.index(c) for c in text], len(alphabet))


def test_a_trained_vocabulary_gives_the_ids_of_tokenizers(paths, tmp_path, tools):
    mr.prepare_text(paths, tmp_path / "out", tokenizer="train:500", val=0, **SMALL)
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert backend.get_vocab_size() == 500
    backend.encode_special_tokens = True  # the name of the end in a text is text
    end = backend.token_to_id("<|endoftext|>")
    found = tools.records(mr.open_store(tmp_path / "out"))
    assert found == expected(tools.oracle(*paths), lambda text: backend.encode(text).ids, end)


def test_source_and_offset_lead_back_to_the_bytes(paths, tmp_path, tools):
    mr.prepare_text(paths, tmp_path / "out", normalize=False, val=0.1, **SMALL)
    store = mr.open_store(tmp_path / "out")
    root = json.loads((tmp_path / "out" / "provenance.json").read_bytes())["root"]
    for source, offset, tokens in tools.records(store):
        text = store.decode(tokens).removesuffix("<|endoftext|>").encode()
        with open(os.path.join(root, source), "rb") as file:
            file.seek(offset)
            assert file.read(len(text)) == text


@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes", "char", "train:500"])
def test_whole_files_come_back_under_no_normalize(corpus, tmp_path, tokenizer):
    mr.prepare_text(str(corpus / "code"), tmp_path / "out", tokenizer=tokenizer, normalize=False, val=0, **SMALL)
    store = mr.open_store(tmp_path / "out")
    names = sorted((corpus / "code").iterdir())
    assert store.num_records == len(names)
    for k, name in enumerate(names):
        tokens = store.columns["tokens"][store.offsets[k] : store.offsets[k + 1] - 1]
        assert store.decode(tokens) == name.read_text("utf-8")
        assert store.encode(name.read_text("utf-8")).tolist() == tokens.tolist()


def test_shards_are_cut_before_the_document_that_would_pass_the_limit(paths, tmp_path, tools):
    mr.prepare_text(paths, tmp_path / "out", tokenizer="bytes", val=0, shard_tokens=4_000, **SMALL)
    lengths = [len(d.text.encode()) + 1 for d in tools.oracle(*paths)]
    shards: list[list[int]] = [[]]
    for length in lengths:
        if shards[-1] and sum(shards[-1]) + length > 4_000:
            shards.append([])
        shards[-1].append(length)
    folders = sorted((tmp_path / "out" / "shards").iterdir())
    found = [np.diff(np.fromfile(folder / "offsets.i64", "<i8")).tolist() for folder in folders]
    assert found == shards
    assert max(map(sum, shards)) > 4_000, "one document must be longer than a shard, to see it have one to itself"


def test_val_and_test_are_by_the_hash_of_the_document_and_stay_after_an_append(corpus, tmp_path, tools):
    def splits():
        store = mr.open_store(tmp_path / "out")
        return {split: {store.decode(r[2]) for r in tools.records(store.split(split))} for split in store.splits}

    mr.prepare_text(str(corpus / "a.txt"), tmp_path / "out", tokenizer="bytes", val=0.2, test=0.1, **SMALL)
    before = splits()
    options = {"tokenizer": "bytes", "val": 0.2, "test": 0.1, **SMALL}
    mr.prepare_text(str(corpus / "b.txt"), tmp_path / "out", append=True, **options)
    after = splits()
    assert before.keys() == after.keys() == {"train", "val", "test"}
    assert all(before[split] < after[split] for split in before)
    assert sum(map(len, after.values())) == len(set.union(*after.values())), "a document is in two splits"
    for d in tools.oracle(corpus / "a.txt", corpus / "b.txt"):
        share = (int.from_bytes(xxhash.xxh3_128_digest(d.text.encode())[:8], "little") >> 11) / 2**53
        split = "val" if share < 0.2 else "test" if share < 0.3 else "train"
        assert d.text + "<|endoftext|>" in after[split]


def test_val_tail_takes_the_last_documents(corpus, tmp_path, tools):
    path = str(corpus / "a.txt")
    mr.prepare_text(path, tmp_path / "out", tokenizer="bytes", val=0.1, test=0.05, val_tail=True, **SMALL)
    store, documents = mr.open_store(tmp_path / "out"), tools.oracle(path)
    found = [r[1] for split in ("train", "val", "test") for r in tools.records(store.split(split))]
    assert found == [d.offset for d in documents]
    assert store.split("val").num_records + store.split("test").num_records == round(0.15 * len(documents))
    assert store.split("test").num_records == round(0.05 * len(documents))


def test_an_empty_split_stops_with_its_remedies_and_keeps_what_was_read(corpus, tmp_path, monkeypatch):
    source, out = str(corpus / "code" / "this.py"), tmp_path / "out"
    with pytest.raises(mr.ConfigError, match=r"'val' would be empty.*val=0.*(larger val=|val_tail=True)"):
        mr.prepare_text(source, out, tokenizer="bytes", val=1e-9, workers=1)
    assert not out.exists()
    monkeypatch.setattr("millrace.prepare.text.part.PartMaker.run", lambda self: pytest.fail("read again"))
    report = mr.prepare_text(source, out, tokenizer="bytes", val=0, workers=1)
    assert report.documents == {"train": 1}


@pytest.mark.parametrize("text", ["", " \n\n \n"])
def test_a_corpus_of_nothing_says_so(tmp_path, text):
    (tmp_path / "empty.txt").write_text(text)
    with pytest.raises(mr.ConfigError, match="no documents are left"):
        mr.prepare_text(str(tmp_path / "empty.txt"), tmp_path / "out", tokenizer="bytes", workers=1)


def test_empty_files_among_others_are_no_documents(corpus, tmp_path, tools):
    for name in ("a.txt", "m.jsonl", "z.py"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "k.txt").write_bytes((corpus / "a.txt").read_bytes())
    mr.prepare_text(
        [str(tmp_path / n) for n in ("a.txt", "k.txt", "m.jsonl", "z.py")], tmp_path / "out", val=0, **SMALL
    )
    assert mr.open_store(tmp_path / "out").num_records == len(tools.oracle(corpus / "a.txt"))


def test_the_result_is_whole_and_feeds_training(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    mr.prepare_text(str(corpus), out, val=0.1, shard_tokens=3_000, **SMALL)
    assert verify_store(out).damage == []
    view = mr.Blocks(mr.open_store(out).split("train"), length=64)
    with mr.Feed(view, batch=8, seed=3, epochs=1, device="numpy") as feed:
        seen = np.concatenate([batch.samples[batch.valid] for batch in feed])
    assert sorted(seen.tolist()) == list(range(len(view)))
    assert run(["explain", str(out), "--step", "1", "--length", "64", "--batch", "4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all((corpus / row["columns"]["source"]).is_file() for row in rows)


def test_a_text_that_spells_the_end_token_is_text(tmp_path, tools):
    text = "before <|endoftext|> after"
    (tmp_path / "a.txt").write_text(text)
    report = mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", val=0, workers=1)
    assert tools.records(mr.open_store(tmp_path / "out"))[0][2] == [*tools.gpt2().encode_ordinary(text), 50256]
    assert report.encoder == ("millrace" if core else "tiktoken")


def test_parts_that_are_made_here_take_the_tokenizer_that_is_loaded(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(loaded, "load_tokenizer", lambda *_: pytest.fail("it was loaded again"))
    report = mr.prepare_text(str(corpus), tmp_path / "out", val=0, workers=1)
    assert report.encoder == ("millrace" if core else "tiktoken")


@pytest.mark.parametrize("workers", [1, 2])
def test_where_the_fast_encoder_differs_the_slow_one_makes_the_parts(corpus, tmp_path, monkeypatch, workers):
    """Also those that an earlier life has made on the fast one."""
    from millrace.text.ranks import RankEncoder

    def prepared(name, **options):
        return mr.prepare_text(
            str(corpus / "a.txt"), tmp_path / name, tokenizer="train:400", val=0, **{**SMALL, **options}
        )

    right = RankEncoder.encode_documents
    with monkeypatch.context() as wrong:
        wrong.setenv("MILLRACE_BPE", "tiktoken")
        wrong.setattr(RankEncoder, "encode_documents", lambda self, d: (right(self, d)[0] ^ 1, right(self, d)[1]))
        with monkeypatch.context() as unchecked:
            unchecked.setattr(prepare.vocabulary, "check_encoder", lambda *_: None)
            unchecked.setattr(prepare, "notes_after", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                prepared("out", workers=1)
        assert len(list(tmp_path.glob("out.partial/parts/*/done.json"))) > 1
        assert prepared("out", workers=workers).encoder == "tokenizers"
    prepared("right")
    one, other = (mr.open_store(tmp_path / name).columns["tokens"][:] for name in ("out", "right"))
    assert np.array_equal(one, other)


@pytest.mark.parametrize(("count", "shortest"), [(3, 9_000), (300, 1_900)])
def test_encoders_are_compared_on_beginnings_of_what_cleaning_leaves(tmp_path, monkeypatch, count, shortest):
    from millrace.text.bpe import HuggingFaceTokenizer

    seen: list[bytes] = []
    monkeypatch.setattr(HuggingFaceTokenizer, "check", lambda self, documents: seen.extend(documents))
    texts = [" " * 20_000 + f"{k} " + "wörd " * 4_000 for k in range(count)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    mr.prepare_text(str(tmp_path / "a.jsonl"), tmp_path / "out", val=0, workers=1, part_bytes=1 << 30)
    assert len(seen) == min(count, 200)
    assert shortest < min(map(len, seen))
    assert sum(map(len, seen)) <= 400_000
    assert all(text.decode().split(" ")[:2] == [str(k), "wörd"] for k, text in enumerate(seen))


def test_a_vocabulary_that_was_learnt_takes_the_name_of_the_end_for_text_after_a_restart_too(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("before <|endoftext|> after\n\n" * 3)

    def prepared(name):
        mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / name, tokenizer="train:300", val=0, dedup="none", **SMALL)
        return mr.open_store(tmp_path / name).columns["tokens"][:].tolist()

    with monkeypatch.context() as killed:
        killed.setattr(prepare.Text, "make_part", staticmethod(lambda task: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            prepared("out")
    assert (tmp_path / "out.partial" / "vocabulary.json").exists()
    assert prepared("out") == prepared("whole")


def test_standard_input_is_a_source_named_dash(corpus, tmp_path, monkeypatch, tools):
    data = (corpus / "a.txt").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    mr.prepare_text("-", tmp_path / "out", val=0, **SMALL)
    found = tools.records(mr.open_store(tmp_path / "out"))
    assert found == [
        ("-", *r[1:]) for r in expected(tools.oracle(corpus / "a.txt"), tools.gpt2().encode_ordinary, 50256)
    ]
    assert not list(tmp_path.glob("out.partial")), "the spooled input is gone"


def test_unknown_options_are_named(corpus, tmp_path):
    with pytest.raises(mr.ConfigError, match=r"tokeniser.*tokenizer"):
        mr.prepare_text(str(corpus), tmp_path / "out", tokeniser="gpt2")
    assert list(tmp_path.iterdir()) == []
