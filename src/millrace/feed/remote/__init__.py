"""Batches that workers on other machines make, through a queue."""
