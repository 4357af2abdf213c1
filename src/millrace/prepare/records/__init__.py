"""Other formats -> records: events, images, rows with lists."""
