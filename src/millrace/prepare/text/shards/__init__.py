"""Parts -> shards: splits, columns, and the task that writes one shard."""
