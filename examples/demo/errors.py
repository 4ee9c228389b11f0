"""What ends the demo with a message instead of a traceback."""

from __future__ import annotations


class DemoError(RuntimeError):
    """Something the demo needs did not come about; the message says what and where to look."""
