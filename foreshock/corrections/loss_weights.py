"""The weights of a correction, to multiply the loss of each token by in a loop of one's own.

    weights = foreshock.corrections.weights(new_log_probs - rollout_log_probs, response_mask)
    loss = (weights * per_token_loss * response_mask).sum() / response_mask.sum()

They are those that `Evaluator` evaluates, by the catalogue's thresholds.
"""

from __future__ import annotations

import sys
from typing import Any, Final, TypeVar

import numpy as np

from foreshock.corrections.catalogue import Threshold, correction_named
from foreshock.errors import InvalidArgumentError

__all__ = ["DEFAULT_CORRECTION", "TRAINED", "weights"]

TRAINED: Final = ("token_tis", "token_mis", "icepop", "sequence_tis", "sequence_mis")
"""Corrections whose weights can be asked for."""

DEFAULT_CORRECTION: Final = "token_tis"
"""With the control loop it keeps 0.98 of the best arm in every setting of docs/closed-loop.md's cheap test bed."""

Array = TypeVar("Array")


def weights(
    d: Array, mask: Any, kind: str = DEFAULT_CORRECTION, threshold: float | str | Threshold | None = None
) -> Array:
    """Return the weight of each token, in the type, the shape and the precision of `d`, without a gradient.

    `d` is log π − log μ, [..., T], a numpy array or a torch tensor, and `mask` is true for the tokens that the loss
    counts, in the same shape. `threshold` is a cap, or text as in the catalogue (`"0.5_5"`); None: the first usual one.

    A sequence correction takes the sum of `d` along the last axis and gives each token of a sequence the same weight. A
    masked token has the weight 0. A token without a finite `d` has 1, and adds nothing to its sequence. Raises
    InvalidArgumentError.
    """
    if kind not in TRAINED:
        raise InvalidArgumentError(f"unknown kind {kind!r} of weights; kinds: {', '.join(TRAINED)}", "kind")
    correction = correction_named(kind)
    match threshold:
        case None:
            chosen = correction.usual[0]
        case Threshold():
            chosen = correction.check(threshold)
        case _:
            chosen = correction.threshold(str(threshold))
    # torch is imported if a tensor is passed.
    values: Any = d
    xp: Any = np
    if hasattr(values, "detach"):
        xp, values = sys.modules["torch"], values.detach()
        mask = xp.as_tensor(mask, device=values.device)
    else:
        values, mask = np.asarray(values), np.asarray(mask)
    if values.shape != mask.shape:
        raise InvalidArgumentError(f"d has the shape {[*values.shape]} and the mask {[*mask.shape]}", "mask")
    kept = mask > 0
    # Sums of half precision lose what they add up.
    wide = values * 1.0 if values.dtype.itemsize >= 4 else values + xp.zeros(values.shape, dtype=xp.float32)
    measured = kept & xp.isfinite(wide)
    wide = xp.where(measured, wide, xp.zeros_like(wide))
    if correction.level == "sequence":
        wide = wide.sum(-1)[..., None] + xp.zeros_like(wide)
        measured = kept
    lower, upper = correction.limits(chosen)
    found = xp.exp(wide.clip(max=upper))
    if correction.effect == "dropped":
        found = xp.where((wide > upper) | (wide < lower), xp.zeros_like(found), found)
    found = xp.where(kept, xp.where(measured, found, xp.ones_like(found)), xp.zeros_like(found))
    typed: Array = found.to(values.dtype) if xp is not np else found.astype(values.dtype, copy=False)
    return typed
