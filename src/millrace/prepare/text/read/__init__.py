"""Files -> documents: found, opened, framed, checked."""
