"""One bad run harms no other: an error of a run is rolled back alone, logged, and shown on the run's own page."""

import logging
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from foreshock_service.platform.context import EventBus
from foreshock_service.platform.database.session import Database
from foreshock_service.runs.events import RunFailed

_logger = logging.getLogger(__name__)


class OfRun(Protocol):
    """An event of a run."""

    @property
    def run_id(self) -> str: ...


Event = TypeVar("Event", bound=OfRun)


def isolated(events: EventBus, handler: Callable[[Session, Event], object]) -> Callable[[Session, Event], None]:
    """Return a handler of events whose error does not undo what the publisher stores, such as an upload.

    Errors of the database itself are raised: they end the transaction, or it is repeated.
    """

    def handle(session: Session, event: Event) -> None:
        try:
            with session.begin_nested():
                handler(session, event)
        except SQLAlchemyError:
            raise
        except Exception as error:
            _logger.exception("run %s could not be judged after %s", event.run_id, type(event).__name__)
            events.publish(session, RunFailed(event.run_id, error))

    return handle


def for_each_run(
    database: Database, events: EventBus, run_ids: Iterable[str], work: Callable[[str], int | bool]
) -> int:
    """Work on one run after the other, and return the sum of the results; the error of one run stops no other."""
    done = 0
    for run_id in run_ids:
        try:
            done += work(run_id)
        except SQLAlchemyError:
            raise
        except Exception as error:
            _logger.exception("the background work on run %s failed", run_id)
            failed = RunFailed(run_id, error)
            database.write(lambda session, failed=failed: events.publish(session, failed))  # type: ignore[misc]
    return done
