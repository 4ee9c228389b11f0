"""The heartbeat thread, which extends a lease while an engine works."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from foreshock.errors import ServiceError
from foreshock_probes.service_client import Lease, LeaseClient, LeaseLostError

__all__ = ["Heartbeat"]


class Heartbeat(contextlib.AbstractContextManager["Heartbeat"]):
    """Sends heartbeats for `lease` while the `with` block runs.

    `lost` becomes True if the service answers that the lease is no longer held. If the service is unavailable, the job
    goes on, and the service checks the fencing token when the scores are uploaded.
    """

    def __init__(self, lease: Lease, connect: Callable[[], LeaseClient]) -> None:
        self._lease = lease
        self._connect = connect
        self._lost = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat-{lease.lease}", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(timeout=15.0)

    @property
    def lost(self) -> bool:
        """True if the service answered that the lease is no longer held."""
        return self._lost.is_set()

    def _beat(self) -> None:
        client = self._connect()
        try:
            while not self._done.wait(max(0.05, self._lease.heartbeat_seconds)):
                try:
                    client.heartbeat(self._lease)
                except LeaseLostError:
                    self._lost.set()
                    return
                except ServiceError:
                    continue
        finally:
            client.close()
