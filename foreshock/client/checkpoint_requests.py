"""Requests of the service for checkpoints: at which step it asks the trainer to save weights for a probe."""

from __future__ import annotations

import time

from foreshock.client.connection import ServiceConnection
from foreshock.client.deliveries import Delivery
from foreshock.client.registrar import Registrar
from foreshock.errors import ServiceError

__all__ = ["CheckpointRequests"]

_SECONDS_BETWEEN_POLLS = 5.0


class CheckpointRequests:
    """Polls the advice after rollouts were delivered, every 5 s at most; an attached AdviceFeed replaces the polls."""

    def __init__(self, connection: ServiceConnection, registrar: Registrar) -> None:
        self._connection = connection
        self._registrar = registrar
        self._feed_attached = False
        self._next_poll = 0.0
        self.step: int | None = None
        """The step whose weights are requested, None if none are."""

    def set_from_feed(self, step: int | None) -> None:
        """Take the step from an AdviceFeed, and stop polling."""
        self._feed_attached = True
        self.step = step

    def after_delivery(self, delivery: Delivery) -> None:
        """Poll if it is time. Called in the sender's thread, whose connection is free then."""
        run = self._registrar.run_id(delivery.registration)
        if self._feed_attached or not delivery.is_shard or run is None or time.monotonic() < self._next_poll:
            return
        self._next_poll = time.monotonic() + _SECONDS_BETWEEN_POLLS
        try:
            answer = self._connection.get_json(f"/v1/runs/{run}/lr-advice")
        except ServiceError:
            return
        step = answer.get("want_weights_at_step") if isinstance(answer, dict) else None
        self.step = step if isinstance(step, int) else None
