"""HTTP: `/livez` for liveness; `/readyz` for readiness to take an upload, with the reason if not."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Response, status
from pydantic import BaseModel, Field

from service.platform.context import Context, ServiceContext
from service.platform.database.schema import current_revision, newest_revision

router = APIRouter(tags=["health"])


class Liveness(BaseModel):
    """Liveness of the process."""

    status: str


class Readiness(BaseModel):
    """The outcome of each check: `ok`, or the reason why it fails."""

    ready: bool
    checks: dict[str, str]
    details: dict[str, str] = Field(description="`token_pass`: `compiled`, or numpy and why")


@router.get("/livez")
def livez() -> Liveness:
    """Report that the process answers; restart it if it does not."""
    return Liveness(status="alive")


@router.get("/readyz", responses={503: {"model": Readiness, "description": "Not ready; the checks give the reason"}})
def readyz(context: Context, response: Response) -> Readiness:
    """Check that the database is reachable and migrated, the token store writable and the decoders started."""
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
        raise RuntimeError(f"the database has revision {has}, this release requires {newest_revision()}")


def _outcome(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:
        # Only the class: messages of drivers can contain addresses and user names.
        return str(error) if isinstance(error, RuntimeError) else f"failed: {type(error).__name__}"
    return "ok"
