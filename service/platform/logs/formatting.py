"""Lines of the log, as text or JSON: one event a line, control characters escaped, secrets masked.

What clients send (paths, headers, keys of runs, bodies in error messages) cannot begin a line, move a terminal's
cursor or hide text: every control and direction character is written as an escape.
"""

from __future__ import annotations

import json
import logging
import os
import re
from datetime import UTC, datetime
from typing import Any

from foreshock.errors import ConfigurationError
from foreshock_service.platform.logs.request_ids import current_request_id
from foreshock_service.platform.settings import load_settings

# C0 and C1 control characters, line separators, and characters that change the direction of text.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SECRETS = re.compile(
    r"fsk_[A-Za-z0-9_-]{8,}|(?<=[Bb]earer )\S+|(?<=foreshock_session=)[^;\s]+|(?<=://)[^/\s@]*:[^/\s@]*(?=@)"
)
_SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PGPASSWORD")
_MASK = "********"


class _Formatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__()
        self._known = sorted(_known_secrets(), key=len, reverse=True)

    def safe(self, text: str) -> str:
        """Return the text with secrets masked and unsafe characters escaped."""
        for secret in self._known:
            text = text.replace(secret, _MASK)
        return _UNSAFE.sub(_escape, _SECRETS.sub(_MASK, text))

    def lines_of_exception(self, record: logging.LogRecord) -> list[str]:
        """Return the traceback, safe, line by line."""
        if not record.exc_info or record.exc_info[0] is None:
            return []
        return [self.safe(line) for line in self.formatException(record.exc_info).split("\n")]

    def time(self, record: logging.LogRecord) -> str:
        """Return the record's time, as RFC 3339 in UTC."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(_Formatter):
    """`2026-01-31T12:00:00.000Z INFO  logger [request id] message`; the lines of a traceback are indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        request_id = current_request_id()
        name = f"{record.name} [{self.safe(request_id)}]" if request_id else record.name
        first = f"{self.time(record)} {record.levelname:<8} {name} {self.safe(record.getMessage())}"
        return "\n    ".join([first, *self.lines_of_exception(record)])


class JsonFormatter(_Formatter):
    """One JSON object a line: time, level, logger, message, process, and request_id, fields, exception if there are."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line: dict[str, Any] = {
            "time": self.time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self.safe(record.getMessage()),
            "process": record.process,
        }
        if (request_id := current_request_id()) is not None:
            line["request_id"] = self.safe(request_id)
        for name, value in getattr(record, "fields", {}).items():
            line[name] = self.safe(value) if isinstance(value, str) else value
        if exception := self.lines_of_exception(record):
            line["exception"] = "\n".join(exception)
        return json.dumps(line, ensure_ascii=False)


def log_configuration(log_format: str, level: str) -> dict[str, Any]:
    """Return the configuration for `logging.config.dictConfig`, in each process of the service."""
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": f"{formatter.__module__}.{formatter.__qualname__}"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "root": {"handlers": ["stderr"], "level": level.upper()},
        # These log addresses of requests, which can hold tokens.
        "loggers": {name: {"level": "WARNING"} for name in ("httpx", "httpcore", "urllib3")}
        | {"alembic": {"level": "WARNING"}, "uvicorn.access": {"level": "WARNING"}},
    }


def _known_secrets() -> set[str]:
    """Return the secrets of this process's settings and environment."""
    found = {os.environ.get(name, "") for name in _SECRET_VARIABLES}
    try:
        settings = load_settings()
    except ConfigurationError:
        return {secret for secret in found if secret}
    found |= settings.secrets()
    # Shorter ones would mask ordinary words.
    return {secret for secret in found if len(secret) >= 6}


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
