"""The trainer's side: log rollouts, scalars and checkpoints from a background that never slows or stops training."""

from __future__ import annotations

from foreshock.client.client import Client
from foreshock.client.counters import Counters

__all__ = ["Client", "Counters"]
