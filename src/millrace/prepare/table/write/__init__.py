"""Parts -> shards: rows filled, scaled and written."""
