"""The floors of one side: the nearest undisturbed replay, ordinary rounding, and the noise of other batches."""

from __future__ import annotations

import itertools

import numpy as np

from foreshock.doctor.catalogue import PRECISIONS
from foreshock.doctor.changes import CannotTryError, Change
from foreshock.doctor.evidence import RESOLUTION, Compared, Float64, mean_range, share_range, steadiness
from foreshock.doctor.replays import Replays
from foreshock.doctor.sampling import Sampling
from foreshock.doctor.trials import Trial, View

TWO_ROUNDINGS = 2.0
"""Two independent roundings differ by twice the variance of one."""
ONE_OF_TWO_ROUNDINGS = 1 - 1 / TWO_ROUNDINGS
"""A replay and a log without a fault differ by two roundings; a variant that removes one explains this share."""
OTHER_KERNELS = 2.0
"""Factor by which other kernels may differ more than torch's precisions, weighted. vLLM's kernels leave up to 1.3 times
the mean difference of the precisions with the right weights, up to 4.1 times with wrong ones
(`benchmarks/partial_sync.py`, seeds 7 to 9). Rounding is twice this factor times the upper end of that mean."""
_SHARE_FOR_NOISE = 0.125
"""The share of the tokens that the noise of other batches is measured on."""
_REFERENCE = "float32"
"""Not usual on any side, and the slowest precision on a GPU: replayed in part, and in full only if it is nearer."""
_SHARE_FOR_REFERENCE = 0.5
"""Fraction of the rollouts. With a quarter of 32, small causes are missed: the floor is measured less well."""


class Floors:
    """Replays of the announced weights of a side without any fault.

    `base` is the trial of the usual precision, or of one that is clearly nearer. `healthy` has the log-probs [T] of the
    other precisions and of real engines, NaN where they were not replayed: logs without a fault, on which the nulls of
    all tests are measured. `refused`: the engines that cannot be used, and why. `rounding`: E[d²]/2 in nats² that
    precisions can differ by; `weighted_rounding`: the same if tokens count by `weights` [T], which are small at tokens
    at which rounding decides. `precision_shares`: the shares, without and with weights, that a third precision explains
    of the difference between two.

    `in_float32`: the log-probs are known to be of float32, in which ordinary rounding is far smaller.
    """

    def __init__(
        self,
        side: str,
        replays: Replays,
        compared: Compared,
        announced: Change,
        samplings: tuple[Sampling, ...],
        *,
        in_float32: bool = False,
    ) -> None:
        self._replays, self._compared, self._announced = replays, compared, announced
        self._whole = View(compared)
        self._noises: dict[str, tuple[float, float]] = {}
        self._times: dict[Change, float] = {}
        self.healthy: tuple[Float64, ...] = ()
        self.weights = np.ones(compared.rows.size)
        self.precision_shares = (0.0, 0.0)
        self.refused: dict[str, str] = {}
        self._engines = replays.engines if side == "rollout" else ()
        self.rounding = self.weighted_rounding = RESOLUTION
        if in_float32:
            self.base = self._nearest(_REFERENCE, samplings, self._whole)
            if not self._is_equal(self.base):
                self._measure_float32()
            return
        tried: dict[str, Trial] = {}
        for precision in (each for each in PRECISIONS[:3] if each != _REFERENCE):
            tried[precision] = self._nearest(precision, samplings, self._whole)
            if self._is_equal(tried[precision]):
                self.base = tried[precision]
                return
        usual = tried["bfloat16" if side == "rollout" else "autocast"]
        some = self._some(_SHARE_FOR_REFERENCE)
        reference = self._nearest(_REFERENCE, samplings, some)
        if not some.rows or self._is_clearly_nearer(reference, some.restricted(usual), some.compared):
            tried[_REFERENCE] = reference = self._nearest(_REFERENCE, samplings, self._whole)
            some = self._whole
            if self._is_equal(reference):
                self.base = reference
                return
        nearest = min(tried.values(), key=lambda each: each.gap)
        self.base = nearest if self._is_clearly_nearer(nearest, usual, compared) else usual
        self._measure(tried, reference.change, some)

    def _some(self, share: float) -> View:
        """Return the view of this share of the rollouts, evenly spread."""
        return self._whole.of_rows(np.arange(0, self._compared.batch.num_rollouts, int(1 / share)))

    def _nearest(self, precision: str, samplings: tuple[Sampling, ...], view: View) -> Trial:
        """Return the trial of a precision with the sampling that is nearest."""
        change = self._announced.plus(Change.of(precision=precision))
        parts = [each.at(view.tokens) if view.rows else each for each in samplings]
        return min((self._replays.plain(change, each, view) for each in parts), key=lambda each: each.gap)

    def _is_equal(self, trial: Trial) -> bool:
        return trial.gap <= RESOLUTION * max(int(self._compared.usable.sum()), 1)

    def _is_clearly_nearer(self, trial: Trial, usual: Trial, compared: Compared) -> bool:
        """Return whether a precision is nearer by more than one rounding, half of what two leave.

        A smaller gain can come from a fault that hides the precision.
        """
        return share_range(usual.halves, trial.halves, compared)[1] > ONE_OF_TWO_ROUNDINGS

    def _measure(self, tried: dict[str, Trial], reference: Change, some: View) -> None:
        replays = {
            name: self._replays.log_probs(each.change, self.base.sampling, self._whole) for name, each in tried.items()
        }
        own = str(self.base.change.get("precision"))
        # Where the reference was not replayed, only the others show at which tokens rounding decides.
        filled: dict[str, Float64] = {}
        if some.rows:
            found = self._replays.log_probs(reference, self.base.sampling.at(some.tokens), some)
            replays[_REFERENCE] = np.full(self._compared.rows.size, np.nan)
            replays[_REFERENCE][some.tokens] = found
            filled[_REFERENCE] = replays[own].copy()
            filled[_REFERENCE][some.tokens] = found
        for engine in self._engines:
            try:
                replays_of = self._announced.plus(Change.of(engine=engine))
                replays[engine] = self._replays.log_probs(replays_of, self.base.sampling, self._whole)
            except CannotTryError as error:
                self.refused[f"the engine {engine}"] = str(error)
        self.weights = steadiness([replays[own], *(replays | filled).values()], self._compared)
        self.healthy = tuple(each for name, each in replays.items() if name != own)
        pairs = list(itertools.combinations(replays.values(), 2))
        floor, weighted_floor = (
            max(self._upper(one, other, self._whole, weights) for one, other in pairs)
            for weights in (np.ones(self.weights.size), self.weights)
        )
        self.precision_shares = (
            self._precision_share(replays, own, 1.0),
            self._precision_share(replays, own, self.weights),
        )
        self.rounding = TWO_ROUNDINGS * floor
        self.weighted_rounding = TWO_ROUNDINGS * OTHER_KERNELS * weighted_floor

    def _measure_float32(self) -> None:
        """Measure rounding in float32 alone: the base against itself, decoded token by token."""
        own = self._replays.log_probs(self.base.change, self.base.sampling, self._whole)
        try:
            decoded = self.base.change.plus(Change.of(composition="decode"))
            again = self._replays.log_probs(decoded, self.base.sampling, self._whole)
        except CannotTryError:
            return
        self.healthy = (again,)
        floor = TWO_ROUNDINGS * OTHER_KERNELS * self._upper(own, again, self._whole, self.weights)
        self.rounding = self.weighted_rounding = max(floor, TWO_ROUNDINGS * RESOLUTION)

    def _upper(self, one: Float64, other: Float64, view: View, weights: Float64) -> float:
        """Return the upper end of the mean of d²/2 between two replays."""
        differing = view.compared.having(one, other)
        return mean_range(weights * differing.halves(other), differing)[1]

    def _precision_share(self, replays: dict[str, Float64], own: str, weights: Float64 | float) -> float:
        """Return the largest share of a difference between precisions that a third one explains; 0 if none does.

        Each precision except `own` serves as the log, and the third one as a variant: a variant that explains no more
        could be another order of rounding.
        """

        def share(logged: str, third: str) -> float:
            differing = self._compared.having(replays[logged], replays[third])
            after, before = (float((weights * differing.halves(replays[name])).sum()) for name in (third, own))
            return 1 - after / max(before, 1e-300)

        return max(share(*pair) for pair in itertools.permutations([name for name in replays if name != own], 2))

    def do_precisions_differ(self) -> bool:
        """Return whether two precisions give different log-probs, so that equal ones hardly come from two passes."""
        if self.rounding > RESOLUTION:
            return True
        other = "float32" if self.base.change.get("precision") != "float32" else PRECISIONS[0]
        change = self._announced.plus(Change.of(precision=other))
        values = self._replays.log_probs(change, self.base.sampling, self._whole)
        return mean_range(self._compared.halves(values), self._compared)[1] > RESOLUTION

    def noise_of(self, precision: str) -> tuple[float, float]:
        """Return E[d²]/2 between a precision and the same in other batches, without and with weights.

        It is measured on few tokens, and one of them can lift it above ordinary rounding, which it never exceeds.
        """
        if self.rounding == RESOLUTION:
            return 2 * RESOLUTION, 2 * RESOLUTION  # the first replay was exact
        if precision not in self._noises:
            plain, weighted = self._differing(precision, "other")
            floor = 2 * RESOLUTION
            self._noises[precision] = (
                min(max(TWO_ROUNDINGS * plain, floor), self.rounding),
                min(max(TWO_ROUNDINGS * weighted, floor), self.weighted_rounding),
            )
        return self._noises[precision]

    def times_of(self, change: Change) -> float:
        """Return how many times as far apart two precisions are with a change of the computation; at least 1.

        Numbers that are quantised on the way turn the rounding before them into steps of the coarser type.
        """
        if change not in self._times:
            own = str(self.base.change.get("precision"))
            other = Change.of(precision=next(each for each in PRECISIONS if each not in (own, _REFERENCE)))
            some = self._some(_SHARE_FOR_NOISE)
            sampling = self.base.sampling.at(some.tokens) if some.rows else self.base.sampling
            plain, changed = (
                self._upper(
                    self._replays.log_probs(each, sampling, some),
                    self._replays.log_probs(each.plus(other), sampling, some),
                    some,
                    np.ones(some.compared.rows.size),
                )
                for each in (self.base.change, change)
            )
            self._times[change] = max(1.0, changed / max(plain, RESOLUTION))
        return self._times[change]

    def decoding(self) -> tuple[float, float]:
        """Return E[d²]/2 between the base and the base decoded token by token, without and with weights.

        0 if the rollouts cannot be decoded.
        """
        try:
            return self._differing(str(self.base.change.get("precision")), "decode")
        except CannotTryError:
            return 0.0, 0.0

    def _differing(self, precision: str, composition: str) -> tuple[float, float]:
        """Return the upper end of E[d²]/2 between a precision in two batch compositions, on some rollouts."""
        view = self._some(_SHARE_FOR_NOISE)
        sampling = view.restricted(self.base).sampling
        plain = self._announced.plus(Change.of(precision=precision))
        own, again = (
            self._replays.log_probs(change, sampling, view)
            for change in (plain, plain.plus(Change.of(composition=composition)))
        )
        weights = self.weights[view.tokens] if view.rows else self.weights
        return self._upper(own, again, view, np.ones(own.size)), self._upper(own, again, view, weights)
