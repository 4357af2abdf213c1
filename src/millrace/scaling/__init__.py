"""Scaling: fitted in bounded memory, stored as plain numbers, applied to rows, undone on predictions."""
