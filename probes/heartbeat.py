"""The thread that keeps a lease while an engine works, and notices when it is lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from foreshock.errors import ServiceError
from probes.service_client import Lease, LeaseClient, LeaseLostError

__all__ = ["Heartbeat"]


class Heartbeat(contextlib.AbstractContextManager["Heartbeat"]):
    """Sends heartbeats for `lease` while the `with` block runs.

    `lost` turns True when the service says that the lease is another's. A service that is away does not make it lost:
    the job goes on, and the service decides by the token when the scores come.
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
        """Whether the lease is known to be lost."""
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
