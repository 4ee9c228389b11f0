"""Apply a scale to an optimizer's learning rate, after any scheduler, without ever compounding.

There are three cases:

1. The scheduler computes `lr` from its own state in each step (LambdaLR, Megatron's OptimizerParamScheduler).
2. The scheduler multiplies the `lr` in the param group (ExponentialLR, CosineAnnealingLR, ReduceLROnPlateau). A scaled
   `lr` left there would be taken for the base rate, and the scale would compound from step to step.
3. There is no scheduler.

Each param group therefore stores the base rate and the scaled rate written over it (three plain floats, which every
checkpoint format can hold). With torch optimizers the scaled `lr` is in the group only during `optimizer.step()`: hooks
write it before each step and restore the base rate after it, so that a scheduler never sees it, also if a gradient
scaler skips the step. `applied_learning_rates` returns what the next step uses. Two kinds of optimizers keep the scaled
`lr` from `apply_scale` on, which is correct in cases 1 and 3: those without hooks, and those whose `lr` is a tensor,
which a captured or compiled step may read without running hooks. In case 2 call `restore_base` before the scheduler's
step.

A container of optimizers may have param groups of its own that no step reads, as torchtitan's OptimizersContainer has:
the functions here then work on the optimizers in it.

Param groups are any mapping with an "lr" that is a float or a tensor of one number; torch is never imported.
"""

import math
import operator
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any, Protocol

from foreshock.client.reporting import LogOnce

__all__ = ["applied_learning_rates", "applied_scales", "apply_scale", "base_learning_rates", "restore_base"]

BASE_KEY = "foreshock_base_lr"
WRITTEN_KEY = "foreshock_written_lr"
SCALE_KEY = "foreshock_scale"

_NOT_WRITTEN = math.nan
# Deepest nesting of wrappers and containers of optimizers.
_DEEPEST = 4

_log = LogOnce("foreshock.learning_rate")

ParamGroup = MutableMapping[str, Any]


class HasParamGroups(Protocol):
    """The part of an optimizer that is used here."""

    @property
    def param_groups(self) -> Sequence[Any]:
        """The param groups, each with an "lr"."""


def apply_scale(optimizer: HasParamGroups, scale: float) -> bool:
    """Set the learning rate of every param group to its base rate times `scale`, until the next call.

    Call it after the scheduler's step, or before the optimizer's, at least once per training step: the same scale again
    changes nothing, another scale replaces the previous one. The base rate is the one that the scheduler (or the
    constructor) wrote last. Create schedulers before the first call; later ones would take a scaled rate as initial.

    After loading an optimizer's state dict, call it again before the next step. Checkpoint formats that keep only the
    keys of the fresh optimizer (torch's distributed checkpoints) need `apply_scale(optimizer, 1.0)` before loading.

    Returns True. Returns False, changes nothing and warns once if the optimizer has `optimizers` without param groups:
    its step may read other param groups than its own, so do not report the scale as applied.

    Raises ValueError if `scale` is not a finite number >= 0.
    """
    if not math.isfinite(scale) or scale < 0:
        raise ValueError(f"scale must be a finite number >= 0, got {scale!r}")
    parts = _stepped(optimizer)
    if not parts:
        kind = type(optimizer)
        _log.warning(
            f"container {kind}",
            f"{kind.__module__}.{kind.__qualname__} has `optimizers` without param groups, so its learning rate is not "
            "scaled: call apply_scale with the optimizers in it.",
        )
        return False
    for part in parts:
        for index, group in enumerate(part.param_groups):
            group[SCALE_KEY] = float(scale)
            _write_scaled(part, index, group)
    for part in parts:
        if _register_step_hooks(part):
            for index, group in enumerate(part.param_groups):
                if isinstance(group["lr"], float):
                    _restore(part, index, group)
    return True


def restore_base(optimizer: HasParamGroups) -> None:
    """Restore the base learning rates, for a scheduler that multiplies the rate in the param group.

    A rate that a scheduler wrote over the scaled one is kept: it is the new base rate.
    """
    for part in _stepped(optimizer):
        for index, group in enumerate(part.param_groups):
            _restore(part, index, group)


def base_learning_rates(optimizer: HasParamGroups) -> list[float]:
    """Return the unscaled learning rate of each param group; of a container, of each optimizer in it in turn."""
    parts = _stepped(optimizer) or [optimizer]
    return [_base(part, index, group) for part in parts for index, group in enumerate(part.param_groups)]


def applied_learning_rates(optimizer: HasParamGroups) -> list[float]:
    """Return the learning rate of each param group in the next `optimizer.step()`: base times scale; for logging."""
    pairs = zip(base_learning_rates(optimizer), applied_scales(optimizer), strict=True)
    return [base * scale for base, scale in pairs]


def applied_scales(optimizer: HasParamGroups) -> list[float]:
    """Return the scale in the next `optimizer.step()` of each param group, as this rank has it."""
    parts = _stepped(optimizer) or [optimizer]
    return [float(group.get(SCALE_KEY, 1.0)) for part in parts for group in part.param_groups]


def _stepped(optimizer: Any, deepest: int = _DEEPEST) -> list[Any]:
    """Return the optimizers whose param groups the steps read: the optimizer itself, or those in it.

    The inner ones are returned if the groups are not the same objects. That is also right if the outer step copies its
    rates into theirs, because their hooks run later. Empty for a container of things without param groups.
    """
    contained = getattr(optimizer, "optimizers", None)
    if contained is None or deepest == 0:
        inner = _wrapped(optimizer) if deepest else None
        contained = [inner] if hasattr(inner, "param_groups") else []
    elif not isinstance(contained, Sequence) or not all(hasattr(each, "param_groups") for each in contained):
        return []
    if not contained:
        return [optimizer]
    nested = [_stepped(each, deepest - 1) for each in contained]
    if not all(nested):
        return []
    parts = [part for each in nested for part in each]
    groups = [group for part in parts for group in part.param_groups]
    own = list(optimizer.param_groups)
    same = len(groups) == len(own) and all(map(operator.is_, groups, own))
    return [optimizer] if same else parts


def _wrapped(optimizer: Any) -> Any:
    try:
        return getattr(optimizer, "optimizer", None)
    except AssertionError:  # Megatron's chain of several optimizers, as a mixture of experts has.
        return None


_written_objects: weakref.WeakKeyDictionary[Any, dict[int, float]] = weakref.WeakKeyDictionary()
"""Per optimizer, the float objects that this process wrote, by index of the group.

A scheduler may write the same number as we did (a base halved while the scale is 0.5). The identity of the object tells
the two apart; in a group just loaded from a checkpoint only the number can be compared.
"""


def _is_ours(optimizer: HasParamGroups, index: int, group: ParamGroup) -> bool:
    """Return True if `lr` is the scaled rate written here, False if a scheduler has written it since."""
    written = group.get(WRITTEN_KEY, _NOT_WRITTEN)
    if math.isnan(written):
        return False
    rate = group["lr"]
    stored = _written_by(optimizer).get(index)
    if stored is written and isinstance(rate, float):
        return rate is written
    return bool(float(rate) == written)


def _base(optimizer: HasParamGroups, index: int, group: ParamGroup) -> float:
    return float(group[BASE_KEY] if _is_ours(optimizer, index, group) else group["lr"])


def _write_scaled(optimizer: HasParamGroups, index: int, group: ParamGroup) -> None:
    base = _base(optimizer, index, group)
    rate = base * group[SCALE_KEY]
    _set_rate(group, rate)
    # A tensor rounds to its own precision: store the number that will be read back.
    written = rate if group["lr"] is rate else float(group["lr"])
    group[BASE_KEY] = base
    group[WRITTEN_KEY] = written
    _written_by(optimizer)[index] = written


def _restore(optimizer: HasParamGroups, index: int, group: ParamGroup) -> None:
    if _is_ours(optimizer, index, group):
        _set_rate(group, group[BASE_KEY])
    if WRITTEN_KEY in group:
        group[WRITTEN_KEY] = _NOT_WRITTEN


def _set_rate(group: ParamGroup, rate: float) -> None:
    """Write `lr`; into a tensor in place, because a captured or compiled step reads that tensor."""
    fill = getattr(group["lr"], "fill_", None)
    if fill is not None:
        fill(rate)
    else:
        group["lr"] = rate


def _written_by(optimizer: HasParamGroups) -> dict[int, float]:
    try:
        return _written_objects.setdefault(optimizer, {})
    except TypeError:  # The optimizer is not hashable, or does not allow weak references.
        return {}


_hooked: weakref.WeakSet[Any] = weakref.WeakSet()


def _register_step_hooks(optimizer: HasParamGroups) -> bool:
    """Register the hooks once, on the optimizer or on the torch optimizer it wraps, if it has hooks.

    Return True if its steps are sure to run them on the same param groups.
    """
    candidate: Any = optimizer
    for _ in range(_DEEPEST):
        if candidate is None:
            return False
        try:
            if candidate not in _hooked:
                candidate.register_step_pre_hook(_before_step)
                candidate.register_step_post_hook(_after_step)
                _hooked.add(candidate)
            # torch marks the `step` of a class that runs hooks.
            is_sure = getattr(type(candidate).step, "hooked", False)
            return is_sure and all(map(operator.is_, optimizer.param_groups, candidate.param_groups))
        except (AttributeError, TypeError):
            candidate = _wrapped(candidate)
    return False


def _before_step(optimizer: Any, _arguments: Any, _keywords: Any) -> None:
    for index, group in enumerate(optimizer.param_groups):
        if SCALE_KEY in group:
            _write_scaled(optimizer, index, group)


def _after_step(optimizer: Any, _arguments: Any, _keywords: Any) -> None:
    restore_base(optimizer)
