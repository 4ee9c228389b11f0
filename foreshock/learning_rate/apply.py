"""Put a scale on an optimizer's learning rate, after any scheduler, without ever compounding.

Three kinds of scheduler have to be lived with:

- one that computes `lr` anew each step from its own state (LambdaLR, Megatron's OptimizerParamScheduler);
- one that multiplies the `lr` it finds in the param group (ExponentialLR, CosineAnnealingLR, ReduceLROnPlateau): were
  our scaled `lr` left there, it would be taken for the base and the scale would compound step by step;
- none.

So each param group remembers the base and what was written over it (three plain floats, which every checkpoint format
can carry), and for torch optimizers the scaled `lr` stands in the group only from `apply_scale` to the end of
`optimizer.step()`: hooks put it in before each further step (gradient accumulation, PPO mini-batches) and put the base
back after it, where the scheduler then finds it. An optimizer without hooks keeps the scaled `lr`, which is right with
schedulers of the first kind; for the second kind, or where a gradient scaler skips `optimizer.step()`, call
`restore_base` before the scheduler's step, or use `ForeshockLR`, which does.

Param groups are any mapping with an "lr" that is a float or a tensor of one number; torch is never imported.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any, Protocol

__all__ = ["applied_learning_rates", "apply_scale", "base_learning_rates", "restore_base"]

BASE_KEY = "foreshock_base_lr"
WRITTEN_KEY = "foreshock_written_lr"
SCALE_KEY = "foreshock_scale"

_NOT_WRITTEN = math.nan

ParamGroup = MutableMapping[str, Any]


class HasParamGroups(Protocol):
    """What is needed of an optimizer."""

    @property
    def param_groups(self) -> Sequence[Any]:
        """The param groups, each with an "lr"."""


def apply_scale(optimizer: HasParamGroups, scale: float) -> None:
    """Make the learning rate of every param group its base times `scale`, until the next call.

    Call it after the scheduler's step, or before the optimizer's, once per training step or as often as you like: the
    same scale again changes nothing, another scale replaces the one before. The base is what the scheduler (or the
    constructor) last wrote. Build schedulers before the first call, or they take a scaled rate for the initial one.

    After loading an optimizer's state dict, call it again before the next step. With checkpoint formats that keep only
    keys which the fresh optimizer has (torch's distributed checkpoints), call `apply_scale(optimizer, 1.0)` before it.

    Raises ValueError where `scale` is not a finite number >= 0.
    """
    if not math.isfinite(scale) or scale < 0:
        raise ValueError(f"a learning-rate scale is a finite number >= 0, and this is {scale!r}")
    write_scale(optimizer, scale)
    _put_base_back_after_steps(optimizer)


def write_scale(optimizer: HasParamGroups, scale: float) -> None:
    """`apply_scale` without the hooks: the scaled rate stays in the param groups until `restore_base`."""
    for index, group in enumerate(optimizer.param_groups):
        group[SCALE_KEY] = float(scale)
        _write_scaled(optimizer, index, group)


def restore_base(optimizer: HasParamGroups) -> None:
    """Put the base learning rates back, for a scheduler that multiplies what it finds.

    What a scheduler has written over the scaled rate meanwhile is left alone: it is the base now.
    """
    for index, group in enumerate(optimizer.param_groups):
        _restore(optimizer, index, group)


def base_learning_rates(optimizer: HasParamGroups) -> list[float]:
    """The learning rate of each param group as its scheduler wants it, without the scale."""
    return [_base(optimizer, index, group) for index, group in enumerate(optimizer.param_groups)]


def applied_learning_rates(optimizer: HasParamGroups) -> list[float]:
    """The learning rate of each param group that the next `optimizer.step()` uses: base times scale; for logging."""
    bases = base_learning_rates(optimizer)
    return [base * group.get(SCALE_KEY, 1.0) for base, group in zip(bases, optimizer.param_groups, strict=True)]


_written_objects: weakref.WeakKeyDictionary[Any, dict[int, float]] = weakref.WeakKeyDictionary()
"""Per optimizer, the float objects this process wrote, by the group's index.

A scheduler may by chance write the very number that we wrote (a base halved while the scale is a half). Whether `lr` is
still our object tells the two apart; only in a group that was just loaded from a checkpoint is the number all there is.
"""


def _is_ours(optimizer: HasParamGroups, index: int, group: ParamGroup) -> bool:
    """Whether `lr` is still the scaled rate that was written here, and not something a scheduler wrote since."""
    written = group.get(WRITTEN_KEY, _NOT_WRITTEN)
    if math.isnan(written):
        return False
    rate = group["lr"]
    remembered = _remembered(optimizer).get(index)
    if remembered is written and isinstance(rate, float):
        return rate is written
    return bool(float(rate) == written)


def _base(optimizer: HasParamGroups, index: int, group: ParamGroup) -> float:
    return float(group[BASE_KEY] if _is_ours(optimizer, index, group) else group["lr"])


def _write_scaled(optimizer: HasParamGroups, index: int, group: ParamGroup) -> None:
    base = _base(optimizer, index, group)
    rate = base * group[SCALE_KEY]
    _set_rate(group, rate)
    # A tensor rounds to its own precision: remember what it will be read back as.
    written = rate if group["lr"] is rate else float(group["lr"])
    group[BASE_KEY] = base
    group[WRITTEN_KEY] = written
    _remembered(optimizer)[index] = written


def _restore(optimizer: HasParamGroups, index: int, group: ParamGroup) -> None:
    if _is_ours(optimizer, index, group):
        _set_rate(group, group[BASE_KEY])
    if WRITTEN_KEY in group:
        group[WRITTEN_KEY] = _NOT_WRITTEN


def _set_rate(group: ParamGroup, rate: float) -> None:
    """Write `lr`, into a tensor in place: a captured or compiled step reads that very tensor."""
    fill = getattr(group["lr"], "fill_", None)
    if fill is not None:
        fill(rate)
    else:
        group["lr"] = rate


def _remembered(optimizer: HasParamGroups) -> dict[int, float]:
    try:
        return _written_objects.setdefault(optimizer, {})
    except TypeError:  # An optimizer that cannot be referred to weakly, or not hashed.
        return {}


_hooked: weakref.WeakSet[Any] = weakref.WeakSet()


def _put_base_back_after_steps(optimizer: HasParamGroups) -> None:
    """Register the hooks once, on the optimizer or on the torch optimizer it wraps; without hooks do nothing."""
    candidate: Any = optimizer
    for _ in range(4):
        if candidate is None:
            return
        try:
            if candidate in _hooked:
                return
            candidate.register_step_pre_hook(_before_step)
            candidate.register_step_post_hook(_after_step)
            _hooked.add(candidate)
            return
        except (AttributeError, TypeError):
            candidate = getattr(candidate, "optimizer", None)


def _before_step(optimizer: Any, _arguments: Any, _keywords: Any) -> None:
    for index, group in enumerate(optimizer.param_groups):
        if SCALE_KEY in group:
            _write_scaled(optimizer, index, group)


def _after_step(optimizer: Any, _arguments: Any, _keywords: Any) -> None:
    restore_base(optimizer)
