"""Parts -> shards."""
