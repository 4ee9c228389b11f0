"""Which step's weights the service would like to have saved, learnt in passing."""

from __future__ import annotations

import time

from foreshock.client.connection import ServiceConnection
from foreshock.client.deliveries import Delivery
from foreshock.client.registrar import Registrar
from foreshock.errors import ServiceError

__all__ = ["WantedWeights"]

_SECONDS_BETWEEN_ASKING = 5.0


class WantedWeights:
    """Asks for the advice after rollouts were delivered, now and then, unless an AdviceFeed says it anyway."""

    def __init__(self, connection: ServiceConnection, registrar: Registrar) -> None:
        self._connection = connection
        self._registrar = registrar
        self._feed_attached = False
        self._next_time = 0.0
        self.step: int | None = None

    def told_by_feed(self, step: int | None) -> None:
        """Take an AdviceFeed's word, and ask no more."""
        self._feed_attached = True
        self.step = step

    def after_delivery(self, delivery: Delivery) -> None:
        """Called in the sender's thread, with its connection free."""
        run = self._registrar.run_id(delivery.registration)
        if self._feed_attached or delivery.kind != "rollouts" or run is None or time.monotonic() < self._next_time:
            return
        self._next_time = time.monotonic() + _SECONDS_BETWEEN_ASKING
        try:
            answer = self._connection.get_json(f"/v1/runs/{run}/lr-advice")
        except ServiceError:
            return
        step = answer.get("want_weights_at_step") if isinstance(answer, dict) else None
        self.step = step if isinstance(step, int) else None
