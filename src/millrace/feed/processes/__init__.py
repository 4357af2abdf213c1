"""Worker processes of a feed: started here, given tickets, watched, and their batches read from shared memory."""
