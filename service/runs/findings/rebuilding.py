"""Read the findings of runs anew from their steps, outside the writer, and store them if no step changed meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from sqlalchemy.orm import Session

from foreshock_service.platform.context import ServiceContext
from foreshock_service.runs.findings import repository
from foreshock_service.runs.findings.repository import Due
from foreshock_service.runs.findings.schemas import FindingOfSteps, FindingSource
from foreshock_service.runs.findings.service import replace_findings
from foreshock_service.runs.runs.service import lock_run_for_background

Sources = Mapping[FindingSource, Callable[[Session, str], Sequence[FindingOfSteps]]]
"""What reads the findings of a run, by source. `service/app.py` names them: some are above this part."""

_AT_ONCE = 100
_logger = logging.getLogger(__name__)


def rebuild_due_findings(context: ServiceContext, sources: Sources) -> int:
    """Read the findings anew that are due, and return the number of runs × sources that are done. For the sweeper."""
    with context.database.read() as session:
        due = repository.due(session, _AT_ONCE)
    return sum(_try_to_rebuild(context, sources, each) for each in due)


def _try_to_rebuild(context: ServiceContext, sources: Sources, due: Due) -> bool:
    """Rebuild one source of a run; False if its steps changed meanwhile, or after an error, which is logged."""
    try:
        with context.database.read() as session:
            found = sources[due.source](session, due.run_id)
        return context.database.write(partial(_store, due, found))
    except Exception:
        _logger.exception("the findings of run %s (%s) could not be read; they are retried", due.run_id, due.source)
        return False


def _store(due: Due, found: Sequence[FindingOfSteps], session: Session) -> bool:
    if lock_run_for_background(session, due.run_id) is None or not repository.settle(session, due):
        return False
    replace_findings(session, due.run_id, due.source, found)
    return True
