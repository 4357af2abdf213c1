"""``tier="device"``: the rows of a view in the memory of a GPU, and batches gathered there."""
