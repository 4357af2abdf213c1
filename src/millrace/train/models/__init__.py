"""The models of the trainer. Each takes a batch and returns the mean loss over its targets.

Shape suffixes, here and in every file of this folder: B samples, L rows or tokens of a sample, H rows of a horizon, D the
model's width, N heads, K width of a head, V vocabulary, F features, T targets, S static features.
"""
