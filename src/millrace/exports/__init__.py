"""A store, or a part of it, written in formats of others."""
