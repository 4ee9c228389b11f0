"""Logging that cannot flood a trainer's log: each kind of message is logged once, until it is forgotten."""

from __future__ import annotations

import logging

__all__ = ["LogOnce"]


class LogOnce:
    """A logger that logs one message per key."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._seen: set[str] = set()

    def warning(self, key: str, message: str) -> None:
        """Log `message` unless `key` was used before."""
        if key not in self._seen:
            self._seen.add(key)
            self._logger.warning("%s", message)

    def exception(self, key: str, message: str, error: BaseException) -> None:
        """Log `message` with the error's traceback unless `key` was used before."""
        if key not in self._seen:
            self._seen.add(key)
            self._logger.error("%s", message, exc_info=error)

    def info(self, message: str) -> None:
        """Log `message` every time."""
        self._logger.info("%s", message)

    def forget(self, key: str) -> None:
        """Log the next message of `key` again."""
        self._seen.discard(key)
