"""Stores elsewhere: object storage, a cache of it on this machine, and copies between places."""
