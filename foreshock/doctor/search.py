"""The search: which variants are tried for a side, in which order, and when it stops. `naming` judges them.

1. The announced weights are replayed in three precisions, float32 on half of the rollouts: **ordinary rounding**. The
   best one in other batches gives the **noise**. A side within the noise is reproduced: the search ends.
2. Single variants, by family: data and sampling need no further replay, and several sampling parameters are fitted
   together if one of them explains a part; then weights, then the forward pass, then
   parts. Each is judged for all rollouts, and for the rollouts that it fits better than the undisturbed replay. A
   variant that needs a replay is screened first, on the worst rollout and then on a tenth of the tokens in the
   rollouts that differ most: all tokens are replayed only if it explains more of that than chance does.
3. Pairs: every variant on top of the ones that explained most.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from foreshock.doctor.catalogue import FAMILIES, PRECISIONS, Variant, variants_of
from foreshock.doctor.changes import BudgetSpentError, CannotTryError, Change, Experimenter
from foreshock.doctor.evidence import CHANCE, Compared, share_range
from foreshock.doctor.fills import prompt_of
from foreshock.doctor.floors import ONE_OF_TWO_ROUNDINGS, Floors
from foreshock.doctor.naming import Naming
from foreshock.doctor.nulls import chosen_by_chance
from foreshock.doctor.replays import Replays
from foreshock.doctor.sampling import Sampling
from foreshock.doctor.screening import Screening
from foreshock.doctor.trials import Budget, Trial, View, mixtures

_FREE = ("data", "sampling")
_CHEAP = (*_FREE, "weights")
_LITTLE_NOISE = 2.0
"""Multiple of the noise of other batches, as engines add their own. A smaller difference has cheap causes or none."""
_PART = 0.2
"""The least share that one sampling parameter explains, so that several together may be the cause."""
_STARTS = 4
"""Single variants from which pairs are tried: those that explain most."""


class SideSearch:
    """The search for one side, whose logged log-probs are those of `compared` and should be those of one of
    `samplings`."""

    def __init__(
        self,
        side: str,
        compared: Compared,
        experimenter: Experimenter,
        samplings: tuple[Sampling, ...],
        budget: Budget,
        log: Callable[[str], None],
        *,
        in_float32: bool = False,
    ) -> None:
        self.side, self.compared = side, compared
        self.subject = experimenter.subject
        self._budget = budget
        self._replays = Replays(experimenter, budget, log)
        self._whole = View(compared)
        self.announced = Change.of(weights=experimenter.subject.announced[side])
        self._floors = Floors(side, self._replays, compared, self.announced, samplings, in_float32=in_float32)
        self.rounding = self._floors.rounding
        self.precision_share = self._floors.precision_shares[0]
        self.trials: list[Trial] = []
        self._screening = Screening(self._replays, self._floors, compared, budget)
        self._naming = Naming(self._replays, self._floors, compared, self.trials, self._screening.results)
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
        """The variants that were only screened, with the share that they explain, without and with weights."""
        return self._screening.results

    @property
    def is_explained(self) -> bool:
        """Whether what was found is within ordinary rounding or noise, or may be named."""
        is_steady = self.found is not self.base or not self._naming.is_beyond(1)
        if (self.mean(self.found) <= self.rounding and is_steady) or self.is_exact(self.found):
            return True
        return self.found is not self.base and self._naming.names(self.found)

    def is_copy(self) -> bool:
        """Return whether equal log-probs of another side are a copy of these: two precisions would differ."""
        try:
            return self._floors.do_precisions_differ()
        except CannotTryError:
            return True

    def share(self, trial: Trial, without: Trial | None = None) -> tuple[float, float, float]:
        """Return the share of the base (or of `without`) that a trial explains, with its interval."""
        return share_range(without.halves, trial.halves, self.compared) if without else self._naming.share(trial)

    def uncertainties(self) -> dict[str, float]:
        """Return the half-widths of the 95 % intervals of the parameters that were fitted, if they have one."""
        with contextlib.suppress(BudgetSpentError):
            return self._replays.uncertainties(self.found, self._whole)
        return {}

    def drawn(self) -> tuple[str, str, float] | None:
        """Return the truncation that the tokens show beside log-probs without one (`fits.drawn`)."""
        is_plain = np.all(np.asarray(self.base.sampling.temperature) == 1.0) and not self.base.sampling.truncates
        if self.found is not self.base or not self.is_explained or not is_plain:
            return None
        with contextlib.suppress(BudgetSpentError):
            return self._replays.drawn(self.base, self._whole)
        return None

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
        named = [each for each in others if self._naming.names(each, against_others=False)]
        return [each for each in named if self.share(self.found, each)[1] <= 0]

    @property
    def refused(self) -> Mapping[str, str]:
        """The engines that cannot be used, and why."""
        return self._floors.refused

    def noise_of(self, trial: Trial) -> float:
        """Return E[d²]/2 between the announced weights and the same weights in other batches."""
        return self._naming.noise_of(trial)[0]

    def _search(self) -> Trial:
        little = self._little()
        if little:
            self._leave_forward(f"what is left is {little}")
        for family in _CHEAP if little else FAMILIES:
            for causes in _by_cause(variants_of(family, self.subject, self.side)):
                tried = itertools.chain(causes, self._nearer(causes))
                for trial in (each for variant in tried for each in self._attempted(self.base, (variant,))):
                    self.trials.append(trial)
                    if self.is_exact(trial) and self._naming.names(trial):
                        return self._whole_of(trial)
                if family not in _FREE and any(self._naming.is_clear(each) for each in self.trials):
                    break
            if family == "sampling":
                self._try_together()
            if family == "weights":
                of_folders = [self.base, *(each for each in self.trials if each.has_other_weights)]
                self.trials += mixtures(of_folders, self.compared)
            found = self._best()
            if found is not None and (self.is_exact(found) or self._naming.is_clear(found)):
                return found
        found = self._best()
        if found is not None:
            return found
        if self.mean(self.base) <= self.rounding:
            return self.base
        return self._in_another_precision() or self._pair() or self.base

    def _nearer(self, causes: list[Variant]) -> Iterator[Variant]:
        """Yield prompts whose number of ids is between that which explains most and the next ones that were tried."""
        numbers = {each.change.get("prompt", ("before", 0)): each for each in causes}
        numbers = {each: variant for each, variant in numbers.items() if each[0] != "before"}
        if not numbers:
            return

        def share(variant: Variant) -> float:
            whole = [self.share(each)[0] for each in self.trials if each.variants == (variant,)]
            return max(whole, default=max(self.screened.get((variant,), (-1.0,))))

        best = max(numbers, key=lambda each: share(numbers[each]))
        kind, number = best
        step = max([each[1] for each in numbers if each[0] == kind and each[1] < number], default=0)
        step = (number - step) // 2
        while step and share(numbers[best]) > 0:
            for each in ((kind, number - step), (kind, number + step)):
                label, values = prompt_of(*each)
                if each not in numbers and each[1] > 0:
                    numbers[each] = replace(numbers[best], label=label, change=Change.of(**values))
                    yield numbers[each]
                    best = max(best, each, key=lambda one: share(numbers[one]))
            step, number = (step, best[1]) if best[1] != number else (step // 2, number)

    def _try_together(self) -> None:
        """Try several sampling parameters together, if one alone explains a part."""
        singles = {each.fit: each for each in variants_of("sampling", self.subject, self.side)}
        tried = [each for each in self.trials if each.variants[0].fit and each.rows.all()]
        nearest = min(tried, key=lambda each: each.gap, default=self.base)
        is_beyond = self._naming.is_beyond(0) or self._naming.is_beyond(1)
        if not is_beyond or nearest.gap > (1 - _PART) * self.base.gap:
            return
        with contextlib.suppress(BudgetSpentError):
            names = self._replays.selected(self.base, self._whole)
            if len(names) > 1:
                self.trials += self._attempted(self.base, tuple(singles[each] for each in names))

    def _in_another_precision(self) -> Trial | None:
        """Return what explains most, if it may be named in another precision, which the fault has hidden."""
        wholes = [each for each in self.trials if each.change != self.base.change and each.rows.all()]
        nearest = min(wholes, key=lambda each: each.gap, default=self.base)
        if nearest.gap > ONE_OF_TWO_ROUNDINGS * self.base.gap:
            return None
        named = [each for each in self._refined(nearest) if self._naming.names(each)]
        return min(named, key=lambda each: each.gap, default=None)

    def _little(self) -> str:
        """Return what explains a small difference without a cause; "" if nothing does."""
        if self._naming.is_below(self.base, self._naming.noise_of(self.base), _LITTLE_NOISE):
            return "hardly more than the noise of other batches"
        may_decode = self.side == "rollout" and self.mean(self.base) <= self.rounding
        if may_decode and self._naming.is_below(self.base, self._floors.decoding()):
            return "no more than what decoding token by token differs by"
        return ""

    def _leave_forward(self, why: str) -> None:
        """Report that the forward pass is not searched, with the fields in which known configurations differ."""
        fields = [each for each in variants_of("forward", self.subject, self.side) if each.cause == "configuration"]
        for name in ("forward", *(f"configuration: {each.label}" for each in fields)):
            self.not_tried[name] = why

    def _best(self) -> Trial | None:
        """Return the trial that may be named, refined by precision; None if there is none."""
        named = sorted((each for each in self.trials if self._naming.names(each)), key=lambda each: each.gap)
        if not named:
            return None
        best = self._whole_of(named[0])
        if self.is_exact(best):
            return best
        return min([best, *self._refined(best)], key=lambda each: each.gap)

    def _whole_of(self, found: Trial) -> Trial:
        """Return the trial of the same causes over all rollouts if it explains nearly as much; else `found`."""
        causes = [each.cause for each in found.variants]
        of_causes = [each for each in self.trials if [one.cause for one in each.variants] == causes]
        wholes = sorted((each for each in of_causes if not each.in_part), key=lambda each: each.gap)
        choices = len(self.subject.weights) if found.is_mixture else 2
        for whole in (each for each in wholes if self._naming.names(each)):
            # Choosing a variant for each rollout explains this much by chance.
            chosen = chosen_by_chance(whole.halves, self.compared.rows, choices, 1 - CHANCE)
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
        return self._naming.is_exact(trial)

    def mean(self, trial: Trial) -> float:
        """Return E[d²]/2 that a trial leaves."""
        return self._naming.mean(trial)

    def _attempted(self, start: Trial, variants: tuple[Variant, ...], than: Trial | None = None) -> Iterable[Trial]:
        """Return the trials of `variants` on top of `start`, for all rollouts and for those that it fits better.

        Empty if a screening shows that they do not explain enough of what `than` (None: `start`) leaves.
        """
        if self._budget.is_spent:
            self.not_tried.setdefault(variants[-1].cause, str(BudgetSpentError()))
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
            tried = [trial for family in FAMILIES for trial in self._seconds(family, start)]
            named = [each for each in tried if self._naming.names(each) and self._naming.needs_both(each, start, tried)]
            if named:
                named += self._refined(min(named, key=lambda each: each.gap))
                self.trials += named
                return self._whole_of(min(named, key=lambda each: each.gap))
        return None

    def _starts(self) -> list[Trial]:
        """Return the best trial of each of the causes that explain most, of those tried or screened."""
        wholes = [each for each in self.trials if each.gap < 0.95 * self.base.gap and each.rows.all()]
        shares: list[tuple[float, tuple[Variant, ...], Trial | None]] = []
        shares += [(1 - each.gap / self.base.gap, each.variants, each) for each in wholes]
        shares += [(max(each), variants, None) for variants, each in self.screened.items() if max(each) > 0.05]
        best: dict[str, tuple[tuple[Variant, ...], Trial | None]] = {}
        for _, variants, trial in sorted(shares, key=lambda each: -each[0]):
            best.setdefault(variants[0].cause, (variants, trial))
        found = []
        for variants, trial in list(best.values())[:_STARTS]:
            whole = trial
            with contextlib.suppress(BudgetSpentError):
                whole = whole or next(iter(self._replays.try_on(self.base, variants, self._whole)), None)
            found += [whole] if whole is not None and whole.gap < 0.95 * self.base.gap else []
        return sorted(found, key=lambda each: each.gap)

    def _further(self, found: Trial) -> Trial:
        """Search a second cause of what a named one leaves."""
        if self.is_exact(found):
            return found
        families = _FREE if self._naming.is_within_one_rounding(found) else FAMILIES
        tried = [trial for family in families for trial in self._seconds(family, found) if trial.rows.all()]
        best = min(tried, key=lambda each: each.gap, default=found)
        return best if best is not found and self._naming.needs_both(best, found, tried) else found

    def _seconds(self, family: str, start: Trial) -> Iterator[Trial]:
        causes = {each.cause for each in start.variants}
        known = {name for each in start.variants for name, _ in each.change.values}
        for variant in variants_of(family, self.subject, self.side):
            if variant.cause in causes or known & set(dict(variant.change.values)):
                continue
            # Fits are made again under the change, and data changes come last.
            plain = self.base if variant.change.values and all(each.fit for each in start.variants) else start
            variants = (variant, *start.variants) if plain is self.base else (variant,)
            for trial in self._attempted(plain, variants, start):
                yield trial
                if self.is_exact(trial):
                    return


def _by_cause(variants: Iterable[Variant]) -> Iterator[list[Variant]]:
    """Yield the variants of each cause."""
    for _, found in itertools.groupby(variants, key=lambda each: each.cause):
        yield list(found)
