"""Fits of sampling parameters to logged log-probs, one alone or several together, from the logits of one replay.

A single parameter is fitted on a grid. Several are chosen one after another (`selected`): each time the parameter that
explains most of what the others leave, after which all are fitted again. A parameter enters only if so many tokens
improve that none of those tried would do this by chance, and leaves again if the others do as well without it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.doctor.evidence import CHANCE, LARGEST, Compared, Float64, chance_of, half_widths, share_range
from foreshock.doctor.sampling import Sampling

_FIT_LOGITS = 1 << 21
"""Largest number of logits in a fit: more tokens are thinned out evenly, to no fewer than the next number."""
_LEAST_FIT_TOKENS = 128
_COARSE_LOGITS = 1 << 17
"""The same where many starts are tried."""
_MOST_IDS = 4
_MOST_ENDS = 16
_MOST_PARAMETERS = 4
_LEAST_FURTHER = 0.1
"""Least share of what the others leave that a further parameter explains; precisions are within it of one another."""
_CLEARLY_LESS = 0.8
"""Largest part of what the others leave that a parameter leaves in the place of another of its kind."""
_LITTLE_LEFT = 0.05
"""Part of the difference that parameters chosen together may leave without another search."""
_FAR_OFF = 10.0
"""Multiple of d²/2 of nine tenths of the tokens beyond which a token counts no more."""
_KNOWN_SHARE = 0.9
"""Least share that biases of all ids explain of prompts that they were not fitted to."""
_SECTIONS = 20
_FOLDS = 4
_RIDGE = 1e-3
_RIDGE_STEPS = 10
_LEAST_GAIN = 10.0
"""Least gain in log-likelihood of the sampled tokens by one parameter: by chance it has a probability below 2e-4."""
_SAME = 0.995
"""Correlation of the slopes of two parameters from which the data cannot tell them apart."""
_HEATS_OF_TOKENS = np.geomspace(0.1, 3.0, 80).tolist()
"""Temperatures that sampled tokens are compared with; half a step costs hardly any likelihood."""
_HEATS = (0.7, 0.8, 0.9, 1.1, 1.25, 1.4)
"""Factors of a fitted temperature from which a truncation is fitted with it."""
_AROUND_ONE, _OFF_ONE = ("temperature", "repetition", "repetition_of_response"), 0.005
"""Parameters that are 1 where they change nothing, and the least distance from 1 that is worth a name."""


@dataclass(frozen=True, slots=True, eq=False)
class Fitting:
    """The input of a fit: logits and logged log-probs of tokens, known ends of sequences, and a check of the budget."""

    logits: NDArray[np.float32]
    compared: Compared
    ends: tuple[int, ...] = ()
    check: Callable[[], None] = lambda: None

    def gap(self, sampling: Sampling) -> float:
        """Return half the mean square of what `sampling` leaves unexplained, in nats²."""
        self.check()
        return self.compared.gap(self.log_probs(sampling))

    def log_probs(self, sampling: Sampling) -> Float64:
        """Return the log-probs of the tokens, [T]."""
        return sampling.log_probs(self.logits, self.compared)

    def probabilities(self, sampling: Sampling) -> Float64:
        """Return the distributions of the tokens, before a truncation, [T, V]."""
        values = np.exp(sampling.shaped(self.logits, self.compared))
        return np.asarray(values / values.sum(axis=1, keepdims=True))

    def halves(self, sampling: Sampling) -> Float64:
        """Return d²/2 of each token, [T]."""
        return self.compared.halves(self.log_probs(sampling))

    def thinned(self, base: Sampling, most: int) -> tuple[Fitting, Sampling]:
        """Return the fit of evenly spread tokens with at most so many logits, and `base` at these."""
        tokens, vocabulary = self.logits.shape
        stride = max(1, -(-tokens // max(most // vocabulary, _LEAST_FIT_TOKENS)))
        if stride == 1:
            return self, base
        thin = np.arange(0, tokens, stride)
        return replace(self, logits=self.logits[thin], compared=self.compared.at(thin)), base.at(thin)


Fit = Callable[[Fitting, Sampling], Sampling | None]
"""Fits a parameter on top of a distribution; None if that does not help."""


def fitted(names: Sequence[str], fitting: Fitting, base: Sampling) -> Sampling | None:
    """Return `base` with the parameters `names` of FITS fitted together; None if one of them does not help."""
    fitting, found = fitting.thinned(base, _FIT_LOGITS)
    for place, name in enumerate(names):
        extended = _extended(fitting, found, names[:place], name)
        if extended is None:
            return None
        found = extended
    return found


def selected(fitting: Fitting, base: Sampling) -> tuple[str, ...]:
    """Return the parameters that together explain the logged log-probs best, the first alone explains most.

    A truncation can explain more than the temperature that hides beside another parameter: if they leave more than a
    little, parameters are also chosen beside a temperature.
    """
    fitting, found = fitting.thinned(base, _FIT_LOGITS)
    coarse, _ = fitting.thinned(base, _COARSE_LOGITS)
    names, best = _chosen(fitting, coarse, found, ())
    if "temperature" not in names and fitting.gap(best) > _LITTLE_LEFT * fitting.gap(found):
        heated = FITS["temperature"](fitting, found)
        if heated is not None:
            others, other = _chosen(fitting, coarse, heated, ("temperature",))
            if fitting.gap(other) < _CLEARLY_LESS * fitting.gap(best):
                names, best = others, other
    return tuple(each for each in names if each not in _AROUND_ONE or abs(getattr(best, each) - 1.0) >= _OFF_ONE)


def _chosen(
    fitting: Fitting, coarse: Fitting, found: Sampling, names: tuple[str, ...]
) -> tuple[tuple[str, ...], Sampling]:
    """Return further parameters chosen one after another beside `names`, and all of them fitted."""
    while len(names) < _MOST_PARAMETERS and (further := _further(fitting, coarse, found, names)):
        names, found = (*names, further[0]), further[1]
        for name in names[:-1]:
            rest = tuple(each for each in names if each != name)
            without = _together(fitting, found.having(name, getattr(Sampling(), name)), rest)
            if not _is_better(fitting, without, found):
                found, names = without, rest
    return _exchanged(fitting, found, names)


def _further(fitting: Fitting, coarse: Fitting, found: Sampling, names: tuple[str, ...]) -> tuple[str, Sampling] | None:
    """Return the parameter that explains most of what `found` leaves, with all fitted again; None if by chance."""
    others = [each for each in _TOGETHER if each not in names and not _EXCLUDES.get(each, set()) & set(names)]
    starts = {name: fit for name in others if (fit := _started(coarse, _at(coarse, fitting, found), names, name))}
    known: dict[str, Sampling | None] = {}
    for largest in (np.inf, _largest(fitting, found)):
        left = {name: float(np.minimum(coarse.halves(start), largest).sum()) for name, start in starts.items()}
        nearest = sorted(left, key=lambda name: left[name])[:2]
        known |= {name: _extended(fitting, found, names, name) for name in nearest if name not in known}
        tried = {name: fit for name in nearest if (fit := known[name])}
        left = {name: float(np.minimum(fitting.halves(fit), largest).sum()) for name, fit in tried.items()}
        best = min(left, key=lambda name: left[name], default="")
        if best and _is_better(fitting, found, tried[best]):
            return best, tried[best]
    return None


def _exchanged(fitting: Fitting, found: Sampling, names: tuple[str, ...]) -> tuple[tuple[str, ...], Sampling]:
    """Return the names and their fit, each parameter replaced by one of its kind that fits clearly better.

    The first one is chosen before the others are known.
    """
    for place, name in enumerate(names if len(names) > 1 else ()):
        rest = (*names[:place], *names[place + 1 :])
        without = _together(fitting, found.having(name, getattr(Sampling(), name)), rest)
        kind = next((each for each in _KINDS if name in each), ())
        for other in (each for each in kind if each not in names):
            fit = _extended(fitting, without, rest, other)
            if fit is not None and fitting.gap(fit) < _CLEARLY_LESS * fitting.gap(found):
                found, names = fit, (*names[:place], other, *names[place + 1 :])
    return names, found


def drawn(fitting: Fitting, plain: Sampling) -> tuple[str, float, float] | None:
    """Return the truncation under which the sampled tokens are likeliest, its value, and the expected number of tokens
    that `plain` would have drawn beyond it; None if the tokens show none.

    The logged log-probs are not used: raw ones are the same whatever sampled. A temperature is not named, as tokens of
    another policy show one too, but it must explain less.
    """
    compared = fitting.compared
    ids, rows = compared.ids[compared.usable], np.arange(int(compared.usable.sum()))
    probabilities = fitting.probabilities(plain)[compared.usable]
    own = probabilities[rows, ids][:, None]
    before = np.where(probabilities > own, probabilities, 0.0).sum(axis=1)
    largest = probabilities.max(axis=1)
    bounds: dict[str, float] = {
        "top_k": int((probabilities > own).sum(axis=1).max(initial=0)) + 1,
        "top_p": float(before.max(initial=0.0)) + 1e-6,
        "min_p": float((own[:, 0] / largest).min(initial=1.0)) * (1 - 1e-6),
    }
    likely = float(fitting.log_probs(plain)[compared.usable].sum())

    def gain(name: str, value: float) -> float:
        return float(fitting.log_probs(plain.having(name, value))[compared.usable].sum()) - likely

    best = max(bounds, key=lambda name: gain(name, bounds[name]))
    heated = max(gain("temperature", each) for each in _HEATS_OF_TOKENS)
    if gain(best, bounds[best]) < max(heated, _LEAST_GAIN):
        return None
    kept = np.exp(fitting.log_probs(plain) - fitting.log_probs(plain.having(best, bounds[best])))[compared.usable]
    return best, bounds[best], float((1 - kept).sum())


def uncertainties(names: Sequence[str], fitting: Fitting, sampling: Sampling) -> dict[str, float]:
    """Return the half-widths of the 95 % intervals over prompts of parameters that were fitted together.

    Those on a grid have none. "presence + frequency" is that of the sum, if the data cannot tell the two apart.
    """
    own = [each for each in names if each in CONTINUOUS and isinstance(getattr(sampling, each), float)]
    if not own:
        return {}
    left, slopes = _slopes(fitting, sampling, [(each, 0) for each in own])
    found = dict(zip(own, half_widths(slopes, left, fitting.compared.groups).tolist(), strict=True))
    penalties = [each for each in ("presence", "frequency") if each in own]
    if len(penalties) == 1:
        _, both = _slopes(fitting, sampling, [("presence", 0), ("frequency", 0)])
        sizes = np.sqrt((both**2).sum(axis=1))
        if both[0] @ both[1] > _SAME * sizes[0] * sizes[1]:
            found["presence + frequency"] = found.pop(penalties[0])
    return found


def _at(coarse: Fitting, fitting: Fitting, sampling: Sampling) -> Sampling:
    """Return a distribution of `fitting` at the tokens of `coarse`."""
    return sampling if coarse is fitting else fitting.thinned(sampling, _COARSE_LOGITS)[1]


def _started(coarse: Fitting, found: Sampling, names: Sequence[str], name: str) -> Sampling | None:
    """Return the best fit of one more parameter, on the others or, for a truncation, on others that truncate less.

    A temperature that was fitted alone is too low for a truncation or a bias beside it, and another truncation too
    narrow.
    """
    starts = [found]
    if name in (*TRUNCATIONS, "biases") and "temperature" in names:
        starts += [found.having("temperature", found.temperature * factor) for factor in _HEATS]
    if name in TRUNCATIONS and "top_k" in names:
        starts += [found.having("top_k", int(found.top_k) + more) for more in (1, 2, 3, 4, 6, 8, 12, 16)]
    if name in TRUNCATIONS and "top_p" in names:
        starts += [found.having("top_p", 1 - (1 - found.top_p) * part) for part in (0.8, 0.6, 0.4, 0.2)]
    fits = [fit for start in starts if (fit := FITS[name](coarse, start)) is not None]
    return min(fits, key=coarse.gap, default=None)


def _extended(fitting: Fitting, found: Sampling, names: Sequence[str], name: str) -> Sampling | None:
    """Return `found`, fitted in `names`, with the parameter `name` too; None if that does not help."""
    if not names:
        return FITS[name](fitting, found)
    coarse, at = fitting.thinned(found, _COARSE_LOGITS)
    start = _started(coarse, at, names, name)
    if start is None:
        return None
    for each in (*names, name):
        found = found.having(each, getattr(start, each))
    return _together(fitting, found, (*names, name))


def _together(fitting: Fitting, found: Sampling, names: Sequence[str]) -> Sampling:
    """Fit the parameters `names` again from their values in `found`, until nothing improves."""
    gap = fitting.gap(found)
    for _ in range(4):
        trial = _newton(fitting, found, names)
        for name in (each for each in names if each not in CONTINUOUS):
            again = FITS[name](fitting, trial.having(name, getattr(Sampling(), name)))
            trial = min((trial, *([again] if again else [])), key=fitting.gap)
        now = fitting.gap(trial)
        if now < gap:
            found = trial
        if now > 0.99 * gap:
            break
        gap = now
    for name in (each for each in names if each in CONTINUOUS):
        found = found.having(name, _tidy(fitting, found, name, getattr(found, name)))
    return found


def _newton(fitting: Fitting, found: Sampling, names: Sequence[str]) -> Sampling:
    """Fit the continuous parameters, and the biases of single ids, by least squares of what is left."""
    places = [(name, 0) for name in names if name in CONTINUOUS]
    if "biases" in names:
        places += [("biases", place) for place, each in enumerate(found.biases) if np.isfinite(each[1])]
    gap = fitting.gap(found) if places else 0.0
    for _ in range(8 if places else 0):
        left, slopes = _slopes(fitting, found, places)
        step = np.linalg.lstsq(slopes.T, left, rcond=None)[0]
        for factor in (1.0, 0.5, 0.2):
            trial = found
            for place, size in zip(places, (factor * step).tolist(), strict=True):
                trial = _moved(trial, place, size)
            if (now := fitting.gap(trial)) < gap:
                break
        else:
            return found
        found, gained, gap = trial, 1 - now / gap, now
        if gained < 1e-3:
            break
    return found


def _slopes(fitting: Fitting, found: Sampling, places: Sequence[tuple[str, int]]) -> tuple[Float64, Float64]:
    """Return what is left of each token [T], and the derivatives of its log-prob by parameter [K, T]."""
    plain, step = fitting.log_probs(found), 1e-4
    left = fitting.compared.logged - plain
    slopes = np.stack([(fitting.log_probs(_moved(found, place, step)) - plain) / step for place in places])
    # A step that moves the border of a truncation gives no slope.
    used = fitting.compared.usable & (np.abs(left) < LARGEST) & np.isfinite(slopes).all(axis=0)
    used &= (np.abs(slopes) < LARGEST / step / 100).all(axis=0)
    return np.where(used, left, 0.0), np.where(used, slopes, 0.0)


def _moved(found: Sampling, place: tuple[str, int], step: float) -> Sampling:
    """Return the distribution with one parameter moved, within its range."""
    name, number = place
    if name == "biases":
        token, bias = found.biases[number]
        return found.having(name, (*found.biases[:number], (token, bias + step), *found.biases[number + 1 :]))
    grid = CONTINUOUS[name]
    return found.having(name, np.clip(getattr(found, name) + step, 0.5 * grid[0] if grid[0] > 0 else grid[0], grid[-1]))


def _largest(fitting: Fitting, found: Sampling) -> float:
    """Return d²/2 beyond which a token counts no more: such tokens are the same whatever parameter is added."""
    return _FAR_OFF * float(np.quantile(fitting.halves(found)[fitting.compared.usable], 0.9))


def _is_better(fitting: Fitting, before: Sampling, after: Sampling) -> bool:
    """Whether what one distribution explains of what another leaves is more than chance, at most or at some tokens.

    It may be less for the few tokens at which rounding decides, such as those of another expert, if it is for the rest.
    """
    by_token = replace(fitting.compared, groups=np.arange(fitting.compared.rows.size))
    for largest in (np.inf, _largest(fitting, after)):
        left, now = (np.minimum(fitting.halves(each), largest) for each in (before, after))
        if now.sum() <= (1 - _LEAST_FURTHER) * left.sum() and (
            share_range(left, now, by_token)[1] > _LEAST_FURTHER or chance_of(left - now) * len(_TOGETHER) < CHANCE
        ):
            return True
    return False


def _continuous(field: str) -> Fit:
    """Return a fit of a continuous parameter: the best value of a grid, then ever narrower sections around it."""

    def fit(fitting: Fitting, base: Sampling) -> Sampling | None:
        @functools.cache
        def gap(value: float) -> float:
            return fitting.gap(base.having(field, value))

        grid, ratio = CONTINUOUS[field], (math.sqrt(5) - 1) / 2
        best = min(range(len(grid)), key=lambda each: gap(grid[each]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        for _ in range(_SECTIONS):
            left, right = (round(each, 7) for each in (high - ratio * (high - low), low + ratio * (high - low)))
            if gap(left) < gap(right):
                high = right
            else:
                low = left
        value = min((low + high) / 2, grid[best], key=gap)
        return None if value == getattr(Sampling(), field) else base.having(field, _tidy(fitting, base, field, value))

    return fit


def _tidy(fitting: Fitting, base: Sampling, field: str, value: float) -> float:
    """Return the shortest decimal near `value` that fits as well: people set 0.8, not 0.80003."""
    gap = fitting.gap(base.having(field, value))
    for digits in range(1, 4):
        short = float(np.round(value, digits))
        if short and fitting.gap(base.having(field, short)) <= gap * 1.01 + 1e-15:
            return short
    return float(value)


def _on_grid(field: str, *grids: Callable[[int, Any], Iterable[float]]) -> Fit:
    """Return a fit by grids, each from the vocabulary's size and the best value so far; of equal values the first."""

    def fit(fitting: Fitting, base: Sampling) -> Sampling | None:
        best = base
        for grid in grids:
            tried = [base.having(field, value) for value in grid(fitting.logits.shape[1], getattr(best, field))]
            best = min(tried, key=fitting.gap)
        return best if fitting.gap(best) < fitting.gap(base) else None

    return fit


def _biases(fitting: Fitting, base: Sampling) -> Sampling | None:
    """Fit biases of single ids by matching pursuit.

    With biases β of ids b, exp(log q(a) − log p(a)) of another id a is 1/(1 + Σ_b p(b)(e^(β/T) − 1)): its inverse less
    1 is linear in the probabilities. A banned id has the coefficient −1.
    """
    logged, plain = fitting.compared.logged, fitting.log_probs(base)
    usable = fitting.compared.usable & np.isfinite(plain) & (np.abs(plain - logged) < 3)
    target, heat = np.expm1(plain[usable] - logged[usable]), float(np.mean(base.temperature))
    columns, ids = fitting.probabilities(base)[usable], fitting.compared.ids[usable]
    chosen: list[int] = []
    slopes = np.zeros(0)
    gap, found = fitting.gap(base), None
    for _ in range(_MOST_IDS):
        others = ~np.isin(ids, chosen)
        left = target - (columns[:, chosen] @ slopes if chosen else 0.0)
        own = columns[others, ids[others]]  # an id's own tokens follow another equation
        products, squares = columns[others].T @ left[others], (columns[others] ** 2).sum(axis=0)
        products -= np.bincount(ids[others], own * left[others], columns.shape[1])
        squares -= np.bincount(ids[others], own * own, columns.shape[1])
        gains = products**2 / np.maximum(squares, 1e-9)
        gains[chosen] = 0
        chosen.append(int(np.argmax(gains)))
        others = ~np.isin(ids, chosen)
        if others.sum() < 2 * len(chosen):
            break
        slopes = np.linalg.lstsq(columns[others][:, chosen], target[others], rcond=None)[0]
        biases = tuple(
            (token, -np.inf if slope < -0.97 else float(np.round(heat * np.log1p(slope), 3)))
            for token, slope in zip(chosen, slopes.tolist(), strict=True)
        )
        trial = base.having("biases", biases)
        now = fitting.gap(trial)
        if now > (gap if found is None else 0.7 * gap):
            break
        gap, found = now, trial
    return found


def _bias_of_ids(fitting: Fitting, base: Sampling) -> Sampling | None:
    """Fit a bias of each id that was sampled, if biases fitted to some prompts explain the others.

    Without that test so many parameters explain a part of any difference.
    """
    compared = fitting.compared
    groups = compared.groups if compared.groups.max(initial=0) >= _FOLDS else compared.rows
    before, after, plain = 0.0, 0.0, fitting.halves(base)
    for fold in range(_FOLDS):
        own = compared.usable & (groups % _FOLDS == fold)
        fit = _ridge(replace(fitting, compared=replace(compared, usable=compared.usable & ~own)), base)
        known = own & np.isin(compared.ids, [token for token, _ in fit])
        before += float(plain[known].sum())
        after += float(fitting.halves(base.having("biases", fit))[known].sum())
        if known.sum() < 0.5 * own.sum() or after > (1 - _KNOWN_SHARE) * before:
            return None
    return base.having("biases", _ridge(fitting, base))


def _ridge(fitting: Fitting, base: Sampling) -> tuple[tuple[int, float], ...]:
    """Return the biases of the ids that occur, and of others that are likely, with small ones preferred.

    The biases of ids that do not occur follow from the sum over all ids.
    """
    compared, heat = fitting.compared, float(np.mean(base.temperature))
    likely = np.argsort(-fitting.probabilities(base)[compared.usable].sum(axis=0))
    ids = np.union1d(compared.ids[compared.usable], likely[: int(compared.usable.sum()) // 2])
    found, at = np.zeros(ids.size), np.searchsorted(ids, compared.ids)
    for _ in range(_RIDGE_STEPS):
        fitting.check()
        trial = base.having("biases", tuple(zip(ids.tolist(), found.tolist(), strict=True)))
        left = compared.logged - fitting.log_probs(trial)
        used = compared.usable & (np.abs(left) < LARGEST)
        slopes = -fitting.probabilities(trial)[used][:, ids]
        slopes[np.arange(slopes.shape[0]), at[used]] += 1
        slopes /= heat
        square = slopes.T @ slopes + _RIDGE * np.eye(ids.size)
        found = found + np.clip(np.linalg.solve(square, slopes.T @ left[used] - _RIDGE * found), -1.0, 1.0)
    return tuple(zip(ids.tolist(), np.round(found, 3).tolist(), strict=True))


def _banned_ends(fitting: Fitting, base: Sampling) -> Sampling | None:
    """Fit the ids that are banned at the first tokens, and the number of these.

    The ids are known ends and those that only occur as the last token of a response; ids that were not sampled at these
    tokens join as long as each leaves less.
    """
    compared, batch = fitting.compared, fitting.compared.batch
    last = batch.response_offsets[1:][batch.response_lengths > 0] - 1
    inside = np.ones(batch.num_tokens, np.bool_)
    inside[last] = False
    ends = np.setdiff1d(batch.response_token_ids[last], batch.response_token_ids[inside])
    width = fitting.logits.shape[1]
    ids = tuple(sorted({each for each in (*ends.tolist(), *fitting.ends) if each < width}))

    def gap(found: tuple[tuple[int, ...], int]) -> float:
        return fitting.gap(base.having("banned_until", found))

    found = _until(fitting, base, ids)
    if found is None:
        return None
    for each in ids:  # those that are not banned
        fewer = _until(fitting, base, tuple(one for one in found[0] if one != each))
        found = found if fewer is None else min(found, fewer, key=gap)
    probabilities, plain = fitting.probabilities(base), fitting.log_probs(base)
    while len(found[0]) < _MOST_ENDS:
        early = compared.usable & (compared.position < found[1])
        left = -np.expm1(plain - compared.logged)[early] - probabilities[early][:, list(found[0])].sum(axis=1)
        sizes = np.sqrt(np.maximum((probabilities[early] ** 2).sum(axis=0), 1e-300))
        gains = left @ probabilities[early] / sizes
        gains[[*np.unique(compared.ids[early]).tolist(), *found[0]]] = -np.inf
        more = _until(fitting, base, tuple(sorted((*found[0], int(np.argmax(gains))))))
        if more is None or gap(more) > 0.9 * gap(found):
            break
        found = more
    return base.having("banned_until", found)


def _until(fitting: Fitting, base: Sampling, ids: tuple[int, ...]) -> tuple[tuple[int, ...], int] | None:
    """Return `ids` and the number of first tokens at which they are banned; None if that does not help."""
    if not ids:
        return None
    position = fitting.compared.position
    always = base.having("banned_until", (ids, int(position.max(initial=0)) + 1))
    gains = np.cumsum(np.bincount(position, fitting.halves(base) - fitting.halves(always)))
    first = int(np.argmax(gains)) + 1
    return (ids, first) if gains[first - 1] > 0 else None


CONTINUOUS: dict[str, list[float]] = {
    "temperature": np.geomspace(0.2, 3.0, 24).tolist(),
    "repetition": np.linspace(0.6, 2.0, 24).tolist(),
    "repetition_of_response": np.linspace(0.6, 2.0, 24).tolist(),
    "presence": np.linspace(-2.0, 2.0, 21).tolist(),
    "frequency": np.linspace(-1.0, 1.0, 21).tolist(),
    "softcap": np.geomspace(0.5, 100.0, 24).tolist(),
    "softcap_product": np.geomspace(0.5, 100.0, 24).tolist(),
}
"""Continuous parameter of Sampling → the grid of its fit."""
_TOP_P = (*np.arange(0.3, 0.96, 0.05).tolist(), 0.98, 0.99, 0.995)
_TOP_K = (*range(1, 33), 40, 50, 64, 100, 128, 200, 256)
_MIN_P = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3)
TRUNCATIONS = {
    "top_p": _on_grid(
        "top_p",
        lambda *_: _TOP_P,
        lambda _, at: [each for each in (*np.arange(at - 0.05, min(at + 0.05, 0.999), 0.005).tolist(), at) if each > 0],
        # Between two steps of the running mass all values keep the same tokens; the rounder one is likelier.
        lambda _, at: [each for each in (round(at, 1), round(at, 2), at) if 0 < each < 1],
    ),
    "top_k": _on_grid("top_k", lambda vocabulary, _: [each for each in _TOP_K if each < vocabulary]),
    "min_p": _on_grid("min_p", lambda *_: _MIN_P),
}
FITS: dict[str, Fit] = {
    **{name: _continuous(name) for name in CONTINUOUS},
    **TRUNCATIONS,
    "biases": _biases,
    "bias_of_ids": _bias_of_ids,
    "banned_until": _banned_ends,
    "largest": _on_grid("largest", lambda *_: [True]),
}
_TOGETHER = [each for each in FITS if each not in ("bias_of_ids", "softcap_product", "largest")]
_EXCLUDES = {"repetition": {"repetition_of_response"}, "repetition_of_response": {"repetition"}}
_KINDS = (("repetition", "repetition_of_response", "presence", "frequency"), tuple(TRUNCATIONS))
