"""The route of polls of a run's newest alerts by the run's id, ahead of the declared one: the same answers."""

from __future__ import annotations

from typing import NamedTuple, get_args

from starlette.responses import Response
from starlette.types import Scope

from foreshock_service.platform.pagination import DEFAULT_LIMIT, LARGEST_LIMIT
from foreshock_service.platform.plain_routes import parameters_of, whole_number
from foreshock_service.platform.security import Principal
from foreshock_service.watch.alerts.polling import answer_alert_poll
from foreshock_service.watch.alerts.schemas import AlertState
from foreshock_service.watch.alerts.service import PageKey
from foreshock_service.watch.long_polls.poll_route import PollRoute, run_polled, seconds_of

_END = "/alerts"
_STATES: dict[str, AlertState] = {state: state for state in get_args(AlertState)}


class AlertPoll(NamedTuple):
    """One request for the newest alerts of a run."""

    page: PageKey
    wait: float
    if_none_match: str | None


class AlertPollRoute(PollRoute[AlertPoll]):
    """Route of the polls of alerts: of any state, or of one."""

    path = f"/v1/runs/{{run}}{_END}"
    ending = _END

    def asked_of(self, scope: Scope) -> tuple[str | None, AlertPoll] | None:
        """Return the secret and the poll of a request; None if the declared route must answer it."""
        polled = run_polled(scope, _END)
        values = parameters_of(scope, ("state", "limit", "wait"))
        if polled is None or values is None:
            return None
        run, secret, if_none_match = polled
        wait, limit = seconds_of(values), whole_number(values.get("limit", str(DEFAULT_LIMIT)), 1, LARGEST_LIMIT)
        if wait is None or limit is None or values.get("state", "open") not in _STATES:
            return None
        states = (_STATES[values["state"]],) if "state" in values else ()
        return secret, AlertPoll(PageKey(run, states, None, limit), wait, if_none_match)

    async def answer(self, principal: Principal, poll: AlertPoll) -> Response:
        """Return the page, or 304."""
        return await answer_alert_poll(self._polls, principal, *poll)
