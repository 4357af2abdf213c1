"""What the counters of a run mean: an interval of them in, a verdict out."""
