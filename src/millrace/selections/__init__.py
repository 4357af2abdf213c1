"""Splits of views: at random, by group, by label, by fold."""
