"""Between the passes: rows in order of time, cuts, statistics."""
