"""HTTP: `/livez` says the process answers; `/readyz` says it can take an upload, and if not, why."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Response, status
from pydantic import BaseModel, Field

from service.platform.context import Context, ServiceContext
from service.platform.database.schema import current_revision, newest_revision

router = APIRouter(tags=["health"])


class Liveness(BaseModel):
    """The process answers."""

    status: str


class Readiness(BaseModel):
    """Each check's outcome: `ok`, or what is wrong or waited for."""

    ready: bool
    checks: dict[str, str]
    details: dict[str, str] = Field(description="`token_pass`: `compiled`, or numpy and why")


@router.get("/livez")
def livez() -> Liveness:
    """Whether the process answers; restart it where it does not."""
    return Liveness(status="alive")


@router.get("/readyz", responses={503: {"model": Readiness, "description": "Not ready; the checks say why"}})
def readyz(context: Context, response: Response) -> Readiness:
    """Whether the database is reachable and migrated, the token store is writable and the decoders have started."""
    checks = {
        "database": _outcome(context.database.ping),
        "migrations": _outcome(lambda: _check_migrated(context)),
        "token_store": _outcome(context.store.check_writable),
        "decoders": context.decoders.state,
    }
    ready = all(outcome == "ok" for outcome in checks.values())
    if not ready:
        response.status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    return Readiness(ready=ready, checks=checks, details={"token_pass": context.decoders.token_pass or "not known yet"})


def _check_migrated(context: ServiceContext) -> None:
    with context.database.read() as session:
        has = current_revision(session.connection())
    if has != newest_revision():
        raise RuntimeError(f"the database has revision {has}, this release wants {newest_revision()}")


def _outcome(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:
        # The class alone: messages of drivers can hold addresses and user names.
        return str(error) if isinstance(error, RuntimeError) else f"failed: {type(error).__name__}"
    return "ok"
