"""Progress on stderr: a bar if it is a terminal, else a line every 5 s."""

from __future__ import annotations

import sys
import time

__all__ = ["Progress"]

_WIDTH = 30
_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """A progress bar, `label ████░░░ 12/240`."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._terminal = sys.stderr.isatty()
        self._next = time.monotonic() + (0.0 if self._terminal else _SECONDS_BETWEEN_LINES)

    def show(self, done: int) -> None:
        """Show the progress, at most every 0.1 s (bar) or 5 s (lines)."""
        now = time.monotonic()
        if now < self._next and done < self._total:
            return
        self._next = now + (0.1 if self._terminal else _SECONDS_BETWEEN_LINES)
        if not self._terminal:
            print(f"{self._label}: {done}/{self._total}", file=sys.stderr, flush=True)
            return
        filled = round(_WIDTH * done / max(self._total, 1))
        drawn = "█" * filled + "░" * (_WIDTH - filled)
        end = "\n" if done >= self._total else ""
        print(f"\r{self._label} {drawn} {done}/{self._total}", end=end, file=sys.stderr, flush=True)
