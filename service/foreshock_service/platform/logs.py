"""Log lines of the service.

A line is one event, as text or JSON. What clients send (paths, headers, keys of runs, bodies in error messages) cannot
begin a line, move a terminal's cursor or hide text: control and direction characters are escaped, secrets are masked.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import MutableMapping
from functools import cache
from typing import Any

from sqlalchemy.exc import OperationalError
from structlog import contextvars, processors, stdlib

from foreshock import errors
from foreshock_service.platform.settings import load_settings

# C0 and C1 control characters, line separators, and characters that change the direction of text.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SECRETS = re.compile(
    r"fsk_[A-Za-z0-9_-]{8,}|(?<=[Bb]earer )\S+|(?<=foreshock_session=)[^;\s]+|(?<=://)[^/\s@]*:[^/\s@]*(?=@)"
)
_SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PGPASSWORD")
_MASK = "********"
REQUEST_FIELDS = ("method", "path", "status", "seconds", "client", "user_agent")
_AUDIT_FIELDS = ("key", "action", "object", "project", "run", "before", "after")

Event = MutableMapping[str, Any]


def current_request_id() -> str | None:
    found: str | None = contextvars.get_contextvars().get("request_id")
    return found


def log_configuration(log_format: str, level: str) -> dict[str, Any]:
    """Return the configuration for `logging.config.dictConfig`, in each process of the service."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": f"{__name__}.line_formatter", "log_format": log_format}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "root": {"handlers": ["stderr"], "level": level.upper()},
        # These log addresses of requests, which can hold tokens.
        "loggers": {name: {"level": "WARNING"} for name in ("httpx", "httpcore", "urllib3")}
        | {"alembic": {"level": "WARNING"}, "uvicorn": {"level": "WARNING"}},
    }


def line_formatter(log_format: str) -> logging.Formatter:
    """Return the formatter of text or JSON lines.

    JSON has time, level, logger, message and process; also request_id, the fields of a request or of a change, and
    exception if available.
    Text is `2026-01-31T12:00:00.000000Z INFO     logger [request id] message`; the lines of a traceback are indented.
    """
    return stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            contextvars.merge_contextvars,
            stdlib.add_log_level,
            stdlib.add_logger_name,
            stdlib.ExtraAdder((*REQUEST_FIELDS, *_AUDIT_FIELDS)),
            processors.TimeStamper(fmt="iso", utc=True, key="time"),
            _shorten_outage,
            processors.format_exc_info,
            processors.EventRenamer("message"),
        ],
        processors=[
            _add_process,
            stdlib.ProcessorFormatter.remove_processors_meta,
            _make_safe,
            processors.JSONRenderer(ensure_ascii=False) if log_format == "json" else _render_text,
        ],
    )


def _shorten_outage(_: Any, __: str, event: Event) -> Event:
    """Replace the traceback by the message if PostgreSQL does not answer: background tasks log it twice a second."""
    error = (event.get("exc_info") or (None, None))[1]
    if isinstance(error, OperationalError) and type(error.orig).__module__.startswith("psycopg"):
        return {**event, "exc_info": None, "exception": str(error.orig)}
    return event


def _add_process(_: Any, __: str, event: Event) -> Event:
    return {**event, "process": os.getpid()}


def _make_safe(_: Any, __: str, event: Event) -> Event:
    """Mask secrets and escape unsafe characters in every text of an event; a traceback keeps its lines."""
    for name, value in event.items():
        if name == "exception":
            event[name] = "\n".join(_safe(line) for line in str(value).split("\n"))
        elif isinstance(value, str):
            event[name] = _safe(value)
    return event


def _render_text(_: Any, __: str, event: Event) -> str:
    request_id = f" [{event['request_id']}]" if "request_id" in event else ""
    first = f"{event['time']} {event['level'].upper():<8} {event['logger']}{request_id} {event['message']}"
    return "\n    ".join([first, *event.get("exception", "").splitlines()])


def _safe(text: str) -> str:
    for secret in _known_secrets():
        text = text.replace(secret, _MASK)
    return _UNSAFE.sub(_escape, _SECRETS.sub(_MASK, text))


@cache
def _known_secrets() -> list[str]:
    """Return the secrets of this process's settings and environment, longest first."""
    found = {os.environ.get(name, "") for name in _SECRET_VARIABLES}
    try:
        found |= load_settings().secrets()
    except errors.ConfigurationError:
        return sorted(filter(None, found), key=len, reverse=True)
    # Shorter ones would mask ordinary words.
    return sorted((secret for secret in found if len(secret) >= 6), key=len, reverse=True)


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
