"""A budget of experiments, and what one of them left unexplained."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foreshock.doctor.catalogue import Variant
from foreshock.doctor.changes import Change
from foreshock.doctor.evidence import Float64
from foreshock.doctor.sampling import Sampling

__all__ = ["Budget", "Trial", "switched"]


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


def switched(mine: Float64, others: Float64, offsets: NDArray[np.int64]) -> Float64:
    """Return d²/2 [T] if each rollout changes the weights at most once: the first tokens of the others, or the last."""
    found = mine.copy()
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        one, other = mine[start:stop], others[start:stop]
        best = min((one, other), key=lambda each: float(each.sum()))
        for first, last in ((other, one), (one, other)):
            sums = np.concatenate([[0.0], np.cumsum(first)]) + np.concatenate([np.cumsum(last[::-1])[::-1], [0.0]])
            place = int(sums.argmin())
            if 0 < place < stop - start and sums[place] < best.sum():
                best = np.concatenate([first[:place], last[place:]])
        found[start:stop] = best
    return found
