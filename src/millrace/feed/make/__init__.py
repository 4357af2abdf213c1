"""Ways to make a batch from its number. Each class here is a ``Make`` of ``feed/stages.py``."""
