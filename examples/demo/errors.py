"""The error that ends the demo with a message instead of a traceback."""

from __future__ import annotations


class DemoError(RuntimeError):
    """A part of the demo failed; the message names it and its log."""
