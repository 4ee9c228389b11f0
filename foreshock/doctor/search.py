"""The search: which variants are tried for a side, in which order, when it stops, and when a cause is named.

1. The announced weights are replayed in three precisions, float32 on half of the rollouts: **ordinary rounding**. The
   best one in other batches gives the **noise**. A side within the noise is reproduced: the search ends.
2. Single variants, by family: data and sampling need no further replay, then weights, then the forward pass, then
   parts. Each is judged for all rollouts, and for the rollouts that it fits better than the undisturbed replay. A
   variant that needs a replay is screened first, on the worst rollout and then on a tenth of the tokens in the
   rollouts that differ most: all tokens are replayed only if it explains most of that.
3. Pairs: every variant on top of the ones that explained most.

A cause is named only if its variant **reproduces** what was logged: to within the noise, or to within ordinary
rounding. The lower end of the share that it explains, over prompts, has to be above the nulls of that test: what it
explains of **healthy logs** (`nulls.healthy_share`), what one **precision** explains of the difference between two
others (`Floors.precision_shares`), and what **other causes** explain of these very logs (`nulls.expected_by_chance`).
Within ordinary rounding it explains more than the loss of one of two roundings does, so many rollouts improve
(`nulls.chance_of`) that none of all variants would do so by chance, and no other cause is as good and as unlikely.

A few tokens at which rounding decides can outweigh all others. A variant is therefore also judged with weights that are
small at such tokens, against the rounding of that mean.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from foreshock.doctor.catalogue import FAMILIES, PRECISIONS, Variant, variants_of
from foreshock.doctor.changes import CannotTryError, Change, Experimenter
from foreshock.doctor.evidence import Compared, Float64, mean_range, share_range
from foreshock.doctor.floors import ONE_OF_TWO_ROUNDINGS, Floors
from foreshock.doctor.nulls import chance_of, chosen_by_chance, expected_by_chance, gain_of, healthy_share
from foreshock.doctor.replays import Replays
from foreshock.doctor.sampling import Sampling
from foreshock.doctor.screening import Screening
from foreshock.doctor.trials import Budget, Trial, View, mixtures

__all__ = ["SideSearch"]

_CHANCE = 0.01
"""The chance of a false name that each test allows; the one level that is chosen."""
_FREE = ("data", "sampling")
_CHEAP = (*_FREE, "weights")
_LITTLE_NOISE = 2.0
"""Times the noise of other batches: engines add one of their own. What is left below has cheap causes or none."""
_STARTS = 4
"""How many single variants a pair may start from: those that explain most."""


class SideSearch:
    """The search for one side, whose logged log-probs are those of `compared` and should be those of `sampling`."""

    def __init__(
        self,
        side: str,
        compared: Compared,
        experimenter: Experimenter,
        samplings: tuple[Sampling, ...],
        budget: Budget,
        log: Callable[[str], None],
    ) -> None:
        self.side, self.compared = side, compared
        self.subject = experimenter.subject
        self._budget = budget
        self._replays = Replays(experimenter, budget, log)
        self._whole = View(compared)
        self.announced = Change.of(weights=experimenter.subject.announced[side])
        self._floors = Floors(side, self._replays, compared, self.announced, samplings)
        self._weights, self.rounding = self._floors.weights, self._floors.rounding
        self.precision_share = self._floors.precision_shares[0]
        self.trials: list[Trial] = []
        self._on_start: list[Trial] = []
        self._screening = Screening(self._replays, self._floors, compared, budget)
        self._chances: dict[Trial, float] = {}
        self._lows: dict[tuple[Trial, int], float] = {}
        self._healthy_shares: dict[tuple[tuple[Variant, ...], bool], tuple[float, float]] = {}
        self.not_tried: dict[str, str] = {}
        self.base: Trial = self._floors.base
        self.found: Trial = self.base

    def run(self) -> Trial:
        """Return the trial that explains the side; the base if none does or none is needed."""
        if self.is_exact(self.base):
            self._leave_forward("the side is reproduced as exactly as other batches")
        else:
            self.found = self._search()
        if self.found.variants and self.found.rows.all():
            self.found = self._further(self.found)
        return self.found

    @property
    def screened(self) -> dict[tuple[Variant, ...], tuple[float, float]]:
        """The variants of which a screening was enough, with the share that they explain, without and with weights."""
        return self._screening.results

    @property
    def is_explained(self) -> bool:
        """Whether what was found is within ordinary rounding."""
        is_steady = self.found is not self.base or not self._is_beyond(self._weights)
        if (self.mean(self.found) <= self.rounding and is_steady) or self.is_exact(self.found):
            return True
        return self.found is not self.base and self._names(self.found)

    def is_copy(self) -> bool:
        """Return whether equal log-probs of another side are a copy of these: two precisions would differ."""
        try:
            return self._floors.do_precisions_differ()
        except CannotTryError:
            return True

    def share(self, trial: Trial, without: Trial | None = None) -> tuple[float, float, float]:
        """Return the share of the base (or of `without`) that a trial explains, with its interval."""
        return share_range((without or self.base).halves, trial.halves, self.compared)

    def uncertainty(self, variant: Variant) -> float:
        """Return the half-width of the 95 % interval of what a variant of the cause fitted; NaN if it has none."""
        return self._replays.uncertainty(self.found, variant.fit, self._whole) if variant.fit else float("nan")

    def alternatives(self) -> list[Trial]:
        """Return the other single causes that reproduce the side and cannot be told from what was found."""
        if self.found is self.base:
            return []
        exact = self.is_exact(self.found)
        names = {each.cause for each in self.found.variants}
        others = [
            trial
            for trial in self.trials
            if len(trial.variants) <= len(self.found.variants) and not names & {each.cause for each in trial.variants}
        ]
        if exact:
            return [each for each in others if self.is_exact(each)]
        named = [each for each in others if self._names(each, against_others=False)]
        return [each for each in named if self.share(self.found, each)[1] <= 0]

    @property
    def refused(self) -> Mapping[str, str]:
        """The engines that cannot be asked, whatever the side, and why."""
        return self._floors.refused

    def noise_of(self, trial: Trial) -> float:
        """Return E[d²]/2 that the announced weights differ by from themselves in other batches."""
        return self._floors.noise_of(str(trial.change.get("precision")))[0]

    def _search(self) -> Trial:
        little = self._little()
        if little:
            self._leave_forward(f"what is left is {little}")
        for family in _CHEAP if little else FAMILIES:
            for causes in _by_cause(variants_of(family, self.subject, self.side)):
                for trial in (each for variant in causes for each in self._attempted(self.base, (variant,))):
                    self.trials.append(trial)
                    if self.is_exact(trial) and self._names(trial):
                        return self._whole_of(trial)
                if family not in _FREE and any(self._is_clear(each) for each in self.trials):
                    break
            if family == "weights":
                of_folders = [self.base, *(each for each in self.trials if each.has_other_weights)]
                self.trials += mixtures(of_folders, self.compared)
            found = self._best()
            if found is not None and (self.is_exact(found) or self._is_clear(found)):
                return found
        found = self._best()
        if found is not None:
            return found
        if self.mean(self.base) <= self.rounding:
            return self.base
        return self._pair() or self.base

    def _little(self) -> str:
        """Return what explains the little that is left without any cause; "" if nothing does."""
        if self._is_within(self.base, _LITTLE_NOISE):
            return "hardly more than the noise of other batches"
        may_decode = self.side == "rollout" and self.mean(self.base) <= self.rounding
        if may_decode and self._is_below(self.base, self._floors.decoding(), 1.0):
            return "no more than what decoding token by token differs by"
        return ""

    def _leave_forward(self, why: str) -> None:
        """Report that the forward pass is not searched, with the fields in which known configurations differ."""
        fields = [each for each in variants_of("forward", self.subject, self.side) if each.cause == "configuration"]
        for name in ("forward", *(f"configuration: {each.label}" for each in fields)):
            self.not_tried[name] = why

    def _is_within_one_rounding(self, trial: Trial) -> bool:
        """Whether a trial leaves no more than one rounding, half of what two differ by: expensive families can wait."""
        return self.mean(trial) <= self.rounding / 2 and self._weighted_mean(trial) <= self._floors.weighted_rounding

    def _best(self) -> Trial | None:
        """Return the trial that may be named, refined by precision; None if there is none."""
        named = sorted((each for each in self.trials if self._names(each)), key=lambda each: each.gap)
        if not named:
            return None
        best = self._whole_of(named[0])
        if self.is_exact(best):
            return best
        return min([best, *self._refined(best)], key=lambda each: each.gap)

    def _whole_of(self, found: Trial) -> Trial:
        """Return a trial, or that of its causes for all rollouts if it leaves not much more."""
        causes = [each.cause for each in found.variants]
        of_causes = [each for each in self.trials if [one.cause for one in each.variants] == causes]
        wholes = sorted((each for each in of_causes if not each.in_part), key=lambda each: each.gap)
        choices = len(self.subject.weights) if found.is_mixture else 2
        for whole in (each for each in wholes if self._names(each)):
            # What a choice for each rollout explains by chance is no reason to leave rollouts out.
            chosen = chosen_by_chance(whole.halves, self.compared.rows, choices, 1 - _CHANCE)
            if self.share(found, whole)[1] <= chosen:
                return whole
        return found

    def _refined(self, trial: Trial) -> Iterator[Trial]:
        """Yield a trial again in the other precisions: the fault may have hidden which one was used."""
        for precision in PRECISIONS:
            if precision == trial.change.get("precision"):
                continue
            start = replace(self.base, change=self.base.change.plus(Change.of(precision=precision)))
            for each in self._attempted(start, trial.variants, trial):
                if self.share(each, trial)[1] > self.precision_share:
                    self.trials.append(each)
                    yield each

    def is_exact(self, trial: Trial) -> bool:
        """Whether a trial is within the noise of other batches."""
        return self._is_within(trial, 1.0)

    def _is_within(self, trial: Trial, times: float) -> bool:
        """Whether a trial leaves no more than so many times the noise of other batches, without and with weights."""
        return self._is_below(trial, self._floors.noise_of(str(trial.change.get("precision"))), times)

    def _is_below(self, trial: Trial, floor: tuple[float, float], times: float) -> bool:
        return self.mean(trial) <= times * floor[0] and self._weighted_mean(trial) <= times * floor[1]

    def _is_clear(self, trial: Trial) -> bool:
        """Whether a trial explains what is beyond ordinary rounding so well that no other cause need be tried."""
        is_beyond = self._is_beyond(1.0) or self._is_beyond(self._weights)
        return is_beyond and self._is_within_one_rounding(trial) and self._names(trial)

    def _names(self, trial: Trial, *, against_others: bool = True) -> bool:
        """Whether a trial reproduces the side and may be named."""
        is_reproduced = self.mean(trial) <= max(self.rounding, self.noise_of(trial))
        if is_reproduced and self._is_above_null(trial, 1.0, against_others):
            return True
        is_reproduced = self._weighted_mean(trial) <= self._floors.weighted_rounding
        return is_reproduced and bool(trial.rows.all()) and self._is_above_null(trial, self._weights, against_others)

    def _is_beyond(self, weights: Float64 | float) -> bool:
        """Whether the side is beyond ordinary rounding."""
        floor = self.rounding if isinstance(weights, float) else self._floors.weighted_rounding
        return mean_range(self.base.halves * weights, self.compared)[0] > floor

    def _is_above_null(self, trial: Trial, weights: Float64 | float, against_others: bool) -> bool:
        """Whether a trial explains more than its null; see the module."""
        kind = 0 if isinstance(weights, float) else 1
        low = self._low(trial, kind)
        least, stands_out = self._floors.precision_shares[kind], self._stands_out(trial, kind)
        if self._is_beyond(weights) or (low > least and stands_out and self.mean(self.base) > self.rounding):
            is_most = (low > least and stands_out) or (kind == 0 and low > 0 and self.is_exact(trial))
            return is_most and low > self._share_of_healthy(trial)[kind]
        chance = self._chance(trial)
        is_significant = chance * (len(self.trials) + len(self.screened)) < _CHANCE
        left = float((trial.halves * weights).sum() / max((self.base.halves * weights).sum(), 1e-300))
        if not (trial.rows.all() and is_significant and stands_out and 1 - left > max(least, ONE_OF_TWO_ROUNDINGS)):
            return False
        if against_others and low <= self._best_of_others(trial, chance, weights):
            return False
        return low > self._share_of_healthy(trial)[kind]

    def _stands_out(self, trial: Trial, kind: int = 0, start: Trial | None = None) -> bool:
        """Whether none of the other causes that were tried on `start` (None: the base) would explain so much of it."""
        tried, start = (self.trials, self.base) if start is None else (self._on_start, start)
        weights = self._weights if kind else 1.0
        known = {each.cause for each in start.variants}
        own = {each.cause for each in trial.variants} - known
        before = max(float((start.halves * weights).sum()), 1e-300)

        def gain(trial: Trial) -> float:
            return gain_of(1 - float((trial.halves * weights).sum()) / before)

        gains: dict[frozenset[str], float] = {}
        for each in tried:
            names = frozenset(one.cause for one in each.variants) - known
            if not names & own and (each.rows.all() or not trial.rows.all()):
                gains[names] = max(gains.get(names, 0.0), gain(each))
        for variants, shares in self.screened.items() if start is self.base else ():
            if variants[0].cause not in own:
                gains.setdefault(frozenset([variants[0].cause]), gain_of(shares[kind]))
        return expected_by_chance(gain(trial), list(gains.values())) < _CHANCE

    def _low(self, trial: Trial, kind: int) -> float:
        """Return the lower end of the share that a trial explains; `kind` 1: with weights."""
        if (trial, kind) not in self._lows:
            weights = self._weights if kind else 1.0
            shares = share_range(self.base.halves * weights, trial.halves * weights, self.compared)
            self._lows[trial, kind] = shares[1]
        return self._lows[trial, kind]

    def _chance(self, trial: Trial) -> float:
        if trial not in self._chances:
            gained = np.bincount(self.compared.rows, (self.base.halves - trial.halves) * self._weights)
            self._chances[trial] = chance_of(np.asarray(gained, np.float64))
        return self._chances[trial]

    def _share_of_healthy(self, trial: Trial) -> tuple[float, float]:
        """Return the largest share, without and with weights, that a trial's variants explain of healthy logs."""
        in_part = not trial.rows.all() or trial.change.get("weights") != self.base.change.get("weights")
        key = (trial.variants, in_part)
        if key not in self._healthy_shares:
            self._healthy_shares[key] = (0.0, 0.0)
            if not trial.is_mixture:
                self._healthy_shares[key] = healthy_share(
                    self._replays, self._floors, trial.variants, self._whole, in_part=in_part
                )
        return self._healthy_shares[key]

    def _best_of_others(self, trial: Trial, chance: float, weights: Float64 | float) -> float:
        """Return the largest share that other causes explain whose improvement is no likelier by chance."""
        causes = {each.cause for each in trial.variants}
        others = [each for each in self.trials if each.rows.all() and not causes & {v.cause for v in each.variants}]
        whole = max(float((self.base.halves * weights).sum()), 1e-300)
        likely = [each for each in others if self._chance(each) <= chance]
        return max((1 - float((each.halves * weights).sum()) / whole for each in likely), default=0.0)

    def _attempted(self, start: Trial, variants: tuple[Variant, ...], than: Trial | None = None) -> Iterable[Trial]:
        """Return the trials of `variants` on top of `start`, for all rollouts and for those that it fits better.

        None if a screening shows that they do not explain most of what `than` (None: `start`) leaves.
        """
        if variants[-1].change.values and self._budget.is_spent:
            self.not_tried.setdefault(variants[-1].cause, "the budget is spent")
            return []
        try:
            if not self._screening.passes(start, variants, than or start):
                return []
            self.screened.pop(variants, None)
            return self._replays.try_on(start, variants, self._whole)
        except CannotTryError as error:
            self.not_tried.setdefault(f"{variants[-1].cause}: {variants[-1].label}", str(error))
            return []

    def _pair(self) -> Trial | None:
        """Search a second cause on what the best single ones leave."""
        for start in self._starts():
            self._on_start = [trial for family in FAMILIES for trial in self._seconds(family, start)]
            named = [each for each in self._on_start if self._names(each) and self._needs_both(each, start)]
            if named:
                named += self._refined(min(named, key=lambda each: each.gap))
                self.trials += named
                return self._whole_of(min(named, key=lambda each: each.gap))
        return None

    def _starts(self) -> list[Trial]:
        """Return the best trial of each of the causes that explain most, as far as was tried or screened."""
        wholes = [each for each in self.trials if each.gap < 0.95 * self.base.gap and each.rows.all()]
        shares: list[tuple[float, tuple[Variant, ...], Trial | None]] = []
        shares += [(1 - each.gap / self.base.gap, each.variants, each) for each in wholes]
        shares += [(max(each), variants, None) for variants, each in self.screened.items() if max(each) > 0.05]
        best: dict[str, tuple[tuple[Variant, ...], Trial | None]] = {}
        for _, variants, trial in sorted(shares, key=lambda each: -each[0]):
            best.setdefault(variants[0].cause, (variants, trial))
        found = []
        for variants, trial in list(best.values())[:_STARTS]:
            whole = trial or next(iter(self._replays.try_on(self.base, variants, self._whole)), None)
            found += [whole] if whole is not None and whole.gap < 0.95 * self.base.gap else []
        return sorted(found, key=lambda each: each.gap)

    def _further(self, found: Trial) -> Trial:
        """Search what a cause leaves within ordinary rounding."""
        if self.is_exact(found):
            return found
        families = _FREE if self._is_within_one_rounding(found) else FAMILIES
        tried = [trial for family in families for trial in self._seconds(family, found) if trial.rows.all()]
        self._on_start = tried
        best = min(tried, key=lambda each: each.gap, default=found)
        return best if best is not found and self._needs_both(best, found) else found

    def _seconds(self, family: str, start: Trial) -> Iterator[Trial]:
        first = start.variants[0]
        for variant in variants_of(family, self.subject, self.side):
            if variant.cause == first.cause or set(dict(variant.change.values)) & set(dict(first.change.values)):
                continue
            # A fit is made again under the change, and data changes come last.
            plain = self.base if first.fit and variant.change.values and len(start.variants) == 1 else start
            variants = (variant, first) if plain is self.base else (variant,)
            for trial in self._attempted(plain, variants, start):
                yield trial
                if self.is_exact(trial):
                    return

    def _needs_both(self, trial: Trial, start: Trial) -> bool:
        """Whether a trial explains more of what `start` leaves than precisions and other second causes do."""
        low = self.share(trial, start)[1]
        return low > self.precision_share and self._stands_out(trial, start=start)

    def _weighted_mean(self, trial: Trial) -> float:
        return float((trial.halves * self._weights).sum()) / max(int(self.compared.usable.sum()), 1)

    def mean(self, trial: Trial) -> float:
        """Return E[d²]/2 that a trial leaves."""
        return float(trial.halves.sum()) / max(int(self.compared.usable.sum()), 1)


def _by_cause(variants: Iterable[Variant]) -> Iterator[list[Variant]]:
    """Yield the variants of each cause."""
    for _, found in itertools.groupby(variants, key=lambda each: each.cause):
        yield list(found)
