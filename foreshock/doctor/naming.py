"""When a trial may be named: it reproduces what a side logged, and explains more of it than its nulls do.

A trial **reproduces** a side if it leaves no more than ordinary rounding, and at most a tenth of the difference. The
lower end of the share that it explains, over prompts, must be above the share that it explains of **healthy logs**
(`nulls.healthy_share`). It must also be above what another order of rounding can explain: what one **precision**
explains of the difference between two others (`Floors.precision_shares`). Then it must be distinguished from other
causes, in one of two ways:

- It **stands out**: none of the **other causes** that were tried would explain so much of these very logs by chance
  (`nulls.expected_by_chance`).
- It is **alone**: it leaves no more than one rounding if the side was beyond ordinary rounding, else it explains more
  than half; so many rollouts improve (`evidence.chance_of`) that none of all variants would do this by chance; and no
  other cause leaves as little.

A change of data that leaves no more than the noise is named without nulls: it has no parameter that fits a few tokens.
Logged sums have the rounding of all their tokens.

A policy that repeats one id has nearly the same d at all its tokens, which any change of the computation can fit: then
only causes of the data, of the sampling and of other weights are named.

A few tokens at which rounding decides can outweigh all others. A trial is therefore also judged with weights that are
small at such tokens (`evidence.steadiness`), against the rounding of the weighted mean; only with these weights can it
be alone beyond ordinary rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from foreshock.doctor.catalogue import Variant
from foreshock.doctor.changes import BudgetSpentError
from foreshock.doctor.evidence import CHANCE, Compared, chance_of, mean_range, share_range
from foreshock.doctor.floors import ONE_OF_TWO_ROUNDINGS, Floors
from foreshock.doctor.nulls import expected_by_chance, gain_of, healthy_share
from foreshock.doctor.replays import Replays
from foreshock.doctor.trials import Trial, View

NAMED_SHARE = 0.9
"""The least share of what a side differs by that a name explains: less is a part of a cause, or a relative of it."""

_ONE_ID = 0.9
"""The share of the difference at one id, above which a change of the computation has no name."""

_MOVED = 0.1
"""The least change of a prompt's mean d²/2 by a trial, in multiples of that of all; below it is none."""

_TOKENS_OF_A_FIT = 10
"""The least tokens for each fitted parameter; a few tokens fit any."""

Kind = Literal[0, 1]
"""How tokens count: 0 all alike, 1 by the weights of the floors."""


class Naming:
    """The judge of a side's trials, by its floors and by the other `trials`, a list that grows during the search.

    `screened` has the variants that were only screened, with the shares that they explain.
    """

    def __init__(
        self,
        replays: Replays,
        floors: Floors,
        compared: Compared,
        trials: Sequence[Trial],
        screened: Mapping[tuple[Variant, ...], tuple[float, float]],
    ) -> None:
        self._replays, self._floors, self._compared = replays, floors, compared
        self._trials, self._screened = trials, screened
        self._base = floors.base
        self._tokens = max(int(compared.usable.sum()), 1)
        self._weights = (np.ones(compared.rows.size), floors.weights)
        self._rounding = (floors.rounding, floors.weighted_rounding)
        self._beyond = tuple(
            mean_range(self._base.halves * by, compared)[0] > floor
            for by, floor in zip(self._weights, self._rounding, strict=True)
        )
        by_id = np.bincount(compared.ids, floors.base.halves)
        self._is_of_one_id = float(by_id.max(initial=0.0)) > _ONE_ID * float(by_id.sum())
        self._chances: dict[tuple[Trial, Trial], float] = {}
        self._lows: dict[tuple[Trial, Kind], float] = {}
        self._healthy_shares: dict[tuple[tuple[Variant, ...], bool], tuple[float, float]] = {}

    def names(self, trial: Trial, *, against_others: bool = True) -> bool:
        """Whether a trial reproduces the side, explains nearly all of its difference, and may be named."""
        if self.mean(trial) > (1 - NAMED_SHARE) * self.mean(self._base):
            return False
        if self._tokens < _TOKENS_OF_A_FIT * sum(bool(each.fit) for each in trial.variants):
            return False
        if self._is_of_one_id and any(_is_of_computation(each) for each in trial.variants):
            return False
        times = self._times(trial)
        is_reproduced = self.mean(trial) <= times * self._rounding[0]
        if is_reproduced and self._is_above_nulls(trial, 0, against_others):
            return True
        is_reproduced = self.mean(trial, 1) <= times * self._rounding[1] and bool(trial.rows.all())
        return is_reproduced and self._is_above_nulls(trial, 1, against_others)

    def is_clear(self, trial: Trial) -> bool:
        """Whether a trial explains what is beyond ordinary rounding so well that no other cause need be tried."""
        return (self.is_beyond(0) or self.is_beyond(1)) and self.is_within_one_rounding(trial) and self.names(trial)

    def needs_both(self, trial: Trial, start: Trial, tried: Sequence[Trial]) -> bool:
        """Whether a trial explains more of what `start` leaves than precisions and the second causes `tried` do."""
        low = share_range(start.halves, trial.halves, self._compared)[1]
        if low <= self._floors.precision_shares[0] or not self._stands_out(trial, 0, start, tried):
            return False
        if any(self.mean(start, kind) > self._rounding[kind] for kind in (0, 1)):
            return True
        # What is left is ordinary rounding, of which a few tokens can have most.
        return self._chance(start, trial) * len(tried) < CHANCE

    def mean(self, trial: Trial, kind: Kind = 0) -> float:
        """Return E[d²]/2 that a trial leaves."""
        return float((trial.halves * self._weights[kind]).sum()) / self._tokens

    def noise_of(self, trial: Trial) -> tuple[float, float]:
        """Return E[d²]/2 between the announced weights and the same weights in other batches, for both kinds."""
        return self._floors.noise_of(str(trial.change.get("precision")))

    def is_exact(self, trial: Trial) -> bool:
        """Whether a trial is within the noise of other batches."""
        return self.is_below(trial, self.noise_of(trial), self._times(trial))

    def is_below(self, trial: Trial, floors: tuple[float, float], times: float = 1.0) -> bool:
        """Whether a trial leaves no more than so many times the floors, without and with weights."""
        return all(self.mean(trial, kind) <= times * floors[kind] for kind in (0, 1))

    def is_within_one_rounding(self, trial: Trial) -> bool:
        """Whether a trial leaves no more than one rounding, half of what two differ by; then expensive families are not
        tried."""
        times = self._times(trial)
        return self.mean(trial) <= times * self._rounding[0] / 2 and self.mean(trial, 1) <= times * self._rounding[1]

    def is_beyond(self, kind: Kind) -> bool:
        """Whether the side is beyond ordinary rounding."""
        return self._beyond[kind]

    def _times(self, trial: Trial) -> float:
        """Return how many times the usual rounding that of a trial is: sums of tokens have more, and what is quantised
        on the way."""
        compared = self._compared
        if not compared.usable.any():
            return 1.0
        if "cumulative" in trial.data:
            return float(compared.position[compared.usable].mean()) + 1.0
        if trial.change.get("activations") and not trial.data:
            return self._floors.times_of(trial.change)
        if "sums" in trial.data:
            return float(np.bincount(compared.rows)[compared.rows[compared.usable]].mean())
        return 1.0

    def _is_above_nulls(self, trial: Trial, kind: Kind, against_others: bool) -> bool:
        if kind == 0 and trial.data and self._low(trial, 0) >= 0 and self.is_exact(trial):
            return True  # a change of data has no parameter that fits a few tokens, however few it concerns
        return self._is_told_apart(trial, kind, against_others) and self._low(trial, kind) > self._healthy(trial)[kind]

    def _is_told_apart(self, trial: Trial, kind: Kind, against_others: bool) -> bool:
        """Whether a trial explains more than precisions do, and stands out or is alone; see the module."""
        low, least = self._low(trial, kind), self._floors.precision_shares[kind]
        if self.is_beyond(kind) or (low > least and self.mean(self._base) > self._rounding[0]):
            if low > least and self._stands_out(trial, kind):
                return True
            if kind == 0:
                return low > 0 and self.is_exact(trial)
            least *= min(1.0, self._rounding[1] / max(self.mean(self._base, 1), 1e-300))
            is_one_rounding = self.mean(trial, 1) <= self._times(trial) * self._rounding[1] / 2
            return is_one_rounding and low > least and self._is_alone(trial, against_others)
        explained = 1 - self.mean(trial, kind) / max(self.mean(self._base, kind), 1e-300)
        if not trial.rows.all() or explained <= max(least, ONE_OF_TWO_ROUNDINGS):
            return False
        if not self._stands_out(trial, kind) and (kind == 0 or low <= least):
            return False
        return self._is_alone(trial, against_others)

    def _is_alone(self, trial: Trial, against_others: bool) -> bool:
        """Whether no variant improves so many rollouts by chance, and no other cause that improves them leaves as
        little.

        A trial with weights of the same folder has a part of the truth: it counts only if it leaves less, even in some
        rollouts.
        """
        chance = self._chance(self._base, trial)
        if chance * (len(self._trials) + len(self._screened)) >= CHANCE:
            return False
        weights, folders, own = self._weights[1], _folders(trial.variants), {each.cause for each in trial.variants}

        def leaves_as_little(other: Trial) -> bool:
            if folders & _folders(other.variants):
                return self.mean(other, 1) < self.mean(trial, 1)
            if not other.rows.all() or self._chance(self._base, other) > chance:
                return False
            return share_range(other.halves * weights, trial.halves * weights, self._compared)[1] <= 0

        others = [each for each in self._trials if not own & {variant.cause for variant in each.variants}]
        return not against_others or not any(leaves_as_little(each) for each in others)

    def _chance(self, before: Trial, after: Trial) -> float:
        """Return the probability that so many rollouts improve from one trial to another by chance."""
        if (before, after) not in self._chances:
            gained = np.bincount(self._compared.rows, (before.halves - after.halves) * self._weights[1])
            self._chances[before, after] = chance_of(np.asarray(gained, np.float64))
        return self._chances[before, after]

    def _stands_out(
        self, trial: Trial, kind: Kind, start: Trial | None = None, tried: Sequence[Trial] | None = None
    ) -> bool:
        """Whether none of the other causes `tried` on `start` (None: the base) would explain so much by chance."""
        start, tried = start or self._base, self._trials if tried is None else tried
        known = {each.cause for each in start.variants}
        own = {each.cause for each in trial.variants} - known
        before = max(self.mean(start, kind), 1e-300)

        def gain(trial: Trial) -> float:
            return gain_of(1 - self.mean(trial, kind) / before)

        gains: dict[frozenset[str], float] = {}
        for each in tried:
            names = frozenset(one.cause for one in each.variants) - known
            if not names & own and (each.rows.all() or not trial.rows.all()):
                gains[names] = max(gains.get(names, 0.0), gain(each))
        for variants, shares in self._screened.items() if start is self._base else ():
            if variants[0].cause not in own:
                gains.setdefault(frozenset([variants[0].cause]), gain_of(shares[kind]))
        return expected_by_chance(gain(trial), list(gains.values())) < CHANCE

    def _low(self, trial: Trial, kind: Kind) -> float:
        """Return the lower end of the share that a trial explains."""
        if (trial, kind) not in self._lows:
            self._lows[trial, kind] = self.share(trial, kind)[1]
        return self._lows[trial, kind]

    def share(self, trial: Trial, kind: Kind = 0) -> tuple[float, float, float]:
        """Return the share of the base that a trial explains, and its 95 % interval over the prompts that it changes.

        Prompts that a change leaves as they were, such as those that are shorter than a cut, say nothing of it.
        """
        before, after = (each.halves * self._weights[kind] for each in (self._base, trial))
        share, low, high = share_range(before, after, self._compared)
        groups, change = self._compared.groups, np.abs(before - after)
        moved = np.bincount(groups, change) > _MOVED * change.mean() * np.bincount(groups)
        if trial.rows.all() and 2 <= moved.sum() < moved.size:
            tokens = np.flatnonzero(moved[groups])
            own = replace(self._compared.at(tokens), groups=np.unique(groups[tokens], return_inverse=True)[1])
            _, low, high = share_range(before[tokens], after[tokens], own)
        return share, min(share, low), max(share, high)

    def _healthy(self, trial: Trial) -> tuple[float, float]:
        """Return the largest share, without and with weights, that a trial's variants explain of healthy logs."""
        in_part = not trial.rows.all() or trial.change.get("weights") != self._base.change.get("weights")
        key = (trial.variants, in_part)
        if key not in self._healthy_shares:
            self._healthy_shares[key] = (0.0, 0.0)
            if not trial.is_mixture:
                with contextlib.suppress(BudgetSpentError):
                    self._healthy_shares[key] = (1.0, 1.0)  # not measured: nothing is above it
                    self._healthy_shares[key] = healthy_share(
                        self._replays, self._floors, trial.variants, View(self._compared), in_part=in_part
                    )
        return self._healthy_shares[key]


def _is_of_computation(variant: Variant) -> bool:
    """Whether a variant replays the announced weights in another way."""
    return bool(variant.change.values) and not (variant.fit or variant.data or _folders((variant,)))


def _folders(variants: tuple[Variant, ...]) -> set[str]:
    """Return the names of the other weights that variants use, whole or in part."""
    whole = {each.change.get(name, "") for each in variants for name in ("weights", "prompt_weights")}
    in_part = {each.change.get(name, ("",))[0] for each in variants for name in ("part", "delta")}
    return (whole | in_part) - {""}
