"""Where a batch lies when the loop gets it. Each class here is a ``Place`` of ``feed/stages.py``."""
