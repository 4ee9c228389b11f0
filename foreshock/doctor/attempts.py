"""The attempts of a side: variants are screened, replayed, kept and judged, whatever step of the search asks."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from foreshock.doctor.catalogue import PRECISIONS, Variant
from foreshock.doctor.changes import BudgetSpentError, CannotTryError, Change, Experimenter
from foreshock.doctor.evidence import CHANCE, Compared, share_range
from foreshock.doctor.fits import drawn, uncertainties
from foreshock.doctor.floors import Floors
from foreshock.doctor.naming import Naming
from foreshock.doctor.nulls import chosen_by_chance
from foreshock.doctor.replays import Replays
from foreshock.doctor.sampling import Sampling
from foreshock.doctor.screening import Screening
from foreshock.doctor.trials import Budget, Trial, View


class Attempts:
    """The trials of one side, whose logged log-probs are those of `compared` and should be those of one of `samplings`.

    `base` is the undisturbed replay, `found` the trial that explains the side. `trials` were replayed whole,
    `screened` only on a few rollouts, with the shares that they explain without and with weights. `not_tried` has the
    variants that could not be tried, and why.
    """

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
        self.side, self.compared, self.subject = side, compared, experimenter.subject
        self.whole, self._budget = View(compared), budget
        self.replays = Replays(experimenter, budget, log)
        announced = Change.of(weights=self.subject.announced[side])
        self.floors = Floors(side, self.replays, compared, announced, samplings, in_float32=in_float32)
        self.base = self.found = self.floors.base
        self.trials: list[Trial] = []
        self.not_tried: dict[str, str] = {}
        self._screening = Screening(self.replays, self.floors, compared, budget)
        self.screened = self._screening.results
        self.naming = Naming(self.replays, self.floors, compared, self.trials, self.screened)

    def of(self, start: Trial, variants: tuple[Variant, ...], than: Trial | None = None) -> Iterable[Trial]:
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
            return self.replays.try_on(start, variants, self.whole)
        except CannotTryError as error:
            self.not_tried.setdefault(f"{variants[-1].cause}: {variants[-1].label}", str(error))
            return []

    def best(self) -> Trial | None:
        """Return the trial that may be named, refined by precision; None if there is none."""
        named = sorted((each for each in self.trials if self.naming.names(each)), key=lambda each: each.gap)
        if not named:
            return None
        best = self.whole_of(self.with_fewer_biases(named[0]))
        if self.naming.is_exact(best):
            return best
        return min([best, *self.refined(best)], key=lambda each: each.gap)

    def with_fewer_biases(self, found: Trial) -> Trial:
        """Return a trial that may be named, or one with biases of fewer ids that leaves no more than one rounding.

        Of biases of all ids, some fit the rounding too.
        """
        fewer = [each for each in self.trials if len(each.sampling.biases) < len(found.sampling.biases)]
        named = (each for each in fewer if self.naming.is_within_one_rounding(each) and self.naming.names(each))
        return min(named, key=lambda each: each.gap, default=found)

    def whole_of(self, found: Trial) -> Trial:
        """Return the trial of the same causes over all rollouts if it explains nearly as much; else `found`."""
        causes = [each.cause for each in found.variants]
        of_causes = [each for each in self.trials if [one.cause for one in each.variants] == causes]
        wholes = sorted((each for each in of_causes if not each.in_part), key=lambda each: each.gap)
        choices = len(self.subject.weights) if found.is_mixture else 2
        for whole in (each for each in wholes if self.naming.names(each)):
            # Choosing a variant for each rollout explains this much by chance.
            chosen = chosen_by_chance(whole.halves, self.compared.rows, choices, 1 - CHANCE)
            if self.share(found, whole)[1] <= chosen:
                return whole
        return found

    def refined(self, trial: Trial) -> list[Trial]:
        """Try a trial again in the other precisions, and return those that are nearer: it may hide which was used."""
        others = (Change.of(precision=each) for each in PRECISIONS if each != trial.change.get("precision"))
        starts = (replace(self.base, change=self.base.change.plus(each)) for each in others)
        tried = [each for start in starts for each in self.of(start, trial.variants, trial)]
        found = [each for each in tried if self.share(each, trial)[1] > self.floors.precision_shares[0]]
        self.trials += found
        return found

    def share(self, trial: Trial, without: Trial | None = None) -> tuple[float, float, float]:
        """Return the share of the base (or of `without`) that a trial explains, with its interval."""
        return share_range(without.halves, trial.halves, self.compared) if without else self.naming.share(trial)

    @property
    def distance(self) -> float:
        """The difference that the undisturbed replay leaves, in multiples of ordinary rounding."""
        return self.naming.mean(self.base) / self.floors.rounding

    @property
    def is_explained(self) -> bool:
        """Whether what was found is within ordinary rounding or noise, or may be named."""
        is_steady = self.found is not self.base or not self.naming.is_beyond(1)
        if self.naming.mean(self.found) <= self.floors.rounding and is_steady:
            return True
        with contextlib.suppress(BudgetSpentError):
            return self.naming.is_exact(self.found) or (self.found is not self.base and self.naming.names(self.found))
        return False

    def is_copy(self) -> bool:
        """Return whether equal log-probs of another side are a copy of these: two precisions would differ."""
        try:
            return self.floors.do_precisions_differ()
        except CannotTryError:
            return True

    def uncertainties(self) -> dict[str, float]:
        """Return the half-widths of the 95 % intervals of the parameters that were fitted, if they have one."""
        fits = [each.fit for each in self.found.variants if each.fit]
        with contextlib.suppress(BudgetSpentError):
            if fits:
                return uncertainties(fits, self.replays.fitting(self.found, self.whole), self.found.sampling)
        return {}

    def drawn(self) -> tuple[str, float, float] | None:
        """Return the truncation that the tokens show beside log-probs without one (`fits.drawn`)."""
        sampling = self.base.sampling
        is_plain = np.all(np.asarray(sampling.temperature) == 1.0) and not sampling.truncates
        with contextlib.suppress(BudgetSpentError):
            if self.found is self.base and self.is_explained and is_plain:
                return drawn(self.replays.fitting(self.base, self.whole), sampling)
        return None

    def alternatives(self) -> list[Trial]:
        """Return the other single causes that reproduce the side and cannot be told from what was found."""
        if self.found is self.base:
            return []
        exact = self.naming.is_exact(self.found)
        names = {each.cause for each in self.found.variants}
        others = [
            trial
            for trial in self.trials
            if len(trial.variants) <= len(self.found.variants) and not names & {each.cause for each in trial.variants}
        ]
        if exact:
            return [each for each in others if self.naming.is_exact(each)]
        named = [each for each in others if self.naming.names(each, against_others=False)]
        return [each for each in named if self.share(self.found, each)[1] <= 0]
