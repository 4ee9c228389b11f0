"""Trials: variants on top of one another, replayed, fitted and compared with what a side logged."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from foreshock.doctor.catalogue import Variant
from foreshock.doctor.changes import Change, Experimenter
from foreshock.doctor.data import DATA_CHANGES
from foreshock.doctor.evidence import LARGEST, RESOLUTION, Compared, Float64, half_widths
from foreshock.doctor.fits import Fitting, fitted
from foreshock.doctor.sampling import Sampling
from foreshock.doctor.trials import Budget, Trial, View, switched

_FRACTIONS = (0.0, 0.5, 2.0, -1.0)
"""Fractions of an update from which a fit may start."""
_MOST_FRACTIONS = 6
"""Most steps of the fit of a fraction of an update, each with a replay."""
_LARGEST_FRACTION = 8.0
_FAR = 0.1
"""Least distance of two fractions whose log-probs give a slope: it is that of their rounding if they are nearer."""


class Replays:
    """The maker of trials: replays by an experimenter are counted in a budget, and `log` gets a line for each."""

    def __init__(self, experimenter: Experimenter, budget: Budget, log: Callable[[str], None]) -> None:
        self._experimenter, self._budget, self._log = experimenter, budget, log
        self._fractions: dict[tuple[Change, str], tuple[float, ...]] = {}
        self.engines = tuple(each for each in experimenter.subject.engines if ":" not in each)

    def plain(self, change: Change, sampling: Sampling, view: View) -> Trial:
        """Return the trial of a change without variants."""
        halves = view.compared.halves(self.log_probs(change, sampling, view))
        return Trial((), change, sampling, (), halves, np.ones(view.compared.batch.num_rollouts, np.bool_))

    def log_probs(self, change: Change, sampling: Sampling, view: View) -> Float64:
        """Return the log-probs of the tokens of a view under a change. Raises CannotTryError."""
        if engine := change.get("engine"):
            self._budget.count(change, View(view.compared))
            found = self._experimenter.log_probs(engine).astype(np.float64)
            return np.asarray(found[view.tokens] if view.rows else found)
        return sampling.log_probs(self._logits(change, view), view.compared)

    def try_on(
        self, start: Trial, variants: tuple[Variant, ...], view: View, *, is_silent: bool = False
    ) -> list[Trial]:
        """Return the trials of `variants` on top of `start`, a trial of the view; then those of parts of it
        (`_in_part`).

        Empty if a fit or a change of data does not apply. Raises CannotTryError.
        """
        places = dict(enumerate(variants, len(start.values)))
        fits = {place: each.fit for place, each in places.items() if each.fit}
        updates = {place: each.change.get("delta") for place, each in places.items() if each.change.get("delta")}
        changes = (each.change for place, each in places.items() if place not in updates)
        trial = replace(
            start,
            variants=(*start.variants, *variants),
            change=functools.reduce(Change.plus, changes, start.change),
            data=(*start.data, *(each.data for each in variants if each.data)),
            rows=np.ones(view.compared.batch.num_rollouts, np.bool_),
            in_part=False,
            is_mixture=False,
        )
        values = [*start.values, *(each.label for each in variants)]
        for place, (name, _) in updates.items():
            fraction = self._fraction(trial, name, view)
            if fraction is None:
                return []
            trial, values[place] = replace(trial, change=fraction[0]), f"{fraction[1]} {values[place]}"
        if fits:
            together = fitted(list(fits.values()), self.fitting(trial, view), trial.sampling)
            if together is None:
                return []
            trial = replace(trial, sampling=together)
            for place, fit in fits.items():
                values[place] = _value(together, fit)
        log_probs = self._with_data(self.log_probs(trial.change, trial.sampling, view), trial.data, view, start.data)
        if log_probs is None:
            return []
        trial = replace(trial, halves=view.compared.halves(log_probs), values=tuple(values))
        if variants[-1].change.values and not is_silent:
            mean = trial.gap / max(int(view.compared.usable.sum()), 1)
            self._log(f"{variants[-1].cause}, {values[-1]}: E[d²]/2 {mean:.2e}")
        return [trial, *self._in_part(trial, start, view, list(fits.values()))]

    def _fraction(self, trial: Trial, name: str, view: View) -> tuple[Change, str] | None:
        """Return a change with the fraction of the update since the weights `name` that fits best, and its words.

        None if none or all of the update fits as well: 0 is these weights, 1 the announced ones. Between them and
        beyond, log-probs are nearly straight lines.
        """
        change, sampling, target = trial.change, trial.sampling, self._unchanged_data(trial, view)
        at = {1.0: self.log_probs(change, sampling, view)}

        def gap(fraction: float) -> float:
            if fraction not in at:
                scaled = change.plus(Change.of(delta=(name, fraction)) if fraction else Change.of(weights=name))
                at[fraction] = self.log_probs(scaled, sampling, view)
            return target.gap(at[fraction])

        best = min(self._fractions.get((change, name), _FRACTIONS), key=gap)
        width = math.inf
        for _ in range(_MOST_FRACTIONS):
            far = [each for each in at if abs(each - best) > _FAR]
            other = min(far, key=lambda each: abs(each - best), default=0.0)
            gap(other)
            slope, left = (at[other] - at[best]) / (other - best), target.logged - at[best]
            used = target.usable & np.isfinite(slope) & (np.abs(left) < LARGEST)
            # Tokens that an update moves far are not on a straight line, and would outweigh all others.
            weights = np.where(used, 1 / np.sqrt(1 + slope**2 / max(np.median(slope[used] ** 2), RESOLUTION)), 0.0)
            slope, left = (weights * np.where(used, each, 0.0) for each in (slope, left))
            step = float(slope @ left) / max(float(slope @ slope), 1e-300)
            width = float(half_widths(slope[None], left - step * slope, view.compared.groups)[0])
            tried = _shortest(best + step, width / 4)
            if tried in at or abs(tried) > _LARGEST_FRACTION or gap(tried) >= gap(best):
                break
            best = tried
        best = min((best, float(np.round(best, 1))), key=gap)
        self._fractions[change, name] = (best,)
        if best == 1.0 or abs(best) <= width:
            return None
        words = {2.0: "twice", 0.5: "half", -1.0: "with the wrong sign"}
        fitted = change.plus(Change.of(delta=(name, best)))
        return fitted, words.get(best, f"times {best:.4g} ± {width:.1g}")

    def fitting(self, trial: Trial, view: View) -> Fitting:
        """Return the input of fits of sampling parameters on top of a trial."""
        target = self._unchanged_data(trial, view)
        return Fitting(self._logits(trial.change, view), target, self._experimenter.subject.ends, self._budget.check)

    def _unchanged_data(self, trial: Trial, view: View) -> Compared:
        """Return the tokens that a fit has to explain: those that no change of data alters."""
        plain = self.log_probs(trial.change, trial.sampling, view) if trial.data else None
        changed = None if plain is None else self._with_data(plain, trial.data, view)
        if changed is None:
            return view.compared
        return replace(view.compared, usable=view.compared.usable & (changed == plain))

    def _in_part(self, trial: Trial, start: Trial, view: View, fits: list[str]) -> Iterator[Trial]:
        """Yield trials of only the rollouts that it fits better than `start`, if these are some and not all.

        A parameter fitted to all rollouts is fitted again to these. With other weights, also a switch within rollouts.
        """
        compared = view.compared
        better = compared.by_rollout(trial.halves) < compared.by_rollout(start.halves)
        tokens = better[compared.rows]
        if 2 <= better.sum() < better.size - 1:
            yield replace(trial, halves=np.where(tokens, trial.halves, start.halves), rows=better, in_part=True)
            # An engine gives no logits: only fits need them.
            fitting = self.fitting(replace(trial, sampling=start.sampling), view) if fits and not trial.data else None
            part = replace(compared, usable=compared.usable & tokens)
            found = None if fitting is None else fitted(fits, replace(fitting, compared=part), start.sampling)
            if fitting is not None and found is not None:
                halves = compared.halves(found.log_probs(fitting.logits, compared))
                rows = compared.by_rollout(halves) < compared.by_rollout(start.halves)
                halves = np.where(rows[compared.rows], halves, start.halves)
                values = (*trial.values[: -len(fits)], *(_value(found, fit) for fit in fits))
                yield replace(trial, sampling=found, halves=halves, rows=rows, values=values, in_part=True)
        if trial.change.get("weights") != start.change.get("weights"):
            halves = switched(start.halves, trial.halves, compared.batch.response_offsets)
            yield replace(trial, halves=halves, rows=better, in_part=True)

    def _with_data(
        self, log_probs: Float64, data: tuple[str, ...], view: View, known: tuple[str, ...] = ()
    ) -> Float64 | None:
        """Return the log-probs after changes of data; None if one has no mark in the view and is not `known` from
        all."""
        for name in data:
            changed = DATA_CHANGES[name](view.compared, log_probs)
            if changed is None and name not in known:
                return None
            log_probs = log_probs if changed is None else changed
        return log_probs

    def _logits(self, change: Change, view: View) -> NDArray[np.float32]:
        self._budget.count(change, view)
        return self._experimenter.logits(change, view.rows)


def _shortest(value: float, width: float) -> float:
    """Return the shortest decimal within `width` of a value: people set 0.5, not 0.4997."""
    tried = (float(np.round(value, digits)) for digits in range(4))
    return next((each for each in tried if abs(each - value) <= width), value)


def _value(sampling: Sampling, fit: str) -> str:
    """Return the fitted value in words."""
    if fit in ("biases", "bias_of_ids"):
        biases = sorted(sampling.biases, key=lambda each: -abs(each[1]))
        words = [f"id {token} {'banned' if np.isinf(bias) else f'{bias:+.2f}'}" for token, bias in biases[:4]]
        if len(biases) > len(words):
            spread = float(np.std([bias for _, bias in biases]))
            words = [f"a bias of each of {len(biases)} ids, of standard deviation {spread:.2g}", *words]
        return ", ".join(words)
    if fit == "banned_until" and sampling.banned_until is not None:
        ids, first = sampling.banned_until
        return f"{'id' if len(ids) == 1 else 'ids'} {', '.join(map(str, ids))} at the first {first} tokens"
    return f"{float(np.max(getattr(sampling, fit))):.4g}"
