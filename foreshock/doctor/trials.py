"""A budget of experiments, and the difference that one of them leaves unexplained."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from foreshock.doctor.catalogue import Variant
from foreshock.doctor.changes import BudgetSpentError, Change
from foreshock.doctor.evidence import Compared, Float64
from foreshock.doctor.sampling import Sampling
from foreshock.probe_kinds import DOCTOR_SECONDS

_DECODE = 2.0
"""Plain replays that a decode of the same tokens takes (`benchmarks/doctor/prices.py`)."""


@dataclass(slots=True)
class Budget:
    """Replays and seconds that a search may spend; `clock` gives seconds.

    `replays` counts the replays made, one of some rollouts as its share of the tokens; `made` has them, for both sides.
    """

    seconds: float = DOCTOR_SECONDS
    most_replays: int = 400
    clock: Callable[[], float] = time.monotonic
    replays: float = 0.0
    started: float = field(default=0.0)
    made: set[tuple[Change, tuple[int, ...]]] = field(default_factory=set)

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

    def check(self) -> None:
        """Raise BudgetSpentError if the seconds are spent."""
        if self.spent > self.seconds:
            raise BudgetSpentError

    def count(self, change: Change, view: View) -> None:
        """Count a replay, unless it was made before."""
        if (change, ()) not in self.made and (change, view.rows) not in self.made:
            self.made.add((change, view.rows))
            self.replays += view.share * (_DECODE if change.get("composition") == "decode" else 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The tokens that a trial is judged by: those of all rollouts, or of `rows`; `tokens` are their places in [T]."""

    compared: Compared
    rows: tuple[int, ...] = ()
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    share: float = 1.0

    def of_largest(self, halves: Float64, share: float, least: int) -> View:
        """Return the view of the rollouts with the largest sums of `halves`, about `share` of the tokens."""
        compared = self.compared
        lengths = compared.batch.response_lengths
        order = np.argsort(-np.bincount(compared.rows, halves, lengths.size), kind="stable")
        before = np.cumsum(lengths[order]) - lengths[order]
        taken = (before < share * lengths.sum()) | (np.arange(order.size) < least)
        return self.of_rows(np.sort(order[taken]))

    def of_rows(self, rows: NDArray[np.int64]) -> View:
        """Return the view of some rollouts; `self` is that of all."""
        compared = self.compared
        if rows.size == compared.batch.num_rollouts:
            return self
        tokens = np.flatnonzero(np.isin(compared.rows, rows))
        part = Compared.of(compared.batch.select(rows), compared.logged[tokens].astype(np.float32))
        return View(part, tuple(rows.tolist()), tokens, tokens.size / max(compared.rows.size, 1))

    def restricted(self, trial: Trial) -> Trial:
        """Return a trial of all rollouts as one of this view."""
        if not self.rows:
            return trial
        return replace(
            trial,
            sampling=trial.sampling.at(self.tokens),
            halves=trial.halves[self.tokens],
            rows=trial.rows[list(self.rows)],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Variants tried together, and d²/2 [T] that they leave; `rows` are the rollouts concerned, [N].

    `in_part`: each rollout, or its first or last tokens, takes the replay that fits best. `is_mixture`: the rollouts
    have weights of several names (`mixtures`).
    """

    variants: tuple[Variant, ...]
    change: Change
    sampling: Sampling
    data: tuple[str, ...]
    halves: Float64
    rows: NDArray[np.bool_]
    values: tuple[str, ...] = ()
    in_part: bool = False
    is_mixture: bool = False

    @property
    def gap(self) -> float:
        """The sum of d²/2; all trials of a side have the same tokens."""
        return float(self.halves.sum())

    @property
    def has_other_weights(self) -> bool:
        """Whether all rollouts have one name's weights, other than the announced ones."""
        return len(self.variants) == 1 and self.variants[0].cause == "other_weights" and not self.in_part


def switched(mine: Float64, others: Float64, offsets: NDArray[np.int64]) -> Float64:
    """Return d²/2 [T] if each rollout changes its weights at most once: its first or its last tokens have the
    others."""
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


def mixtures(whole: list[Trial], compared: Compared) -> list[Trial]:
    """Return the trial in which each rollout has the weights, of the base's and others', that fit it best, if any."""
    if len(whole) < 3:
        return []
    by_rollout = np.stack([compared.by_rollout(each.halves) for each in whole])
    best = np.nan_to_num(by_rollout, nan=np.inf).argmin(axis=0)
    used = sorted(set(best.tolist()) - {0})
    if len(used) < 2:
        return []
    halves = np.stack([each.halves for each in whole])[best[compared.rows], np.arange(compared.rows.size)]
    label = ", ".join(f"{whole[each].variants[0].label} ({int((best == each).sum())} rollouts)" for each in used)
    first = whole[used[0]]
    variants = (replace(first.variants[0], label=label),)
    found = replace(first, halves=halves, rows=best > 0, variants=variants, values=(label,))
    return [replace(found, in_part=True, is_mixture=True)]
