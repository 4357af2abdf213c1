"""Scaling: statistics fitted in bounded memory, kept as plain numbers, applied to rows and undone on predictions."""
