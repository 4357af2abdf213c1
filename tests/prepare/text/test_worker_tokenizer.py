"""Workers load the tokenizer of a run from its outline, and read its file only where they need more."""

import pytest

from millrace.prepare.text.tokens import worker_tokenizer as loaded
from millrace.text.load import gpt2


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(loaded, "_cache", {})
    monkeypatch.setattr(loaded.gc, "freeze", lambda: None)
    made = gpt2()
    (tmp_path / "vocabulary.json").write_bytes(made.to_file())
    return made


@pytest.mark.needs_core
def test_a_worker_takes_nothing_apart_to_encode(tmp_path, tokenizer):
    what = (str(tmp_path), tokenizer.describe(), loaded.write_outline(tmp_path, tokenizer))
    loaded.load_early(what)
    again = loaded.tokenizer_of(*what[:2], tokenizer.encoder)
    documents = [b"some text", "und größer, ꙮ".encode()]
    assert [a.tolist() for a in again.encode_documents(documents)] == [
        a.tolist() for a in tokenizer.encode_documents(documents)
    ]
    assert again.encoder == "millrace"
    assert "_body" not in again.__dict__
    assert "_backend" not in again.__dict__


def test_what_has_no_outline_is_loaded_from_its_file(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("MILLRACE_BPE", "tiktoken")
    tokenizer = gpt2()
    assert loaded.write_outline(tmp_path, tokenizer) is None
    loaded.load_early((str(tmp_path), tokenizer.describe(), None))
    again = loaded.tokenizer_of(str(tmp_path), tokenizer.describe(), tokenizer.encoder)
    assert again.encoder == "tiktoken"
    assert again.encode_documents([b"some text"])[0].tolist() == tokenizer.encode_documents([b"some text"])[0].tolist()
