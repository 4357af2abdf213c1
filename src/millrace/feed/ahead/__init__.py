"""Ways to keep batches ready in order. Each class here is an ``Ahead`` of ``feed/stages.py``."""
