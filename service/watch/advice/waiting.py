"""The long poll: wait for a newer state without holding a thread or a database connection."""

from __future__ import annotations

import asyncio

from starlette.concurrency import run_in_threadpool

from service.platform.context import ServiceContext
from service.platform.etag import matches
from service.platform.security import Principal
from service.watch.advice import service
from service.watch.advice.waking import sleeper

LOOK_AGAIN_SECONDS = 2.0
"""How often a poll looks by itself: another process's changes ring no bell here."""


async def wait_for_news(
    context: ServiceContext, principal: Principal, run_id: str, if_none_match: str | None, seconds: float
) -> bool:
    """Wait up to `seconds` while the state is the one that the asker knows; whether there is a newer one."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    with sleeper(run_id) as news:
        while True:
            # Cleared before looking: what happens after the look rings again.
            news.clear()
            if not matches(if_none_match, await run_in_threadpool(_etag, context, principal, run_id)):
                return True
            left = deadline - loop.time()
            if left <= 0:
                return False
            try:
                await asyncio.wait_for(news.wait(), min(left, LOOK_AGAIN_SECONDS))
            except TimeoutError:
                continue


def _etag(context: ServiceContext, principal: Principal, run_id: str) -> str:
    with context.database.read() as session:
        return service.read_etag(session, principal, run_id)
