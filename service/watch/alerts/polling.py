"""Polls of a run's alerts: wait for a change of one, then answer with what is read once for all who poll the page."""

from __future__ import annotations

from fastapi import Response

from foreshock_service.platform.etag import names_version
from foreshock_service.platform.security import Principal
from foreshock_service.runs.runs.service import check_visible
from foreshock_service.watch.alerts.service import PageKey, read_page
from foreshock_service.watch.long_polls.waiters import LongPolls


async def answer_alert_poll(
    polls: LongPolls, principal: Principal, page: PageKey, wait: float, if_none_match: str | None
) -> Response:
    """Return a page of alerts, or 304; after a change if the poll waits. Raises RunNotFound, RunDeleted."""
    run = page.run_id
    with polls.waiter(run) as waiter:
        version = check_visible(await polls.version(run), principal, run)
        if wait > 0 and names_version(if_none_match, version.of_alerts):
            await waiter.until(
                lambda now: now is None or now.deleted_at_us is not None or now.of_alerts != version.of_alerts, wait
            )
            check_visible(await polls.version(run), principal, run)
    answer = await polls.read(read_page, page)
    return answer.response(if_none_match)
