"""How much disk a preparation of text will need."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.prepare.text.options import ReadOptions, ShardOptions
from millrace.prepare.text.read.sources import Source
from millrace.text.tokenizer import Tokenizer

IN_HAND = 4  # shards that are written while their parts are still there
EXPANSION = 3  # of a compressed file, about
TOKEN_BYTES = 3  # of text for a token of a vocabulary, at least on most corpora
LINE_BYTES = 50  # of text in a line, about; 16 bytes of hash are kept of each, in three places


def estimate(
    sources: Sequence[Source], tokenizer: Tokenizer, options: ReadOptions, cutting: ShardOptions
) -> tuple[int, int]:
    """Bytes of disk that are likely needed, and bytes that are needed for certain."""
    text = sum(source.size * (EXPANSION if source.compression else 1) for source in sources)
    each = 1 if tokenizer.kind in ("bytes", "char") else TOKEN_BYTES
    size = tokenizer.dtype.itemsize + (options.mask_field is not None)
    likely = text * size // each
    # Some tokens lie on disk twice: those of shards in hand, and of shards made of many parts.
    likely += min(likely, IN_HAND * cutting.shard_tokens * size + int(likely * (cutting.val + cutting.test)))
    if options.dedup_unit == "line":
        likely += text // LINE_BYTES * 16 * 3
    # Certain are only bytes that nothing can drop: whole files, neither cleaned, compared nor filtered.
    keeps_all = not options.normalize and options.dedup == "none" and options.filter is None and options.min_chars <= 1
    if tokenizer.kind != "bytes" or not keeps_all or options.on_error == "skip":
        return likely, 0
    kept = (source for source in sources if source.document == "file" and not source.is_page)
    whole = sum(source.size for source in kept if source.compression is None)
    return likely, whole * size
