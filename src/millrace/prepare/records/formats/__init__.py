"""One file per format: what a file holds, how it is cut, and how it is read."""
