"""Follow the advice: a feed that polls it, and functions that apply its scale to an optimizer.

Its names are imported when they are first used. None of them imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreshock.lazy_names import lazy_names

if TYPE_CHECKING:
    from foreshock.learning_rate.advice import Advice, AdviceAlert
    from foreshock.learning_rate.apply import (
        applied_learning_rates,
        applied_scales,
        apply_scale,
        base_learning_rates,
        restore_base,
    )
    from foreshock.learning_rate.feed import AdviceFeed
    from foreshock.learning_rate.levers import Correction, Rollback

__all__ = [
    "Advice",
    "AdviceAlert",
    "AdviceFeed",
    "Correction",
    "Rollback",
    "applied_learning_rates",
    "applied_scales",
    "apply_scale",
    "base_learning_rates",
    "restore_base",
]

_APPLY = "foreshock.learning_rate.apply"

__getattr__ = lazy_names(
    __name__,
    {
        "Advice": "foreshock.learning_rate.advice",
        "AdviceAlert": "foreshock.learning_rate.advice",
        "AdviceFeed": "foreshock.learning_rate.feed",
        "Correction": "foreshock.learning_rate.levers",
        "Rollback": "foreshock.learning_rate.levers",
        "applied_learning_rates": _APPLY,
        "applied_scales": _APPLY,
        "apply_scale": _APPLY,
        "base_learning_rates": _APPLY,
        "restore_base": _APPLY,
    },
)
