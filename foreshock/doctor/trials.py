"""A budget of experiments, and what one of them left unexplained."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foreshock.doctor.catalogue import Variant
from foreshock.doctor.changes import Change
from foreshock.doctor.evidence import Float64
from foreshock.doctor.sampling import Sampling

__all__ = ["Budget", "Trial"]


@dataclass(slots=True)
class Budget:
    """Replays and seconds that a search may spend; `replays` counts those made, `clock` gives seconds."""

    seconds: float = 600.0
    most_replays: int = 400
    clock: Callable[[], float] = time.monotonic
    replays: int = 0
    started: float = field(default=0.0)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started

    @property
    def is_spent(self) -> bool:
        """Whether no further replay may start."""
        return self.spent > self.seconds or self.replays >= self.most_replays


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Variants tried together, and d²/2 [T] that they leave; `rows` are the rollouts concerned, [N]."""

    variants: tuple[Variant, ...]
    change: Change
    sampling: Sampling
    data: tuple[str, ...]
    halves: Float64
    rows: NDArray[np.bool_]
    values: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """The sum of d²/2; all trials of a side have the same tokens."""
        return float(self.halves.sum())
