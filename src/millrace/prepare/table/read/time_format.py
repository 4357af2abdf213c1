"""Times that are written as text: parsed by ``--time-format``, or its guess where they are not ISO 8601."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from millrace.errors import ConfigError

FAST = frozenset("YmdHMSy")  # codes that Arrow reads and writes alike, without a locale or a zone
CLOCK = frozenset("HIMSpfzXcTR")  # codes of a time of day
DAYS = [
    *("%Y-%m-%d", "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y%m%d"),
    *("%d/%m/%y", "%m/%d/%y", "%d.%m.%y", "%d %b %Y", "%b %d, %Y", "%d-%b-%Y"),
]
CLOCKS = ["", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", "T%H:%M:%S", " %I:%M %p", " %I:%M:%S %p", " %H:%M:%S %z"]
MAX_GUESSED_FROM = 1000  # values


def codes(form: str) -> set[str]:
    return set(re.findall(r"%(.)", form.replace("%%", ""), re.DOTALL))


def check_format(form: str) -> None:
    """Refuses a format that ``strptime`` does not know, or that has no day."""
    example = datetime(2020, 12, 31, 23, 59, 58, 123456, UTC)
    try:
        datetime.strptime(example.strftime(form), form)
        is_format = bool(codes(form) & set("Ycxjy"))
    except (ValueError, UnicodeError, re.error):
        is_format = False
    if not is_format:
        raise ConfigError(
            f"--time-format {form!r}; expected a day in codes of strptime, such as %d/%m/%Y or '%Y%m%d %H:%M'"
        )


def time_type(form: str) -> Any:
    """The type of times in a format."""
    import pyarrow

    if not codes(form) & CLOCK:
        return pyarrow.date32()
    return pyarrow.timestamp("us" if "f" in codes(form) else "s", "UTC" if "z" in codes(form) else None)


def parse_times(texts: Any, form: str) -> Any:
    """Texts as times, null where one is in another format.

    Arrow is fast and lax: it takes 31 February. Where its time does not give the same text again, Python reads the text.
    """
    import pyarrow
    from pyarrow import compute

    kind = time_type(form)
    found = pyarrow.nulls(len(texts), kind)
    if codes(form) <= FAST:
        read = compute.strptime(texts, format=form, unit="s", error_is_null=True)
        is_same = compute.fill_null(compute.equal(compute.strftime(read, form), texts), False)
        found = compute.if_else(is_same, read, pyarrow.scalar(None, read.type)).cast(kind)
    rest = compute.unique(texts.filter(compute.is_null(found))).drop_null()
    if not len(rest):
        return found
    read = pyarrow.array([_parsed(text, form) for text in rest.to_pylist()], kind)
    return compute.coalesce(found, read.take(compute.index_in(texts, rest)))


def _parsed(text: str, form: str) -> Any:
    try:
        found = datetime.strptime(text, form)
    except (ValueError, OverflowError):
        return None
    return found.date() if not codes(form) & CLOCK else found


def check_format_fits(path: str, column: str, texts: Sequence[str | None], form: str) -> None:
    """Refuses a format that fits none of the first times of a file: it is wrong, or meant for other files."""
    import pyarrow

    some = [text for text in texts if text][:MAX_GUESSED_FROM]
    if not some or parse_times(pyarrow.array(some), form).null_count < len(some):
        return
    others = guess_formats(some)
    remedy = f"give --time-format {others[0]!r}" if others else "name another column, or their format"
    raise ConfigError(
        f"{path!r}: --time {column!r} holds {some[0][:80]!r}, and none of its first {len(some):,} times is in --time-format "
        f"{form!r}; {remedy}. If files differ, prepare those of one format and add the others with --append"
    )


def guess_formats(texts: Sequence[str]) -> list[str]:
    """The formats in which all of the texts are written."""
    some = list(dict.fromkeys(texts))[:MAX_GUESSED_FROM]
    forms = (day + clock for day, clock in itertools.product(DAYS, CLOCKS))
    return [form for form in forms if some and all(_parsed(text, form) is not None for text in some)]


def first_odd(texts: Sequence[str | None]) -> int | None:
    """The place of the first that is no ISO time, as CSV files are read."""
    import pyarrow

    for k, text in enumerate(texts):
        if text is None:
            continue
        try:
            pyarrow.scalar(text).cast(pyarrow.timestamp("ns"))
        except pyarrow.ArrowInvalid:
            return k
    return None
