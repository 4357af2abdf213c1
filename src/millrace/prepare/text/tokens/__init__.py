"""The vocabulary of a corpus, and its tokenizer in every worker."""
