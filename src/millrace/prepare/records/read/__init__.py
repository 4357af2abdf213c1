"""Sources -> parts."""
