"""The route of small uploads, ahead of the declared one (`endpoints.py`), with the same answers.

Matching every route, solving the dependencies of one and serialising its answer takes a millisecond of CPU time for
each small step. This route takes uploads by a run's id, with valid parameters, a small plain body and a key, or no key.
"""

from __future__ import annotations

from typing import NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foreshock.statistics_shards import MEDIA_TYPE as STATISTICS_MEDIA_TYPE
from foreshock_service.platform.body_limits import PARQUET_MEDIA_TYPE
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.identifiers import is_identifier
from foreshock_service.platform.keys.service import Scope as KeyScope
from foreshock_service.platform.plain_routes import PlainRoute, credentials_of, parameters_of, whole_number
from foreshock_service.platform.schemas import LARGEST_STEP
from foreshock_service.platform.security import Principal, admit, check_scope, principal_of_key
from foreshock_service.platform.uploads import is_small, received_upload
from foreshock_service.runs.ingest import service
from foreshock_service.runs.ingest.schemas import ShardAddress

_KINDS = ("rollouts", "statistics")


class AskedUpload(NamedTuple):
    """An upload: the secret of its key, and what it uploads."""

    secret: str | None
    address: ShardAddress

    @property
    def media_type(self) -> str:
        """The type of its body."""
        return STATISTICS_MEDIA_TYPE if self.address.as_statistics else PARQUET_MEDIA_TYPE


class UploadRoute(PlainRoute[AskedUpload]):
    """Route of the small uploads of one application."""

    method = "PUT"
    path = "/v1/runs/{run}/steps/{step}/rollouts/{shard}"
    ending = ""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    def asked_of(self, scope: Scope) -> AskedUpload | None:
        """Return the upload; None if the declared route must answer it."""
        return upload_of(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Store the upload. Raises ProblemError and RolloutsError."""
        asked = self.asked(scope)
        request, context = Request(scope, receive), self._context
        principal, step_has_shards = await run_in_threadpool(_check, context, request, asked)
        async with received_upload(request, context, asked.media_type) as upload:
            receipt = await context.uploads.run(
                service.ingest_shard, context, principal, asked.address, upload, step_has_shards=step_has_shards
            )
        status = 200 if receipt.status == "duplicate" else 201
        response = Response(receipt.model_dump_json(), status, media_type="application/json")
        await response(scope, receive, send)


def _check(context: ServiceContext, request: Request, asked: AskedUpload) -> tuple[Principal, bool]:
    """Return the principal, and whether the step has shards; both are read in one session."""
    with context.database.read() as session:
        principal = admit(context, request, principal_of_key(session, asked.secret))
        check_scope(principal, KeyScope.INGEST)
        return principal, service.check_address_in(session, context, principal, asked.address)


def upload_of(scope: Scope) -> AskedUpload | None:
    """Return the upload of a request; None if the declared route must answer it."""
    parts = scope["path"].split("/")
    if len(parts) != 8 or parts[1:3] != ["v1", "runs"] or parts[4] != "steps" or parts[6] not in _KINDS:
        return None
    values, credentials = parameters_of(scope, ("attempt", "shards")), credentials_of(scope)
    if values is None or credentials is None or not is_identifier("run", parts[3]):
        return None
    step, shard = (whole_number(parts[place], 0, LARGEST_STEP) for place in (5, 7))
    attempt, shards = (whole_number(values.get(name, "1"), 1, LARGEST_STEP) for name in ("attempt", "shards"))
    if step is None or shard is None or attempt is None or shards is None:
        return None
    address = ShardAddress(parts[3], attempt, step, shard, shards, as_statistics=parts[6] == "statistics")
    asked = AskedUpload(credentials.secret, address)
    return asked if is_small(Request(scope), asked.media_type) else None
