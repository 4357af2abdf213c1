"""Text files -> token store: find, cut, read, clean, hash, tokenise, deduplicate, shard."""
