"""One bad run harms no other: an error of a run is rolled back alone, logged, and shown on the run's own page.

Every loop over runs, and every handler that derives something from a run's stored state, goes through this file.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from foreshock_service.platform.context import EventBus, ServiceContext
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.problem import ProblemError, storage_problem
from foreshock_service.runs.events import RunFailed

_logger = logging.getLogger(__name__)


Found = TypeVar("Found")


def isolated(events: EventBus, handler: Callable[[Session, Any], object]) -> Callable[[Session, Any], None]:
    """Return a handler of events whose error does not undo what the publisher stores, such as an upload."""

    def handle(session: Session, event: Any) -> None:
        with isolated_part(session, events, event.run_id, "judge this run"):
            handler(session, event)

    return handle


@contextmanager
def isolated_part(session: Session, events: EventBus, run_id: str, work: str) -> Iterator[None]:
    """Undo only what the block has written if it raises; the run's page gets an alert, and the transaction goes on.

    `work` says what is tried. Errors of the database itself are raised: they end the transaction, or it is repeated.
    """
    try:
        with session.begin_nested():
            yield
    except SQLAlchemyError:
        raise
    except Exception as error:
        _logger.exception("run %s: the service could not %s", run_id, work)
        events.publish(session, RunFailed(run_id, error, work))


@dataclass(frozen=True, slots=True)
class RunIsolated:
    """A `with` block that an error ends alone: it is logged, the run's page gets an alert, and the caller goes on.

    `work` says what is tried. Errors of the database itself are raised. If the service is only busy or its store is
    away, there is no alert: the next round tries again.
    """

    database: Database
    events: EventBus
    run_id: str
    work: str = "judge this run"

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or isinstance(error, SQLAlchemyError):
            return False
        problem = storage_problem(error) if isinstance(error, OSError) else error
        if isinstance(problem, ProblemError) and problem.status >= 500:
            _logger.warning("run %s: the service could not %s now: %s", self.run_id, self.work, error)
            return True
        _logger.error("run %s: the service could not %s", self.run_id, self.work, exc_info=error)
        failed = RunFailed(self.run_id, error, self.work)
        self.database.write(lambda session: self.events.publish(session, failed))
        return True


def read_runs(
    context: ServiceContext, run_ids: Sequence[str], read: Callable[[Sequence[str]], Found], work: str
) -> list[Found]:
    """Return what `read` finds of all runs together; if that fails, of each run alone, without those that fail.

    For requests that read, which never write: a job alerts of the runs that could not be read.
    """
    if not run_ids:
        return []
    try:
        return [read(run_ids)]
    except SQLAlchemyError:
        raise
    except Exception as error:
        if len(run_ids) == 1:
            _logger.exception("run %s: the service could not %s", run_ids[0], work)
            context.unreadable_runs.setdefault(run_ids[0], (work, error))
            return []
    return [found for run_id in run_ids for found in read_runs(context, [run_id], read, work)]


def alert_of_unreadable_runs(context: ServiceContext) -> int:
    """Open the alerts of the runs that requests could not read, and return their number."""
    found = tuple(context.unreadable_runs)
    for run_id in found:
        work, error = context.unreadable_runs.pop(run_id)
        failed = RunFailed(run_id, error, work)
        context.database.write(partial(context.events.publish, event=failed))
    return len(found)
