"""Foreshock: the seismograph of LLM reinforcement learning.

`import foreshock` must be fast, because every trainer does it: public names are imported when they are first used, and
nothing here imports torch, a web framework or a database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreshock.lazy_names import lazy_names

if TYPE_CHECKING:
    from foreshock.client.client import Client
    from foreshock.client.reader import Reader
    from foreshock.integrations.wandb import watch_wandb
    from foreshock.learning_rate.apply import applied_learning_rates, apply_scale
    from foreshock.learning_rate.feed import AdviceFeed
    from foreshock.rollouts.batch import RolloutBatch

__version__ = "0.1.0"

__all__ = [
    "AdviceFeed",
    "Client",
    "Reader",
    "RolloutBatch",
    "__version__",
    "applied_learning_rates",
    "apply_scale",
    "watch_wandb",
]

_MODULES = {
    "AdviceFeed": "foreshock.learning_rate.feed",
    "Client": "foreshock.client.client",
    "Reader": "foreshock.client.reader",
    "RolloutBatch": "foreshock.rollouts.batch",
    "applied_learning_rates": "foreshock.learning_rate.apply",
    "apply_scale": "foreshock.learning_rate.apply",
    "watch_wandb": "foreshock.integrations.wandb",
}


__getattr__ = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
