"""Sampling distributions computed from logits, and the parameter of each that reproduces logged log-probs best.

The order is that of vLLM: penalties, bias, temperature, min-p, top-k, top-p. Fits need one replay with logits and no
further one. Logits are [T, V] in float32, log-probs [T] in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.doctor.evidence import Compared, Float64

_LOGITS_AT_ONCE = 1 << 24
"""Logits that are converted to float64 at a time: with 150,000 ids a replay of one rollout may have more."""
_FIT_LOGITS = 1 << 21
"""Largest number of logits in a fit: more tokens are thinned out evenly, to no fewer than the next number."""
_LEAST_FIT_TOKENS = 128
_MOST_IDS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """The changes of logits before log-softmax; `temperature` to `min_p` may differ by token, [T].

    `repetition` counts the ids of prompt and response, as in vLLM and transformers, `repetition_of_response` those of
    the response only, as in SGLang; presence and frequency count those of the response in all these engines. `biases`:
    pairs of token id and what is added to its logit, −∞ for a banned id. `banned_until`: an id (the end of a sequence)
    that is banned at the first n response tokens.
    """

    temperature: Any = 1.0
    top_p: Any = 1.0
    top_k: Any = 0
    min_p: Any = 0.0
    repetition: float = 1.0
    repetition_of_response: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    biases: tuple[tuple[int, float], ...] = ()
    banned_until: tuple[int, int] | None = None
    softcap: float = 0.0

    def having(self, name: str, value: Any) -> Sampling:
        """Return the distribution with another value of one parameter."""
        changed: dict[str, Any] = {name: value}
        return replace(self, **changed)

    def at(self, tokens: NDArray[np.int64]) -> Sampling:
        """Return the distribution of some of the tokens."""
        found = self
        for name in ("temperature", "top_p", "top_k", "min_p"):
            if isinstance(value := getattr(self, name), np.ndarray):
                found = found.having(name, value[tokens])
        return found

    def log_probs(self, logits: NDArray[np.float32], compared: Compared) -> Float64:
        """Return the log-prob [T] of each token of `compared`; −∞ where it is banned."""
        tokens, vocabulary = logits.shape
        size = max(1, _LOGITS_AT_ONCE // vocabulary)
        parts = [np.arange(start, min(start + size, tokens)) for start in range(0, tokens, size)]
        if len(parts) < 2:
            return self._log_probs(logits, compared)
        return np.concatenate([self.at(part)._log_probs(logits[part], compared.at(part)) for part in parts])

    def _log_probs(self, logits: NDArray[np.float32], compared: Compared) -> Float64:
        values = self._penalised(logits.astype(np.float64), compared)
        rows = np.arange(values.shape[0])
        for token, bias in self.biases:
            values[:, token] += bias
        if self.banned_until is not None:
            token, first = self.banned_until
            values[compared.position < first, token] = -np.inf
        values /= np.broadcast_to(np.asarray(self.temperature, np.float64), rows.shape)[:, None]
        values -= values.max(axis=1, keepdims=True)
        probabilities = np.exp(values)
        total = probabilities.sum(axis=1)
        own = values[rows, compared.ids]
        if not self._truncates:
            return np.asarray(own - np.log(total))
        return np.asarray(own - np.log(total * self._kept(probabilities / total[:, None], compared.ids)))

    @property
    def _truncates(self) -> bool:
        return bool(np.any(np.asarray(self.top_p) < 1) or np.any(np.asarray(self.top_k) > 0) or np.any(self.min_p))

    def _penalised(self, values: Float64, compared: Compared) -> Float64:
        if self.softcap:
            values = self.softcap * np.tanh(values / self.softcap)
        for factor, with_prompt in ((self.repetition, True), (self.repetition_of_response, False)):
            if factor != 1.0:
                seen = compared.counts(values.shape[1], with_prompt=with_prompt) > 0
                values = np.where(seen, np.where(values > 0, values / factor, values * factor), values)
        if self.presence or self.frequency:
            counts = compared.counts(values.shape[1], with_prompt=False)
            values = values - self.presence * (counts > 0) - self.frequency * counts
        return values

    def _kept(self, probabilities: Float64, ids: NDArray[np.int32]) -> Float64:
        """Return the mass [T] that truncation keeps; the sampled token is always kept, even against rounding."""
        rows = np.arange(ids.size)
        ordered = -np.sort(-probabilities, axis=1)
        running = np.cumsum(ordered, axis=1)
        width = ordered.shape[1]
        top_k = np.broadcast_to(np.asarray(self.top_k), rows.shape)
        kept = np.where(top_k > 0, np.minimum(top_k, width), width)
        min_p = np.broadcast_to(np.asarray(self.min_p), rows.shape)[:, None]
        kept = np.minimum(kept, (ordered >= min_p * ordered[:, :1]).sum(axis=1))
        mass = running[rows, kept - 1]
        top_p = np.broadcast_to(np.asarray(self.top_p), rows.shape)
        nucleus = ((running - ordered) < (top_p * mass)[:, None]).sum(axis=1)
        kept = np.where(top_p < 1, np.minimum(kept, np.maximum(nucleus, 1)), kept)
        rank = (probabilities > probabilities[rows, ids][:, None]).sum(axis=1)
        return np.asarray(running[rows, np.maximum(kept, rank + 1) - 1])


@dataclass(frozen=True, slots=True, eq=False)
class _Data:
    """The input of a fit: logits and logged log-probs of the (thinned) tokens, and the distribution to start from."""

    logits: NDArray[np.float32]
    compared: Compared
    base: Sampling
    eos: int | None

    def gap(self, sampling: Sampling) -> float:
        """Return half the mean square of what `sampling` leaves unexplained, in nats²."""
        return self.compared.gap(sampling.log_probs(self.logits, self.compared))


def fitted(
    name: str, logits: NDArray[np.float32], compared: Compared, base: Sampling, eos: int | None
) -> Sampling | None:
    """Return `base` with the parameter `name` of FITS fitted to the logged log-probs; None if no value helps."""
    tokens, vocabulary = logits.shape
    stride = max(1, -(-tokens // max(_FIT_LOGITS // vocabulary, _LEAST_FIT_TOKENS)))
    if stride > 1:
        thin = np.arange(0, logits.shape[0], stride)
        logits, compared, base = logits[thin], compared.at(thin), base.at(thin)
    data = _Data(logits, compared, base, eos)
    return FITS[name](data)


def uncertainty(name: str, logits: NDArray[np.float32], compared: Compared, sampling: Sampling) -> float:
    """Return the half-width of the 95 % interval over prompts of the parameter `name`; NaN if it is on a grid."""
    value = getattr(sampling, name)
    if name not in _CONTINUOUS or not isinstance(value, float):
        return float("nan")
    plain, step = sampling.log_probs(logits, compared), 1e-3 * max(abs(value), 0.1)
    slope = (sampling.having(name, value + step).log_probs(logits, compared) - plain) / step
    left = np.where(compared.usable, compared.logged - plain, 0.0)
    score, square = (np.nan_to_num(slope * each, nan=0.0, posinf=0.0, neginf=0.0) for each in (left, slope))
    return float(1.96 * np.sqrt((np.bincount(compared.groups, score) ** 2).sum()) / max(square.sum(), 1e-300))


def _continuous(field: str, grid: Sequence[float], plain: float) -> Callable[[_Data], Sampling | None]:
    """Return a fit of a continuous parameter: the best value of a grid, then golden sections around it."""

    def fit(data: _Data) -> Sampling | None:
        gaps = [data.gap(data.base.having(field, value)) for value in grid]
        best = int(np.argmin(gaps))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        value = _golden(lambda each: data.gap(data.base.having(field, each)), low, high)
        if min(gaps[best], data.gap(data.base)) < data.gap(data.base.having(field, value)):
            value = grid[best]
        return None if value == plain else data.base.having(field, _tidy(data, field, value))

    return fit


def _tidy(data: _Data, field: str, value: float) -> float:
    """Return the shortest decimal near `value` that fits as well: people set 0.8, not 0.80003."""
    gap = data.gap(data.base.having(field, value))
    for digits in range(1, 4):
        short = float(np.round(value, digits))
        if short and data.gap(data.base.having(field, short)) <= gap * 1.01 + 1e-15:
            return short
    return value


def _golden(function: Callable[[float], float], low: float, high: float, steps: int = 24) -> float:
    ratio = (np.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(steps):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return float((low + high) / 2)


def _on_grid(field: str, values: Callable[[int], Sequence[float]]) -> Callable[[_Data], Sampling | None]:
    """Return a fit of a truncation: the best value of a grid, which the vocabulary's size may limit."""

    def fit(data: _Data) -> Sampling | None:
        tried = [data.base.having(field, value) for value in values(data.logits.shape[1])]
        best = min(tried, key=data.gap)
        return best if data.gap(best) < data.gap(data.base) else None

    return fit


def _top_p(data: _Data) -> Sampling | None:
    """Fit top-p: coarse values, then finer ones around the best."""
    at = min(
        np.concatenate([np.arange(0.3, 0.96, 0.05), [0.98, 0.99, 0.995]]),
        key=lambda value: data.gap(data.base.having("top_p", value)),
    )
    near = np.concatenate([np.arange(at - 0.05, min(at + 0.05, 0.999), 0.005), [at]])
    best = min(near[near > 0], key=lambda value: data.gap(data.base.having("top_p", value)))
    # Between two steps of the running mass all values keep the same tokens; the rounder one is likelier.
    short = [value for digits in (1, 2) if 0 < (value := float(np.round(best, digits))) < 1]
    gap = data.gap(data.base.having("top_p", best))
    chosen = next((value for value in short if data.gap(data.base.having("top_p", value)) <= gap), float(best))
    found = data.base.having("top_p", chosen)
    return found if data.gap(found) < data.gap(data.base) else None


def _biases(data: _Data) -> Sampling | None:
    """Fit biases of single ids by matching pursuit.

    With biases β of ids b, exp(log q(a) − log p(a)) of another id a is 1/(1 + Σ_b p(b)(e^β − 1)): its inverse less 1 is
    linear in the probabilities. A banned id has the coefficient −1.
    """
    logged, plain = data.compared.logged, data.base.log_probs(data.logits, data.compared)
    values = data.logits / np.broadcast_to(np.asarray(data.base.temperature), plain.shape)[:, None]
    values = np.exp(values - values.max(axis=1, keepdims=True))
    probabilities = values / values.sum(axis=1, keepdims=True)
    usable = data.compared.usable & np.isfinite(plain) & (np.abs(plain - logged) < 3)
    target = np.expm1(plain[usable] - logged[usable])
    columns, ids = probabilities[usable].astype(np.float64), data.compared.ids[usable]
    chosen: list[int] = []
    slopes = np.zeros(0)
    gap, found = data.gap(data.base), None
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
            (token, -np.inf if slope < -0.97 else float(np.round(np.log1p(slope), 3)))
            for token, slope in zip(chosen, slopes.tolist(), strict=True)
        )
        trial = data.base.having("biases", biases)
        now = data.gap(trial)
        if now > (gap if found is None else 0.7 * gap):
            break
        gap, found = now, trial
    return found


def _banned_end(data: _Data) -> Sampling | None:
    """Fit the number of first tokens at which the end of a sequence is banned."""
    if data.eos is None:
        return None
    token, longest = data.eos, int(data.compared.position.max(initial=0)) + 1
    tried = [data.base.having("banned_until", (token, first)) for first in range(1, min(longest, 64) + 1)]
    best = min(tried, key=data.gap)
    return best if data.gap(best) < data.gap(data.base) else None


def _small_top_k(vocabulary: int) -> Sequence[float]:
    return [value for value in (*range(1, 33), 40, 50, 64, 100, 128, 200, 256) if value < vocabulary]


FITS: dict[str, Callable[[_Data], Sampling | None]] = {
    "temperature": _continuous("temperature", np.geomspace(0.2, 3.0, 24).tolist(), 1.0),
    "top_p": _top_p,
    "top_k": _on_grid("top_k", _small_top_k),
    "min_p": _on_grid("min_p", lambda _: [0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3]),
    "biases": _biases,
    "banned_until": _banned_end,
    "repetition": _continuous("repetition", np.linspace(0.6, 2.0, 24).tolist(), 1.0),
    "repetition_of_response": _continuous("repetition_of_response", np.linspace(0.6, 2.0, 24).tolist(), 1.0),
    "presence": _continuous("presence", np.linspace(-2.0, 2.0, 21).tolist(), 0.0),
    "frequency": _continuous("frequency", np.linspace(-1.0, 1.0, 21).tolist(), 0.0),
    "softcap": _continuous("softcap", np.geomspace(0.5, 100.0, 24).tolist(), 0.0),
}
"""Parameter of Sampling → its fit, cheap fits first."""
_CONTINUOUS = ("temperature", "repetition", "repetition_of_response", "presence", "frequency", "softcap")
