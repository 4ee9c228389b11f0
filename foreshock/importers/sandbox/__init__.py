"""Read pickles of training frameworks in a process that can do nothing else; see `reader.py`."""

__all__ = ["METADATA_KEY"]

METADATA_KEY = b"foreshock.dump"
"""The key of a dump's own numbers, as JSON, in the schema of the table that the child writes."""
