"""The audit: one line in the log for each change of advice, alerts, runs and keys by a person or a key.

Callers pass names and states, never secrets or rollouts.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy.orm import Session

from foreshock_service.platform import logs, security
from foreshock_service.platform.database.session import after_commit

_logger = logging.getLogger("foreshock.audit")


def record(
    session: Session,
    author: security.Principal,
    action: str,
    subject: str,
    *,
    project: str | None = None,
    run_id: str | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Log the change once it is committed: `action` is `noun.verb`, `subject` the id of what changed.

    The line has the fields key, action, object, project, run, before and after; the last two are JSON in a string.
    """
    fields = {"key": author.actor, "action": action, "object": subject, "project": project, "run": run_id}
    for name, value in (("before", before), ("after", after)):
        fields[name] = None if value is None else json.dumps(value, ensure_ascii=False)
    known = {name: value for name, value in fields.items() if value is not None}
    message = " ".join(f"{name}={value}" for name, value in known.items())
    after_commit(session, lambda: _logger.info("%s", message, extra=known))


@contextmanager
def on_stderr(log_format: str) -> Iterator[None]:
    """Print the lines during a `with` block, in a process that does not log: a command, or a service that starts."""
    handler = logging.StreamHandler()
    handler.setFormatter(logs.line_formatter(log_format))
    level = _logger.level
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        _logger.removeHandler(handler)
        _logger.setLevel(level)
