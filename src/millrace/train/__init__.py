"""The reference trainer: one command from a store to a model, exact through kills and other world sizes."""
