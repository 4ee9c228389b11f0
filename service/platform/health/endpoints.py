"""HTTP: `/livez` for liveness; `/readyz` for readiness to take an upload, with the reason if not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from anyio import fail_after, to_thread
from fastapi import APIRouter, Response, status
from pydantic import BaseModel, Field

from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.schema import current_revision, newest_revision

router = APIRouter(tags=["health"])

CHECK_SECONDS = 3.0
"""A check that takes longer has failed: a frozen database answers nothing."""


class Liveness(BaseModel):
    """Liveness of the process."""

    status: str


class Readiness(BaseModel):
    """The outcome of each check: `ok`, or the reason why it fails."""

    ready: bool
    checks: dict[str, str]
    details: dict[str, str] = Field(description="`token_pass`: `compiled`, or numpy and why")


@router.get("/livez")
async def livez() -> Liveness:
    """Report that the process answers; restart it if it does not."""
    # A coroutine: it needs no thread, so it answers while all of them are taken.
    return Liveness(status="alive")


@router.get("/readyz", responses={503: {"model": Readiness, "description": "Not ready; the checks give the reason"}})
async def readyz(context: Context, response: Response) -> Readiness:
    """Check that the database can be written and is migrated, the token store too, and that the decoders started."""
    readiness = await check_readiness(context)
    if not readiness.ready:
        response.status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    return readiness


async def check_readiness(context: ServiceContext) -> Readiness:
    """Return the outcome of every check; they run side by side and take CHECK_SECONDS at most."""
    database, migrations, token_store = await asyncio.gather(
        _outcome(context, context.database.check_writable),
        _outcome(context, partial(_check_migrated, context)),
        _outcome(context, context.store.check_writable),
    )
    checks = {
        "database": database,
        "migrations": migrations,
        "token_store": token_store,
        "decoders": context.decoders.state,
    }
    ready = all(outcome == "ok" for outcome in checks.values())
    return Readiness(ready=ready, checks=checks, details={"token_pass": context.decoders.token_pass or "not known yet"})


def _check_migrated(context: ServiceContext) -> None:
    with context.database.read() as session:
        has = current_revision(session.connection())
    if has != newest_revision():
        raise RuntimeError(f"the database has revision {has}, this release requires {newest_revision()}")


async def _outcome(context: ServiceContext, check: Callable[[], None]) -> str:
    try:
        with fail_after(CHECK_SECONDS):
            await to_thread.run_sync(check, abandon_on_cancel=True, limiter=context.check_threads)
    except TimeoutError:
        return f"failed: no answer within {CHECK_SECONDS:g} s"
    except Exception as error:
        # Only the class: messages of drivers can contain addresses and user names.
        return str(error) if isinstance(error, RuntimeError) else f"failed: {type(error).__name__}"
    return "ok"
