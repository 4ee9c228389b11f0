"""The client for trainers: logs rollouts, scalars and checkpoints in the background, without slowing training.

Its names are imported when they are first used: commands need only the connection, without numpy and pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreshock.lazy_names import lazy_names

if TYPE_CHECKING:
    from foreshock.client.client import Client
    from foreshock.client.reporting import Counters, DeliveryStatus

__all__ = ["Client", "Counters", "DeliveryStatus"]

__getattr__ = lazy_names(
    __name__,
    {
        "Client": "foreshock.client.client",
        "Counters": "foreshock.client.reporting",
        "DeliveryStatus": "foreshock.client.reporting",
    },
)
