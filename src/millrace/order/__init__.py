"""Position -> sample: pure functions, so that state is one integer."""
