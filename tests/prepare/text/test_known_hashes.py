"""The hashes that a part knows are those of a set, by the core and by its twin."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from millrace.native import core
from millrace.prepare.text.dedup import repeats
from millrace.prepare.text.dedup.repeats import HashSet, KnownHashes

KINDS = [HashSet, *([core.KnownHashes] if core else [])]

HASHES = st.one_of(
    st.sampled_from([bytes(16), bytes(15) + b"\1", b"\1" + bytes(15)]), st.binary(min_size=16, max_size=16)
)


@hypothesis.given(st.lists(st.lists(HASHES, max_size=20), max_size=6), st.sampled_from(KINDS))
def test_what_is_new_is_what_a_set_has_not(chunks, kind):
    found, known = KnownHashes(kind), set()
    for chunk in chunks:
        expected = [hash_ not in known and not known.add(hash_) for hash_ in chunk]
        assert found.are_new(b"".join(chunk)) == bytes(expected)


def test_many_are_kept():
    hashes = np.random.default_rng(0).integers(0, 256, (100_000, 16), np.uint8)
    hashes[:, :8] &= 1  # many begin alike
    chunk = hashes.tobytes()
    found, again = KnownHashes(), KnownHashes()
    for start in range(0, len(chunk), 999 * 16):
        assert all(found.are_new(chunk[start : start + 999 * 16]))
    assert not any(found.are_new(hashes[::-1].tobytes()))
    assert again.are_new(chunk + chunk) == bytes([1]) * len(hashes) + bytes(len(hashes))


@pytest.mark.parametrize("kind", KINDS)
def test_from_some_number_on_nothing_is_kept(monkeypatch, kind):
    monkeypatch.setattr(repeats, "MAX_HASHES", 3)
    found = KnownHashes(kind)
    one, two = b"".join(bytes([k]) * 16 for k in range(3)), bytes([9]) * 16
    assert found.are_new(one) == bytes([1, 1, 1])
    assert found.are_new(one + two + two) == bytes([1] * 5)


@pytest.mark.needs_core
def test_the_core_refuses_half_a_key():
    with pytest.raises(ValueError, match="16 bytes"):
        core.KnownHashes().add(bytes(17))
