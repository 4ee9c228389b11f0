"""The search: which variants are tried for a side, in which order, when it stops, and when a cause is named.

1. The announced weights are replayed in three precisions. Their differences are the **ordinary rounding** of this
   model; the best one in other batches gives the **noise**. A side within the noise is reproduced: the search ends.
2. Single variants, by family: data and sampling need no further replay, then weights, then the forward pass, then
   parts. Each is judged for all rollouts, and for the rollouts that it fits better than the undisturbed replay.
3. Pairs: every variant on top of the ones that explained most.

A cause is named only if its variant **reproduces** what was logged: to within the noise, or to within ordinary rounding
if the variant explains most of it, with the lower end of its interval over prompts; if the side was within ordinary
rounding before, it also has to explain more than every other cause.
Nothing that explains only a part is named. Both floors are measured, so their bounds are too: two independent roundings
differ by twice the variance of one, hence the factor of `_TWO_ROUNDINGS`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from foreshock.doctor.catalogue import FAMILIES, PRECISIONS, Variant, variants_of
from foreshock.doctor.changes import CannotTryError, Change, Experimenter
from foreshock.doctor.data import DATA_CHANGES
from foreshock.doctor.evidence import Compared, Float64, mean_range, share_range
from foreshock.doctor.sampling import Sampling, fitted
from foreshock.doctor.trials import Budget, Trial, switched

__all__ = ["SideSearch"]

_TWO_ROUNDINGS = 2.0
_RESOLUTION = 1e-13
"""E[d²]/2 of float32 log-probs around 1 nat that differ in the last bit or two."""
_MOST = 0.75
"""A cause explains more than this. In healthy batches the best of all variants explained up to a half of what rounding
left; within ordinary rounding a cause therefore also has to explain more than every other one."""
_CHEAP = ("data", "sampling", "weights")
_WORTH_A_SEARCH = 10.0
"""A side within ordinary rounding is searched further if it is beyond so many times the noise of other batches."""
_STARTS = 4
"""How many single variants a pair may start from: those that explain most."""
MAJORITY = 0.5


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
        self.side, self.compared, self._experimenter = side, compared, experimenter
        self.subject = experimenter.subject
        self._samplings, self._budget, self._log = samplings, budget, log
        self._count = max(int(compared.usable.sum()), 1)
        self._replayed: set[Change] = set()
        self.announced = Change.of(weights=experimenter.subject.announced[side])
        self.rounding = _RESOLUTION
        self._noises: dict[str, float] = {}
        self.trials: list[Trial] = []
        self.not_tried: dict[str, str] = {}
        self.base: Trial = self._base()
        self.noise = self.noise_of(self.base)
        self.found: Trial = self.base

    def run(self) -> Trial:
        """Return the trial that explains the side; the base if none does or none is needed."""
        if not self.is_exact(self.base):
            self.found = self._search()
        if self.found.variants and self.found.rows.all():
            self.found = self._further(self.found)
        return self.found

    @property
    def is_explained(self) -> bool:
        """Whether what was found is within ordinary rounding."""
        return self.mean(self.found) <= self.rounding or self.is_exact(self.found)

    def share(self, trial: Trial, without: Trial | None = None) -> tuple[float, float, float]:
        """Return the share of the base (or of `without`) that a trial explains, with its interval."""
        return share_range((without or self.base).halves, trial.halves, self.compared)

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
        return [
            trial
            for trial in others
            if (self.is_exact(trial) if exact else self._names(trial) and self.share(self.found, trial)[1] <= 0)
        ]

    def _base(self) -> Trial:
        """Replay the announced weights, measure both floors, and return the nearest precision."""
        tried: dict[str, Trial] = {}
        for precision in PRECISIONS[:3]:
            change = self.announced.plus(Change.of(precision=precision))
            plain = [self._trial((), change, each, self._log_probs(change, each)) for each in self._samplings]
            tried[precision] = min(plain, key=lambda each: each.gap)
            if self.mean(tried[precision]) <= _RESOLUTION:
                return tried[precision]
        best = self._nearest(tried)
        replays = [self._log_probs(trial.change, best.sampling) for trial in tried.values()]
        pairs = [(0, 1), (0, 2), (1, 2)]
        self.rounding = _TWO_ROUNDINGS * max(self._upper(replays[one], replays[other]) for one, other in pairs)
        return best

    def _nearest(self, tried: dict[str, Trial]) -> Trial:
        """Return the usual precision of the side, or one that is clearly nearer: a fault can hide the difference."""
        usual = tried["bfloat16" if self.side == "rollout" else "autocast"]
        nearest = min(tried.values(), key=lambda each: each.gap)
        return nearest if share_range(usual.halves, nearest.halves, self.compared)[1] > MAJORITY else usual

    def _upper(self, one: Float64, other: Float64) -> float:
        """Return the upper end of the mean of d²/2 between two replays."""
        differing = replace_logged(self.compared, one)
        return mean_range(differing.halves(other), differing)[1]

    def noise_of(self, trial: Trial) -> float:
        """Return E[d²]/2 between the undisturbed replay in the trial's precision and the same in other batches."""
        precision = str(trial.change.get("precision"))
        if self.rounding == _RESOLUTION:
            return 2 * _RESOLUTION  # the first replay was exact
        if precision not in self._noises:
            plain = self.announced.plus(Change.of(precision=precision))
            own, again = (
                self._log_probs(change, self.base.sampling)
                for change in (plain, plain.plus(Change.of(composition="other")))
            )
            self._noises[precision] = max(_TWO_ROUNDINGS * self._upper(own, again), 2 * _RESOLUTION)
        return self._noises[precision]

    def _usual_noise(self) -> float:
        """Return the noise of the base or of a bfloat16 pass, whichever is larger: engines rarely use float32."""
        change = self.base.change.plus(Change.of(precision="bfloat16"))
        return max(self.noise_of(self.base), self.noise_of(replace(self.base, change=change)))

    def _search(self) -> Trial:
        before = self.mean(self.base)
        for family in FAMILIES:
            if family not in _CHEAP and before <= min(self.rounding, _WORTH_A_SEARCH * self._usual_noise()):
                self.not_tried["forward"] = "what is left is hardly more than the noise of other batches"
                break
            for trial in self._singles(family):
                self.trials.append(trial)
                if self.is_exact(trial):
                    return trial
            found = self._best()
            if found is not None and (self.is_exact(found) or self._is_clear(found)):
                return found
        found = self._best()
        if found is not None:
            return found
        if before <= self.rounding:
            return self.base
        return self._pair() or self.base

    def _best(self) -> Trial | None:
        """Return the trial that may be named, refined by precision; None if there is none."""
        named = sorted((each for each in self.trials if self._names(each)), key=lambda each: each.gap)[:3]
        for trial in [each for each in named if not self.is_exact(each)]:
            named += self._refined(trial)
        return min(named, key=lambda each: each.gap, default=None)

    def _refined(self, trial: Trial) -> Iterator[Trial]:
        """Yield a trial again in the other precisions: the fault may have hidden which one was used."""
        for precision in PRECISIONS:
            if precision == trial.change.get("precision"):
                continue
            try:
                again = self._try_on(
                    replace(
                        self.base,
                        change=self.base.change.plus(Change.of(precision=precision)),
                        sampling=self.base.sampling,
                    ),
                    trial.variants,
                )
            except CannotTryError:
                continue
            for each in again:
                if self.share(each, trial)[1] > MAJORITY:
                    self.trials.append(each)
                    yield each

    def is_exact(self, trial: Trial) -> bool:
        """Whether a trial is within the noise of other batches."""
        return self.mean(trial) <= self.noise_of(trial)

    def _is_clear(self, trial: Trial) -> bool:
        """Whether a named trial explains so much that no later family need be tried."""
        return self.mean(trial) <= self.rounding and self.share(trial)[1] > 0.9

    def _names(self, trial: Trial) -> bool:
        """Whether a trial reproduces the side and may be named."""
        if self.is_exact(trial):
            return True
        if self.mean(trial) > self.rounding:
            return False
        low = self.share(trial)[1]
        if low <= _MOST:
            return False
        beyond = mean_range(self.base.halves, self.compared)[0] > self.rounding
        return beyond or (bool(trial.rows.all()) and low > self._best_of_others(trial))

    def _best_of_others(self, trial: Trial) -> float:
        """Return the largest share that single variants of other causes explain: the null of this very batch."""
        causes = {each.cause for each in trial.variants}
        others = [each for each in self.trials if not causes & {one.cause for one in each.variants}]
        return max((1 - each.gap / max(self.base.gap, 1e-300) for each in others), default=0.0)

    def _singles(self, family: str) -> Iterator[Trial]:
        for variant in variants_of(family, self.subject, self.side):
            yield from self._attempted(self.base, (variant,))
        if family == "weights":
            yield from self._mixture()

    def _attempted(self, start: Trial, variants: tuple[Variant, ...]) -> Iterable[Trial]:
        """Return the trials of `variants` on top of `start`, for all rollouts and for those that it fits better."""
        if variants[-1].change.values and self._budget.is_spent:
            self.not_tried.setdefault(variants[-1].cause, "the budget is spent")
            return []
        try:
            return self._try_on(start, variants)
        except CannotTryError as error:
            self.not_tried.setdefault(f"{variants[-1].cause}: {variants[-1].label}", str(error))
            return []

    def _try_on(self, start: Trial, variants: tuple[Variant, ...]) -> list[Trial]:
        change, sampling, data = start.change, start.sampling, start.data
        values = list(start.values)
        for variant in variants:
            change = change.plus(variant.change)
        for variant in variants:
            values.append(variant.label)
            if variant.data:
                data = (*data, variant.data)
            elif variant.fit:
                target = self._unchanged_data(change, sampling, data)
                fit = fitted(variant.fit, self._logits(change), target, sampling, self.subject.eos)
                if fit is None:
                    return []
                sampling = fit
                values[-1] = _value(fit, variant.fit)
        log_probs = self._with_data(self._log_probs(change, sampling), data)
        if log_probs is None:
            return []
        trial = self._trial((*start.variants, *variants), change, sampling, log_probs, data, tuple(values))
        if variants[-1].change.values:
            self._log(f"{variants[-1].cause}, {values[-1]}: E[d²]/2 {self.mean(trial):.2e}")
        return [trial, *self._in_part(trial, start)]

    def _unchanged_data(self, change: Change, sampling: Sampling, data: tuple[str, ...]) -> Compared:
        """Return what a fit has to explain: the tokens that no change of data has set apart."""
        if not data:
            return self.compared
        plain = self._log_probs(change, sampling)
        changed = self._with_data(plain, data)
        if changed is None:
            return self.compared
        return replace(self.compared, usable=self.compared.usable & (changed == plain))

    def _in_part(self, trial: Trial, start: Trial) -> Iterator[Trial]:
        """Yield the trial of the rollouts that it fits better than `start`, if these are some and not all."""
        better = self.compared.by_rollout(trial.halves) < self.compared.by_rollout(start.halves)
        tokens = better[self.compared.rows]
        if 2 <= better.sum() < better.size - 1:
            yield replace(trial, halves=np.where(tokens, trial.halves, start.halves), rows=better)
        if trial.change.get("weights") != start.change.get("weights"):
            yield replace(
                trial, halves=switched(start.halves, trial.halves, self.compared.batch.response_offsets), rows=better
            )

    def _mixture(self) -> Iterator[Trial]:
        """Yield the trial in which each rollout has the weights, of all that were tried, that fit it best."""
        whole = [self.base, *(each for each in self.trials if _is_whole(each))]
        if len(whole) < 3:
            return
        by_rollout = np.stack([self.compared.by_rollout(each.halves) for each in whole])
        best = np.nan_to_num(by_rollout, nan=np.inf).argmin(axis=0)
        used = sorted(set(best.tolist()) - {0})
        if len(used) < 2:
            return
        halves = np.stack([each.halves for each in whole])[best[self.compared.rows], np.arange(self.compared.rows.size)]
        label = ", ".join(f"{whole[each].variants[0].label} ({int((best == each).sum())} rollouts)" for each in used)
        yield replace(
            whole[used[0]],
            halves=halves,
            rows=best > 0,
            variants=(replace(whole[used[0]].variants[0], label=label),),
            values=(label,),
        )

    def _pair(self) -> Trial | None:
        """Search a second cause on what the best single ones leave."""
        singles = sorted((each for each in self.trials if each.gap < 0.95 * self.base.gap), key=lambda each: each.gap)
        starts: dict[str, Trial] = {}
        for trial in singles:
            if trial.rows.all():
                starts.setdefault(trial.variants[0].cause, trial)
        for start in list(starts.values())[:_STARTS]:
            found = [trial for family in FAMILIES for trial in self._seconds(family, start)]
            named = [each for each in found if self._names(each) and self._needs_both(each, start)]
            for trial in sorted(named, key=lambda each: each.gap)[:2]:
                named += self._refined(trial)
            if named:
                self.trials += named
                return min(named, key=lambda each: each.gap)
        return None

    def _further(self, found: Trial) -> Trial:
        """Search what a cause leaves within ordinary rounding, if it is far beyond the noise of other batches."""
        if self.mean(found) <= max(_WORTH_A_SEARCH * self._usual_noise(), self.noise_of(found)):
            return found
        tried = [trial for family in FAMILIES for trial in self._seconds(family, found) if trial.rows.all()]
        best = min(tried, key=lambda each: each.gap, default=found)
        others = [1 - each.gap / found.gap for each in tried if each.variants[-1].cause != best.variants[-1].cause]
        return best if self.share(best, found)[1] > max(_MOST, *others, 0.0) else found

    def _seconds(self, family: str, start: Trial) -> Iterator[Trial]:
        first = start.variants[0]
        for variant in variants_of(family, self.subject, self.side):
            if variant.cause == first.cause or set(dict(variant.change.values)) & set(dict(first.change.values)):
                continue
            # A fit is made again under the change, and data changes come last.
            plain = self.base if first.fit and variant.change.values and len(start.variants) == 1 else start
            variants = (variant, first) if plain is self.base else (variant,)
            for trial in self._attempted(plain, variants):
                yield trial
                if self.is_exact(trial):
                    return

    def _needs_both(self, trial: Trial, start: Trial) -> bool:
        return self.share(trial, start)[1] > MAJORITY

    def _trial(
        self,
        variants: tuple[Variant, ...],
        change: Change,
        sampling: Sampling,
        log_probs: Float64,
        data: tuple[str, ...] = (),
        values: tuple[str, ...] = (),
    ) -> Trial:
        everywhere = np.ones(self.compared.batch.num_rollouts, dtype=np.bool_)
        return Trial(variants, change, sampling, data, self.compared.halves(log_probs), everywhere, values)

    def _with_data(self, log_probs: Float64, data: tuple[str, ...]) -> Float64 | None:
        found: Float64 | None = log_probs
        for name in data:
            found = None if found is None else DATA_CHANGES[name](self.compared, found)
        return found

    def _logits(self, change: Change) -> NDArray[np.float32]:
        if change not in self._replayed:
            self._replayed.add(change)
            self._budget.replays += 1
        return self._experimenter.logits(change)

    def _log_probs(self, change: Change, sampling: Sampling) -> Float64:
        return sampling.log_probs(self._logits(change), self.compared)

    def mean(self, trial: Trial) -> float:
        """Return E[d²]/2 that a trial leaves."""
        return float(trial.halves.sum()) / self._count


def replace_logged(compared: Compared, logged: Float64) -> Compared:
    """Return `compared` with other logged log-probs."""
    return replace(compared, logged=logged)


def _is_whole(trial: Trial) -> bool:
    return len(trial.variants) == 1 and trial.variants[0].cause == "other_weights" and bool(trial.rows.all())


def _value(sampling: Sampling, fit: str) -> str:
    """Return the fitted value in words."""
    value = getattr(sampling, fit)
    if fit == "biases":
        return ", ".join(f"id {token} {'banned' if np.isinf(bias) else f'{bias:+.2f}'}" for token, bias in value)
    if fit == "banned_until":
        return f"id {value[0]} at the first {value[1]} tokens"
    return f"{float(np.max(value)):.4g}"
