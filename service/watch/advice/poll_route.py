"""The route of polling trainers, ahead of the declared one (`endpoints.py`): the same answers for a quarter of the CPU.

A thousand trainers that a change wakes poll again at once. This route takes polls by a run's id with valid parameters
and a key, or no key.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from foreshock_service.platform.plain_routes import parameters_of, whole_number
from foreshock_service.platform.schemas import LARGEST_STEP
from foreshock_service.platform.security import Principal
from foreshock_service.watch.advice.polling import Poll, answer_poll
from foreshock_service.watch.long_polls.poll_route import PollRoute, run_polled, seconds_of

_END = "/lr-advice"
_FLAGS = {"true": True, "false": False}


class AdvicePollRoute(PollRoute[Poll]):
    """Route of the polls of the advice."""

    path = f"/v1/runs/{{run}}{_END}"
    ending = _END

    def asked_of(self, scope: Scope) -> tuple[str | None, Poll] | None:
        """Return the secret and the poll of a request; None if the declared route must answer it."""
        return poll_of(scope)

    async def answer(self, principal: Principal, poll: Poll) -> Response:
        """Return the advice, or 304."""
        return await answer_poll(self._context, self._polls, principal, poll)


def poll_of(scope: Scope) -> tuple[str | None, Poll] | None:
    """Return the secret and the poll of a request; None if the declared route must answer it."""
    polled = run_polled(scope, _END)
    if polled is None:
        return None
    run, secret, if_none_match = polled
    values = parameters_of(scope, ("step", "wait", "follow"))
    if values is None:
        return None
    wait, follow = seconds_of(values), _FLAGS.get(values.get("follow", "false"))
    step = whole_number(values["step"], 0, LARGEST_STEP) if "step" in values else None
    if wait is None or follow is None or (step is None and "step" in values):
        return None
    return secret, Poll(run, step, wait, follow, if_none_match)
