"""Text <-> token ids: the tokenizers, how they are stored with a corpus, and how they are trained."""
