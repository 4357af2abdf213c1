"""Spans -> filled buffers."""
