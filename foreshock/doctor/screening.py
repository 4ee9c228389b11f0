"""Screening: a variant is replayed on a few rollouts first, and on all only if it explains enough of these."""

import functools

import numpy as np

from foreshock.doctor.catalogue import Variant
from foreshock.doctor.changes import Change
from foreshock.doctor.evidence import Compared, Float64
from foreshock.doctor.floors import Floors
from foreshock.doctor.nulls import chosen_by_chance, healthy_share
from foreshock.doctor.replays import Replays
from foreshock.doctor.trials import Budget, Trial, View

_SCREENED = 0.1
"""The share of the tokens that a variant is screened on; the rollouts that differ most show a cause best."""
_LEAST_SCREENED = 3
_EVERY = 4
"""Weights are screened on every fourth rollout, as rollouts of several versions can be mixed."""


class Screening:
    """The screening of a side's variants, on the rollouts that differ most or on a spread of all.

    `results` has the variants that were only screened, and the share that they explain of the undisturbed replay,
    without and with weights.
    """

    def __init__(self, replays: Replays, floors: Floors, compared: Compared, budget: Budget) -> None:
        self._replays, self._floors, self._compared = replays, floors, compared
        self._made = budget.made
        self._whole = View(compared)
        self._base, self._weights = floors.base, floors.weights
        tokens = max(int(compared.usable.sum()), 1)
        self._is_beyond = bool(
            floors.base.halves.sum() > floors.rounding * tokens
            or (floors.base.halves * floors.weights).sum() > floors.weighted_rounding * tokens
        )
        self._screens: dict[tuple[Trial, str], View] = {}
        self.results: dict[tuple[Variant, ...], tuple[float, float]] = {}

    def passes(self, start: Trial, variants: tuple[Variant, ...], than: Trial) -> bool:
        """Whether variants explain enough of what `than` leaves, in some rollouts, to be worth a replay of all."""
        changed = [each.change for each in variants if each.change.values]
        if any(each.get("engine") for each in changed):
            return True  # an engine scores all rollouts
        if (functools.reduce(Change.plus, changed, start.change), ()) in self._made:
            return True
        if than is self._base and any(each.get("weights") for each in changed):
            shares = self._screen(start, variants, than, "spread")
            if np.any(shares > self._chance_shares(variants, than, "spread")):
                return True
            # The first row has the weights in all rollouts: nothing was chosen by rollout, so that null does not apply.
            return self._is_beyond and bool(np.any(shares[:1] > self._floors.precision_shares))
        if packed := next((each.get("packed") for each in changed if each.get("packed")), None):
            shares = self._screen(start, variants, than, f"block {packed[0]}")
            return bool(np.any(shares > self._floors.precision_shares))
        # A fraction of an update is not fitted to a single rollout.
        is_fitted = any(each.get("delta") for each in changed)
        if not is_fitted and not np.any(self._screen(start, variants, than, "worst") > self._least_shares(than)):
            return False
        shares = self._screen(start, variants, than, "largest")
        return bool(np.any(shares > self._chance_shares(variants, than, "largest")))

    def _chance_shares(self, variants: tuple[Variant, ...], than: Trial, kind: str) -> Float64:
        """Return the shares that variants explain by chance in a screening: what precisions explain of one another.

        Within ordinary rounding, also what the variants explain of a healthy log. Beyond it, for weights, which may
        concern some rollouts only: what a choice for each rollout explains.
        """
        precisions = np.array(self._floors.precision_shares)
        view = self._view(than, kind)
        if than is self._base and not self._is_beyond:
            healthy = healthy_share(self._replays, self._floors, variants, view, in_part=False)
            return np.asarray(np.maximum(precisions, healthy))
        if kind != "spread":
            return precisions
        halves = view.restricted(than).halves
        return np.array([chosen_by_chance(halves * by, view.compared.rows, 2, 0.5) for by in self._weightings(view)])

    def _least_shares(self, than: Trial) -> Float64:
        """Return the least shares of the worst rollout to pass: 0 within rounding, where it shows little of a cause."""
        is_beyond = than is not self._base or self._is_beyond
        return np.array(self._floors.precision_shares if is_beyond else (0.0, 0.0))

    def _weightings(self, view: View) -> tuple[Float64, Float64]:
        """Return the weights of a view's tokens: all 1, and those of the floors."""
        weights = self._weights[view.tokens] if view.rows else self._weights
        return np.ones(weights.size), weights

    def _view(self, than: Trial, kind: str) -> View:
        """Return the rollouts of a screening.

        They are the worst one, those that differ most, a spread of all, or an aligned block with the worst.
        """
        if (than, kind) not in self._screens:
            both = (than.halves, than.halves * self._weights)
            halves = np.asarray(sum(each / max(each.sum(), 1e-300) for each in both))
            if kind in ("worst", "largest"):
                share, least = (0.0, 1) if kind == "worst" else (_SCREENED, _LEAST_SCREENED)
                self._screens[than, kind] = self._whole.of_largest(halves, share, least)
            else:
                order = np.argsort(-np.bincount(self._compared.rows, halves), kind="stable")
                rows = np.sort(order[::_EVERY])
                if kind != "spread":
                    size = int(kind.removeprefix("block "))
                    rows = np.flatnonzero(np.arange(order.size) // size == order[0] // size)
                self._screens[than, kind] = self._whole.of_rows(rows)
        return self._screens[than, kind]

    def _screen(self, start: Trial, variants: tuple[Variant, ...], than: Trial, kind: str) -> Float64:
        """Return the shares of what `than` leaves in a view that trials of `variants` explain, and store them.

        One row a trial, the first for all rollouts of the view; columns: without and with weights.
        """
        view = self._view(than, kind)
        found = self._replays.try_on(view.restricted(start), variants, view)
        before = view.restricted(than).halves
        shares = np.array(
            [
                [
                    1 - float((each.halves * by).sum() / max((before * by).sum(), 1e-300))
                    for by in self._weightings(view)
                ]
                for each in found
            ]
        ).reshape(-1, 2)
        if (
            than is self._base
            and found
            and (kind != "worst" or not np.any(shares.max(axis=0) > self._least_shares(than)))
        ):
            self.results[variants] = (float(shares[0, 0]), float(shares[0, 1]))
        if than is self._base and not self._is_beyond:
            shares = shares[:1]  # within rounding nothing is named for some rollouts only
        return shares
