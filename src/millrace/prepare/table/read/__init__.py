"""Files -> parts: found, agreed on, decoded once."""
