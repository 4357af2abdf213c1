"""The journal of an unfinished store: its lines, and that its owner can add to it."""

import os
import stat

from millrace.store.journal import Header, Journal
from millrace.store.shard import ShardEntry

ENTRY = ShardEntry("train", 0, 1, (3,), ("0" * 16,))


def test_a_journal_is_read_as_it_was_written_and_its_owner_may_add_lines(tmp_path):
    journal = Journal(tmp_path)
    assert journal.read() == (None, [], True)
    before = os.umask(0o077)  # the mode does not depend on it
    try:
        journal.write(Header("plan", None), [ENTRY])
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(journal.path).st_mode) == 0o644
    journal.note(ENTRY)
    assert journal.read() == (Header("plan", None), [ENTRY, ENTRY], True)
    with open(journal.path, "ab") as file:
        file.write(b'{"split": "tr')  # a kill cut it off
    assert journal.read() == (Header("plan", None), [ENTRY, ENTRY], False)
