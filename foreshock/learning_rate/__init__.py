"""Follow the learning-rate advice: a feed that polls it, and functions that apply its scale to an optimizer.

Only `ForeshockLR` imports torch, when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from foreshock.learning_rate.advice import Advice, AdviceAlert
from foreshock.learning_rate.apply import applied_learning_rates, apply_scale, base_learning_rates, restore_base
from foreshock.learning_rate.feed import AdviceFeed

if TYPE_CHECKING:
    from foreshock.learning_rate.torch_scheduler import ForeshockLR

__all__ = [
    "Advice",
    "AdviceAlert",
    "AdviceFeed",
    "ForeshockLR",
    "applied_learning_rates",
    "apply_scale",
    "base_learning_rates",
    "restore_base",
]


def __getattr__(name: str) -> Any:
    """Import the torch scheduler when it is first used."""
    if name != "ForeshockLR":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("foreshock.learning_rate.torch_scheduler").ForeshockLR
