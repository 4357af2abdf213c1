"""Queues of tickets between a trainer and workers on other machines. A queue speeds a run up; no run depends on it."""
