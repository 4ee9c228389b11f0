"""Points at which a process ends itself by SIGKILL, as a power cut would. Only the faults benchmark knows them.

A point is a named function of the product, which `arm` wraps in this process: before a call, after it, inside the
transaction of a unit of work, or before a statement of SQL that it executes.

    BENCHMARK_KILL_AT=ingest.after-commit:3

ends the process after the third call (without a number: the first), or before the third statement.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from sqlalchemy import Engine, event

VARIABLE = "BENCHMARK_KILL_AT"


class KillPoint(NamedTuple):
    """A function by its module and its name, and when it kills.

    `inside`: after the work that is its first argument. `statement`: before a statement of SQL during a call.
    """

    module: str
    name: str
    when: Literal["before", "after", "inside", "statement"]


_INGEST, _STEPS = "foreshock_service.runs.ingest", "foreshock_service.runs.shards"
_STORE, _DATABASE = "foreshock_service.platform.store.tokens", "foreshock_service.platform.database.session"
_SCORES, _FILES = "foreshock_service.replay.results.publishing", "foreshock_service.replay.results.scores"
_SPOOL, _SENDER = "foreshock.client.spool", "foreshock.client.sender"

ADVANCE = "advance.statement"
SERVICE_POINTS = {
    # In the order of an upload.
    "store.file-written": KillPoint(_STORE, "LocalTokenStore.publish", "before"),
    "store.file-synced": KillPoint(_STORE, "_sync", "after"),
    "store.file-renamed": KillPoint(_STORE, "LocalTokenStore.publish", "after"),
    "ingest.before-transaction": KillPoint(_INGEST, "_decode_to", "after"),
    "ingest.before-commit": KillPoint(_INGEST, "commit_shard", "after"),
    "ingest.after-commit": KillPoint(_INGEST, "ingest_shard", "after"),
    "steps.before-fold": KillPoint(_STEPS, "bring_up_to_date", "before"),
    "steps.folded": KillPoint(_STEPS, "_fold", "after"),
    "steps.before-commit": KillPoint(_STEPS, "_store", "after"),
    "scores.before-transaction": KillPoint(_FILES, "_check", "after"),
    "scores.before-commit": KillPoint(_SCORES, "publish_job", "after"),
    "scores.published": KillPoint("foreshock_service.replay.attribution.service", "try_to_compute", "before"),
    ADVANCE: KillPoint("foreshock_service.watch.advance", "Advancing.advance", "statement"),
    # Any transaction of the service.
    "database.before-commit": KillPoint(_DATABASE, "Database.write", "inside"),
    "database.after-commit": KillPoint(_DATABASE, "_run_callbacks", "before"),
}
CLIENT_POINTS = {
    # In the order of a delivery.
    "client.item-written": KillPoint(_SPOOL, "write_whole", "after"),
    "client.spooled": KillPoint(_SPOOL, "Spool.append", "after"),
    "client.synced": KillPoint(_SPOOL, "Spool.sync", "after"),
    "client.before-send": KillPoint(_SENDER, "Sender._request", "before"),
    "client.answered": KillPoint(_SENDER, "Sender._delivered", "before"),
    "client.removed": KillPoint(_SPOOL, "Spool.remove", "after"),
}
KILL_POINTS = SERVICE_POINTS | CLIENT_POINTS


def arm(text: str) -> None:
    """Wrap the function of a point, such as `ingest.after-commit:3`, in this process; an empty text does nothing."""
    if not text:
        return
    name, _, calls = text.partition(":")
    owner, attribute = found(KILL_POINTS[name])
    setattr(owner, attribute, _wrapped(getattr(owner, attribute), KILL_POINTS[name].when, int(calls or "1")))


def found(point: KillPoint) -> tuple[Any, str]:
    """Return the module or class that holds the function of a point, and the function's name in it."""
    owner: Any = importlib.import_module(point.module)
    *classes, attribute = point.name.split(".")
    for each in classes:
        owner = getattr(owner, each)
    if not callable(getattr(owner, attribute, None)):
        raise LookupError(f"{point.module} has no function {point.name}: the kill point names one that was renamed")
    return owner, attribute


def _wrapped(function: Callable[..., Any], when: str, calls: int) -> Callable[..., Any]:
    lock = threading.Lock()
    left = calls

    def count() -> None:
        nonlocal left
        with lock:
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if when == "statement":
        return _counting_statements(function, count)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if when == "before":
            count()
        if when == "inside":
            owner, work, *others = arguments

            def noted(session: Any) -> Any:
                result = work(session)
                count()
                return result

            return function(owner, noted, *others, **named)
        result = function(*arguments, **named)
        if when == "after":
            count()
        return result

    return call


def _counting_statements(function: Callable[..., Any], count: Callable[[], None]) -> Callable[..., Any]:
    """Return the function; `count` is called before each statement of the process during a call.

    Of any thread: those of SQLite's writer are of another one.
    """
    underway: list[object] = []

    def before_statement(*_: Any) -> None:
        if underway:
            count()

    event.listen(Engine, "before_cursor_execute", before_statement)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        token = object()
        underway.append(token)
        try:
            return function(*arguments, **named)
        finally:
            underway.remove(token)

    return call
