"""Does any input crash the service, make it answer 5xx, grow without bound, or write elsewhere? See `__main__.py`."""
