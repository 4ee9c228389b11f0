"""The policy's mean entropy among the scalars of a step, for rollouts without entropies of their tokens."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["SCALAR_NAMES", "entropy_of_scalars"]

SCALAR_NAMES = ("entropy", "policy/entropy", "actor/entropy", "actor/entropy_loss", "train/entropy", "entropy_mean")
"""Names under which trainers log it, in nats, in the order in which they are looked for."""


def entropy_of_scalars(values: Mapping[str, float]) -> float | None:
    """Return the first positive entropy of a step's scalars; None if there is none. verl logs it as `entropy_loss`."""
    return next((values[name] for name in SCALAR_NAMES if values.get(name, 0.0) > 0.0), None)
