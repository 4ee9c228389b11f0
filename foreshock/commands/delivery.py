"""Wait until the service has what a command logged."""

from __future__ import annotations

import time

from foreshock.client.client import Client
from foreshock.commands.progress import Progress
from foreshock.errors import Rejected, ServiceUnavailable

__all__ = ["losses_of", "refuse_losses", "wait_for_delivery"]

_STALLED_SECONDS = 120.0


def wait_for_delivery(client: Client) -> None:
    """Wait until everything is delivered. Raises ServiceUnavailable if it stalls, Rejected for rejected items."""
    progress = Progress("delivering", client.counters.accepted)
    delivered, since = -1, time.monotonic()
    while (status := client.flush(0.2)).undelivered:
        now = client.counters.snapshot()
        progress.show(now.delivered)
        if now.delivered != delivered:
            delivered, since = now.delivered, time.monotonic()
        elif time.monotonic() - since > _STALLED_SECONDS:
            raise ServiceUnavailable(
                f"nothing was delivered for {_STALLED_SECONDS:.0f} s ({status.reason or 'no answer'}); the rest is "
                f"kept in {client.settings.spool_directory} and sent by the next import"
            )
    now = client.counters.snapshot()
    progress.show(now.delivered)
    refuse_losses(client)


def losses_of(client: Client) -> int:
    """Return the number of items that were rejected, dropped, or could not be encoded."""
    now = client.counters.snapshot()
    return int(now.rejected + now.invalid + now.dropped)


def refuse_losses(client: Client) -> None:
    """Raise Rejected if the service rejected items, or the client dropped some or could not encode them."""
    now = client.counters.snapshot()
    if losses_of(client):
        kept = client.settings.spool_directory / "rejected"
        raise Rejected(
            f"{now.rejected} items were rejected by the service (their bytes are in {kept}), "
            f"{now.invalid} were invalid, {now.dropped} were dropped"
        )
