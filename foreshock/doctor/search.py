"""The search: which variants are tried for a side, in which order, and when it stops. `naming` judges them.

1. The announced weights are replayed in three precisions, float32 on half of the rollouts: **ordinary rounding**. The
   best one in other batches gives the **noise**. A side within the noise is reproduced: the search ends.
2. Single variants, by family: data and sampling need no further replay, then weights, then the forward pass, then
   parts. Each is judged for all rollouts, and for the rollouts that it fits better than the undisturbed replay. A
   variant that needs a replay is screened first, on the worst rollout and then on a tenth of the tokens in the
   rollouts that differ most: all tokens are replayed only if it explains more of that than chance does.
3. Pairs: every variant on top of the ones that explained most.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from foreshock.doctor.catalogue import FAMILIES, PRECISIONS, Variant, variants_of
from foreshock.doctor.changes import BudgetSpentError, CannotTryError, Change, Experimenter
from foreshock.doctor.evidence import Compared, share_range
from foreshock.doctor.floors import Floors
from foreshock.doctor.naming import CHANCE, Naming
from foreshock.doctor.nulls import chosen_by_chance
from foreshock.doctor.replays import Replays
from foreshock.doctor.sampling import Sampling
from foreshock.doctor.screening import Screening
from foreshock.doctor.trials import Budget, Trial, View, mixtures

_FREE = ("data", "sampling")
_CHEAP = (*_FREE, "weights")
_LITTLE_NOISE = 2.0
"""Multiple of the noise of other batches, as engines add their own. A smaller difference has cheap causes or none."""
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
        return share_range((without or self.base).halves, trial.halves, self.compared)

    def uncertainty(self, variant: Variant) -> float:
        """Return the half-width of the 95 % interval of the parameter that a variant fitted; NaN if it has none."""
        with contextlib.suppress(BudgetSpentError):
            if variant.fit:
                return self._replays.uncertainty(self.found, variant.fit, self._whole)
        return float("nan")

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
                for trial in (each for variant in causes for each in self._attempted(self.base, (variant,))):
                    self.trials.append(trial)
                    if self.is_exact(trial) and self._naming.names(trial):
                        return self._whole_of(trial)
                if family not in _FREE and any(self._naming.is_clear(each) for each in self.trials):
                    break
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
        return self._pair() or self.base

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


def _by_cause(variants: Iterable[Variant]) -> Iterator[list[Variant]]:
    """Yield the variants of each cause."""
    for _, found in itertools.groupby(variants, key=lambda each: each.cause):
        yield list(found)
