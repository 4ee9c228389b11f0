"""The floors of one side: the undisturbed replay that is nearest, ordinary rounding, and the noise of other batches."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from foreshock.doctor.catalogue import PRECISIONS
from foreshock.doctor.changes import CannotTryError, Change
from foreshock.doctor.evidence import RESOLUTION, Compared, Float64, mean_range, share_range, steadiness
from foreshock.doctor.replays import Replays
from foreshock.doctor.sampling import Sampling
from foreshock.doctor.trials import Trial, View

__all__ = ["ONE_OF_TWO_ROUNDINGS", "Floors"]

_TWO_ROUNDINGS = 2.0
"""Two independent roundings differ by twice the variance of one."""
ONE_OF_TWO_ROUNDINGS = 1 - 1 / _TWO_ROUNDINGS
"""A replay and a log without a fault differ by two roundings; a variant that removes one explains this share."""
_OTHER_KERNELS = 3.0
"""How many times more than the precisions of torch other kernels may differ: those of vLLM differ 1.4 to 2.3 times."""
_SHARE_FOR_NOISE = 0.125
"""The share of the tokens that the noise of other batches is measured on."""


class Floors:
    """What the announced weights of a side give without any fault.

    `base` is the trial of the usual precision, or of one that is clearly nearer. `healthy` has the log-probs [T]
    of the others and of real engines: logs of another scorer without a fault, on which the nulls of all tests are
    measured; `refused`: the engines that cannot be asked, and why. `rounding`:
    E[d²]/2 in nats² that precisions can differ by; `weighted_rounding`: the same if tokens count by `weights` [T],
    which are small at tokens at which rounding decides. `precision_shares`: the shares, without and with weights, that
    a third precision explains of the difference between two.
    """

    def __init__(
        self, side: str, replays: Replays, compared: Compared, announced: Change, samplings: tuple[Sampling, ...]
    ) -> None:
        self._replays, self._compared, self._announced = replays, compared, announced
        self._whole = View(compared)
        self._noises: dict[str, tuple[float, float]] = {}
        self.healthy: tuple[Float64, ...] = ()
        self.weights = np.ones(compared.rows.size)
        self.precision_shares = (0.0, 0.0)
        self.refused: dict[str, str] = {}
        self._engines = replays.engines if side == "rollout" else ()
        self.rounding = self.weighted_rounding = RESOLUTION
        tried: dict[str, Trial] = {}
        for precision in PRECISIONS[:3]:
            change = announced.plus(Change.of(precision=precision))
            plain = [replays.plain(change, each, self._whole) for each in samplings]
            tried[precision] = min(plain, key=lambda each: each.gap)
            if tried[precision].gap <= RESOLUTION * max(int(compared.usable.sum()), 1):
                self.base = tried[precision]
                return
        usual = tried["bfloat16" if side == "rollout" else "autocast"]
        nearest = min(tried.values(), key=lambda each: each.gap)
        # One rounding less is half of what two leave; what is nearer by less can be a fault that hides the precision.
        self.base = nearest if share_range(usual.halves, nearest.halves, compared)[1] > ONE_OF_TWO_ROUNDINGS else usual
        self._measure(tried)

    def _measure(self, tried: dict[str, Trial]) -> None:
        replays = {
            name: self._replays.log_probs(each.change, self.base.sampling, self._whole) for name, each in tried.items()
        }
        for engine in self._engines:
            try:
                replays_of = self._announced.plus(Change.of(engine=engine))
                replays[engine] = self._replays.log_probs(replays_of, self.base.sampling, self._whole)
            except CannotTryError as error:
                self.refused[f"the engine {engine}"] = str(error)
        self.weights = steadiness(list(replays.values()), self._compared)
        own = str(self.base.change.get("precision"))
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
        self.rounding = _TWO_ROUNDINGS * floor
        self.weighted_rounding = _TWO_ROUNDINGS * _OTHER_KERNELS * weighted_floor

    def _upper(self, one: Float64, other: Float64, view: View, weights: Float64) -> float:
        """Return the upper end of the mean of d²/2 between two replays."""
        differing = replace(view.compared, logged=one)
        return mean_range(weights * differing.halves(other), differing)[1]

    def _precision_share(self, replays: dict[str, Float64], own: str, weights: Float64 | float) -> float:
        """Return the largest share of a difference between precisions that a third one explains; 0 if none does.

        The logs are those of each precision but `own`, and the third one stands for a variant: what explains no more
        could be another order of rounding.
        """

        def size(one: str, other: str) -> float:
            differing = replace(self._compared, logged=replays[one])
            return float((weights * differing.halves(replays[other])).sum())

        pairs = itertools.permutations([name for name in replays if name != own], 2)
        return max(1 - size(logged, third) / max(size(logged, own), 1e-300) for logged, third in pairs)

    def do_precisions_differ(self) -> bool:
        """Return whether two precisions give other log-probs, so that equal ones hardly come from two passes."""
        if self.rounding > RESOLUTION:
            return True
        other = "float32" if self.base.change.get("precision") != "float32" else PRECISIONS[0]
        change = self._announced.plus(Change.of(precision=other))
        values = self._replays.log_probs(change, self.base.sampling, self._whole)
        return mean_range(self._compared.halves(values), self._compared)[1] > RESOLUTION

    def noise_of(self, precision: str) -> tuple[float, float]:
        """Return E[d²]/2 between a precision and the same in other batches, without and with weights."""
        if self.rounding == RESOLUTION:
            return 2 * RESOLUTION, 2 * RESOLUTION  # the first replay was exact
        if precision not in self._noises:
            plain, weighted = self._differing(precision, "other")
            floor = 2 * RESOLUTION
            self._noises[precision] = max(_TWO_ROUNDINGS * plain, floor), max(_TWO_ROUNDINGS * weighted, floor)
        return self._noises[precision]

    def decoding(self) -> tuple[float, float]:
        """Return E[d²]/2 between the base and the same decoded token by token, without and with weights.

        0 if the rollouts cannot be decoded.
        """
        try:
            return self._differing(str(self.base.change.get("precision")), "decode")
        except CannotTryError:
            return 0.0, 0.0

    def _differing(self, precision: str, composition: str) -> tuple[float, float]:
        """Return the upper end of E[d²]/2 between a precision and another composition of it, on some rollouts."""
        every = int(np.ceil(1 / _SHARE_FOR_NOISE))
        view = self._whole.of_rows(np.arange(0, self._compared.batch.num_rollouts, every))
        sampling = view.restricted(self.base).sampling
        plain = self._announced.plus(Change.of(precision=precision))
        own, again = (
            self._replays.log_probs(change, sampling, view)
            for change in (plain, plain.plus(Change.of(composition=composition)))
        )
        weights = self.weights[view.tokens] if view.rows else self.weights
        return self._upper(own, again, view, np.ones(own.size)), self._upper(own, again, view, weights)
