"""Which documents or lines repeat others."""
