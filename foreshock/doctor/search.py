"""The search: which variants are tried for a side, in which order, when it stops, and when a cause is named.

1. The announced weights are replayed in three precisions. Their differences are the **ordinary rounding** of this
   model; the best one in other batches gives the **noise**. A side within the noise is reproduced: the search ends.
2. Single variants, by family: data and sampling need no further replay, then weights, then the forward pass, then
   parts. Each is judged for all rollouts, and for the rollouts that it fits better than the undisturbed replay. A
   variant that needs a replay is screened first, on the tenth of the tokens in the rollouts that differ most: all
   tokens are replayed only if it explains most of that.
3. Pairs: every variant on top of the ones that explained most.

A cause is named only if its variant **reproduces** what was logged: to within the noise, or to within ordinary rounding
if the variant explains most of it, with the lower end of its interval over prompts; if the side was within ordinary
rounding before, it also has to explain more than every other cause.
A few tokens at which rounding decides can outweigh all others. A variant is therefore also judged with weights that are
small at such tokens, against the rounding of that mean; then it also has to explain more than every other cause.
Nothing that explains only a part is named. Both floors are measured, so their bounds are too: two independent roundings
differ by twice the variance of one, hence the factor of `_TWO_ROUNDINGS`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from foreshock.doctor.catalogue import FAMILIES, PRECISIONS, Variant, variants_of
from foreshock.doctor.changes import CannotTryError, Change, Experimenter
from foreshock.doctor.evidence import RESOLUTION, Compared, Float64, mean_range, share_range, steadiness
from foreshock.doctor.replays import Replays
from foreshock.doctor.sampling import Sampling
from foreshock.doctor.trials import Budget, Trial, View

__all__ = ["SideSearch"]

_TWO_ROUNDINGS = 2.0
_OTHER_KERNELS = 3.0
"""How many times more than the precisions of torch other kernels may differ: those of vLLM differ 1.4 to 2.3 times."""
_MOST = 0.75
"""A cause explains more than this. In healthy batches the best of all variants explained up to a half of what rounding
left; within ordinary rounding a cause therefore also has to explain more than every other one."""
_FREE = ("data", "sampling")
_CHEAP = (*_FREE, "weights")
_LITTLE = 0.1
"""What a cause leaves below this part of ordinary rounding is searched for free variants only."""
_WORTH_A_SEARCH = 10.0
"""A side within ordinary rounding is searched further if it is beyond so many times the noise of other batches."""
_SCREENED = 0.1
"""The share of the tokens that a variant is screened on; the rollouts that differ most show a cause best."""
_LEAST_SCREENED = 3
_SHARE_FOR_NOISE = 0.5
"""The share of the tokens that the noise of other batches is measured on."""
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
        self.side, self.compared = side, compared
        self.subject = experimenter.subject
        self._samplings, self._budget = samplings, budget
        self._replays = Replays(experimenter, budget, log)
        self._whole = View(compared)
        self._weights = np.ones(compared.rows.size)
        self._screens: dict[Trial, View] = {}
        self.screened: dict[tuple[Variant, ...], tuple[float, float]] = {}
        self.announced = Change.of(weights=experimenter.subject.announced[side])
        self.rounding = self.weighted_rounding = RESOLUTION
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
        if self.mean(self.found) <= self.rounding or self.is_exact(self.found):
            return True
        return self.found is not self.base and self._is_named_by_weights(self.found)

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
            plain = [self._replays.plain(change, each, self._whole) for each in self._samplings]
            tried[precision] = min(plain, key=lambda each: each.gap)
            if self.mean(tried[precision]) <= RESOLUTION:
                return tried[precision]
        best = self._nearest(tried)
        replays = [self._replays.log_probs(trial.change, best.sampling, self._whole) for trial in tried.values()]
        self._weights = steadiness(replays, self.compared)
        pairs = [(0, 1), (0, 2), (1, 2)]
        even = np.ones(self._weights.size)
        floor, weighted_floor = (
            max(self._upper(replays[one], replays[other], self._whole, weights) for one, other in pairs)
            for weights in (even, self._weights)
        )
        self.rounding = _TWO_ROUNDINGS * floor
        self.weighted_rounding = _TWO_ROUNDINGS * _OTHER_KERNELS * weighted_floor
        return best

    def _nearest(self, tried: dict[str, Trial]) -> Trial:
        """Return the usual precision of the side, or one that is clearly nearer: a fault can hide the difference."""
        usual = tried["bfloat16" if self.side == "rollout" else "autocast"]
        nearest = min(tried.values(), key=lambda each: each.gap)
        return nearest if share_range(usual.halves, nearest.halves, self.compared)[1] > MAJORITY else usual

    def _upper(self, one: Float64, other: Float64, view: View, weights: Float64) -> float:
        """Return the upper end of the mean of d²/2 between two replays."""
        differing = replace_logged(view.compared, one)
        return mean_range(weights * differing.halves(other), differing)[1]

    def noise_of(self, trial: Trial) -> float:
        """Return E[d²]/2 between the undisturbed replay in the trial's precision and the same in other batches."""
        precision = str(trial.change.get("precision"))
        if self.rounding == RESOLUTION:
            return 2 * RESOLUTION  # the first replay was exact
        if precision not in self._noises:
            plain = self.announced.plus(Change.of(precision=precision))
            every = int(np.ceil(1 / _SHARE_FOR_NOISE))
            view = self._whole.of_rows(np.arange(0, self.compared.batch.num_rollouts, every))
            sampling = view.restricted(self.base).sampling
            own, again = (
                self._replays.log_probs(change, sampling, view)
                for change in (plain, plain.plus(Change.of(composition="other")))
            )
            self._noises[precision] = max(
                _TWO_ROUNDINGS * self._upper(own, again, view, np.ones(own.size)), 2 * RESOLUTION
            )
        return self._noises[precision]

    def _usual_noise(self) -> float:
        """Return the noise of the base or of a bfloat16 pass, whichever is larger: engines rarely use float32."""
        change = self.base.change.plus(Change.of(precision="bfloat16"))
        return max(self.noise_of(self.base), self.noise_of(replace(self.base, change=change)))

    def _search(self) -> Trial:
        before = self.mean(self.base)
        is_little = before <= min(self.rounding, _WORTH_A_SEARCH * self._usual_noise())
        is_little = is_little and self._weighted_mean(self.base) <= self.weighted_rounding
        if is_little:
            self.not_tried["forward"] = "what is left is hardly more than the noise of other batches"
        for family in _CHEAP if is_little else FAMILIES:
            for trial in self._singles(family, whole_weights_only=is_little):
                self.trials.append(trial)
                if self.is_exact(trial) and self._names(trial):
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
        if named and not self.is_exact(named[0]):
            named += self._refined(named[0])
        return min(named, key=lambda each: each.gap, default=None)

    def _refined(self, trial: Trial) -> Iterator[Trial]:
        """Yield a trial again in the other precisions: the fault may have hidden which one was used."""
        for precision in PRECISIONS:
            if precision == trial.change.get("precision"):
                continue
            start = replace(self.base, change=self.base.change.plus(Change.of(precision=precision)))
            for each in self._attempted(start, trial.variants, trial):
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
        low = self.share(trial)[1]
        if self.is_exact(trial):
            return low > MAJORITY
        if self._is_named_by_weights(trial):
            return True
        if self.mean(trial) > self.rounding:
            return False
        if low <= _MOST:
            return False
        beyond = mean_range(self.base.halves, self.compared)[0] > self.rounding
        return beyond or (bool(trial.rows.all()) and low > self._best_of_others(trial))

    def _is_named_by_weights(self, trial: Trial) -> bool:
        """Whether a trial is named if tokens at which rounding decides count little."""
        if not trial.rows.all():
            return False
        if not self._weighted_mean(trial) <= self.weighted_rounding < self._weighted_mean(self.base):
            return False
        low = share_range(self.base.halves * self._weights, trial.halves * self._weights, self.compared)[1]
        return low > max(_MOST, self._best_of_others(trial, self._weights))

    def _best_of_others(self, trial: Trial, weights: Float64 | float = 1.0) -> float:
        """Return the largest share that single variants of other causes explain: the null of this very batch."""
        causes = {each.cause for each in trial.variants}
        others = [each for each in self.trials if not causes & {one.cause for one in each.variants}]
        whole = max(float((self.base.halves * weights).sum()), 1e-300)
        shares = [1 - float((each.halves * weights).sum()) / whole for each in others]
        kind = 0 if isinstance(weights, float) else 1
        screened = [each[kind] for tried, each in self.screened.items() if not causes & {one.cause for one in tried}]
        return max([*shares, *screened], default=0.0)

    def _singles(self, family: str, *, whole_weights_only: bool) -> Iterator[Trial]:
        for variant in variants_of(family, self.subject, self.side):
            if whole_weights_only and variant.change.values and variant.cause != "other_weights":
                continue
            yield from self._attempted(self.base, (variant,))
        if family == "weights":
            yield from self._mixture()

    def _attempted(self, start: Trial, variants: tuple[Variant, ...], than: Trial | None = None) -> Iterable[Trial]:
        """Return the trials of `variants` on top of `start`, for all rollouts and for those that it fits better.

        None if a screening shows that they do not explain most of what `than` (None: `start`) leaves.
        """
        if variants[-1].change.values and self._budget.is_spent:
            self.not_tried.setdefault(variants[-1].cause, "the budget is spent")
            return []
        try:
            if _is_screened(variants) and self._screen(start, variants, than or start) <= MAJORITY:
                return []
            return self._replays.try_on(start, variants, self._whole)
        except CannotTryError as error:
            self.not_tried.setdefault(f"{variants[-1].cause}: {variants[-1].label}", str(error))
            return []

    def _screen(self, start: Trial, variants: tuple[Variant, ...], than: Trial) -> float:
        """Return the share of what `than` leaves that `variants` explain in the rollouts where it leaves most."""
        if than not in self._screens:
            both = (than.halves, than.halves * self._weights)
            halves = sum(each / max(each.sum(), 1e-300) for each in both)
            self._screens[than] = self._whole.of_largest(np.asarray(halves), _SCREENED, _LEAST_SCREENED)
        view = self._screens[than]
        found = self._replays.try_on(view.restricted(start), variants, view)
        weights = self._weights[view.tokens] if view.rows else self._weights
        shares = []
        for by in (1.0, weights):
            before = max(float((view.restricted(than).halves * by).sum()), 1e-300)
            shares.append(1 - min((float((each.halves * by).sum()) for each in found), default=np.inf) / before)
        if than is self.base:
            self.screened[variants] = (shares[0], shares[1])
        return max(shares)

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
        for start in self._starts():
            found = [trial for family in FAMILIES for trial in self._seconds(family, start)]
            named = [each for each in found if self._names(each) and self._needs_both(each, start)]
            if named:
                named += self._refined(min(named, key=lambda each: each.gap))
                self.trials += named
                return min(named, key=lambda each: each.gap)
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
        """Search what a cause leaves within ordinary rounding, if it is far beyond the noise of other batches."""
        if self.mean(found) <= max(_WORTH_A_SEARCH * self._usual_noise(), self.noise_of(found)):
            return found
        families = FAMILIES if self.mean(found) > _LITTLE * self.rounding else _FREE
        tried = [trial for family in families for trial in self._seconds(family, found) if trial.rows.all()]
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
            for trial in self._attempted(plain, variants, start):
                yield trial
                if self.is_exact(trial):
                    return

    def _needs_both(self, trial: Trial, start: Trial) -> bool:
        return self.share(trial, start)[1] > MAJORITY

    def _weighted_mean(self, trial: Trial) -> float:
        return float((trial.halves * self._weights).sum()) / max(int(self.compared.usable.sum()), 1)

    def mean(self, trial: Trial) -> float:
        """Return E[d²]/2 that a trial leaves."""
        return float(trial.halves.sum()) / max(int(self.compared.usable.sum()), 1)


def replace_logged(compared: Compared, logged: Float64) -> Compared:
    """Return `compared` with other logged log-probs."""
    return replace(compared, logged=logged)


def _is_screened(variants: tuple[Variant, ...]) -> bool:
    """Whether variants need a replay that some rollouts can show: not weights as a whole, which may be a mixture."""
    changed = [each.change for each in variants if each.change.values]
    return bool(changed) and not any(each.get("packed") or each.get("weights") for each in changed)


def _is_whole(trial: Trial) -> bool:
    return len(trial.variants) == 1 and trial.variants[0].cause == "other_weights" and bool(trial.rows.all())
