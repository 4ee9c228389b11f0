"""The route of a rollout's tokens by the run's id, ahead of the declared one (`endpoints.py`): the same answers."""

from __future__ import annotations

import re
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock_service.platform.columnar.formats import FormatName
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.identifiers import is_identifier
from foreshock_service.platform.keys.service import Scope as KeyScope
from foreshock_service.platform.plain_routes import PlainRoute, credentials_of, parameters_of, whole_number
from foreshock_service.platform.schemas import LARGEST_STEP
from foreshock_service.platform.security import admit, check_scope, principal_of_secret
from foreshock_service.runs.rollouts.answers import answer_tokens
from foreshock_service.runs.rollouts.tokens import LARGEST_POSITION, LONGEST_SAMPLE_ID, TokenQuery

_PARAMETERS = ("sample_id", "comparison", "attempt", "from_position", "to_position", "format")
_COMPARISON = re.compile(r"[\w./@-]{1,200}", re.ASCII)
_FORMATS: dict[str | None, FormatName | None] = {None: None, "json": "json", "csv": "csv", "parquet": "parquet"}


class AskedRollout(NamedTuple):
    """A request for the tokens of a rollout."""

    secret: str | None
    query: TokenQuery
    format_name: FormatName | None


class RolloutTokensRoute(PlainRoute[AskedRollout]):
    """Route of one rollout's tokens."""

    path = "/v1/runs/{run}/steps/{step}/tokens"
    ending = "/tokens"

    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    def asked_of(self, scope: Scope) -> AskedRollout | None:
        """Return the request; None if it is not by a run's id or has no `sample_id`."""
        parts = scope["path"].split("/")
        if len(parts) != 7 or parts[1:3] != ["v1", "runs"] or parts[4] != "steps" or not is_identifier("run", parts[3]):
            return None
        step = whole_number(parts[5], 0, LARGEST_STEP)
        values = parameters_of(scope, _PARAMETERS)
        credentials = credentials_of(scope)
        if step is None or values is None or "sample_id" not in values or credentials is None:
            return None
        comparison = values.get("comparison", TRAINER_ROLLOUT)
        first = whole_number(values.get("from_position", "0"), 0, LARGEST_POSITION)
        last = whole_number(values.get("to_position", str(LARGEST_POSITION)), 0, LARGEST_POSITION)
        attempt = whole_number(values.get("attempt", "1"), 1, LARGEST_STEP)
        if (
            first is None
            or last is None
            or attempt is None
            or len(values["sample_id"]) > LONGEST_SAMPLE_ID
            or not _COMPARISON.fullmatch(comparison)
            or values.get("format") not in _FORMATS
        ):
            return None
        query = TokenQuery(
            parts[3], step, attempt if "attempt" in values else None, comparison, 1, values["sample_id"], first, last
        )
        return AskedRollout(credentials.secret, query, _FORMATS[values.get("format")])

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request. Raises ProblemError."""
        response = await run_in_threadpool(self._answer, Request(scope), self.asked(scope))
        await response(scope, receive, send)

    def _answer(self, request: Request, asked: AskedRollout) -> Response:
        principal = admit(self._context, request, principal_of_secret(self._context, asked.secret))
        check_scope(principal, KeyScope.READ)
        return answer_tokens(self._context, request, principal, asked.query, asked.format_name)
