"""Composes store, view, order and gather into batches for a training loop."""
