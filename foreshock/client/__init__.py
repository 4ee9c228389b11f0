"""The client for trainers: logs rollouts, scalars and checkpoints in the background, without slowing training."""

from __future__ import annotations

from foreshock.client.client import Client
from foreshock.client.counters import Counters
from foreshock.client.status import DeliveryStatus

__all__ = ["Client", "Counters", "DeliveryStatus"]
