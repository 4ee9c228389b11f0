"""The paths of failure, each executed: see `__main__.py`."""
