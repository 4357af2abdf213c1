"""Columns <-> disk: the format, its writer and reader, foreign layouts, and verification."""
