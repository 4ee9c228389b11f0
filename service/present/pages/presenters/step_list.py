"""A step of a run and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from foreshock_service.platform.pagination import encode_cursor
from foreshock_service.platform.problem import ProblemError
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.runs.steps.schemas import StepRead
from foreshock_service.runs.steps.service import list_steps

# The step before is searched this many steps back.
FURTHEST_BACK = 500


class StepNotFound(ProblemError):
    """The run has no rollouts of this step."""

    status = 404
    problem_type = "step-not-found"


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """An active step, and the steps before and after it."""

    step: StepRead
    earlier: int | None
    later: int | None


def neighbourhood(viewing: Viewing, run_id: str, step: int) -> Neighbourhood:
    """Return the step and its neighbours. Raises StepNotFound."""
    after = _steps_after(viewing, run_id, step - 1, 2)
    if not after or after[0].step != step:
        raise StepNotFound(f"the run has no rollouts of step {step}")
    before = [each.step for each in _steps_after(viewing, run_id, step - FURTHEST_BACK, FURTHEST_BACK)]
    earlier = [number for number in before if number < step]
    return Neighbourhood(after[0], earlier[-1] if earlier else None, after[1].step if len(after) > 1 else None)


def _steps_after(viewing: Viewing, run_id: str, step: int, limit: int) -> list[StepRead]:
    cursor = encode_cursor((step,)) if step >= 0 else None
    return list_steps(viewing.session, viewing.principal, run_id, None, cursor, limit).items
