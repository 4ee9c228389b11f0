"""The comparison: the tokens of one side, the difference that a variant leaves unexplained, and its intervals."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts import RolloutBatch

Float64 = NDArray[np.float64]

LARGEST = 5.0
"""|d| in nats beyond which a token counts as 5: a sentinel or a removed token must not outweigh all others."""
RESOLUTION = 1e-13
"""E[d²]/2 of float32 log-probs around 1 nat that differ in the last bit or two."""
_USUAL = 0.75
"""The quantile of the tokens' differences in rounding beyond which a token loses weight."""
_RESAMPLES = 1_000
CHANCE = 0.01
"""The probability of a false name that each test allows."""


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """The response tokens of a batch and their logged log-probs on one side; arrays [T].

    `usable` is False for tokens that the model did not sample, and for logged values that are not finite. `groups`
    numbers the prompt of each token: rollouts of one prompt are dependent, and intervals resample prompts.
    """

    batch: RolloutBatch
    logged: Float64
    usable: NDArray[np.bool_]
    rows: NDArray[np.int64]
    position: NDArray[np.int64]
    groups: NDArray[np.int64]
    ids: NDArray[np.int32]
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, batch: RolloutBatch, logged: NDArray[np.float32]) -> Compared:
        """Return the tokens of `batch` with the log-probs `logged` [T]."""
        lengths = batch.response_lengths
        rows = np.repeat(np.arange(batch.num_rollouts), lengths)
        position = np.arange(batch.num_tokens) - np.repeat(batch.response_offsets[:-1], lengths)
        names = [
            str(row) if batch.group_ids is None or batch.group_ids[row] is None else f"g{batch.group_ids[row]}"
            for row in range(batch.num_rollouts)
        ]
        groups = np.unique(names, return_inverse=True)[1].astype(np.int64)[rows]
        usable = batch.generated & np.isfinite(logged)
        # The first token of a response without a prompt has no log-prob in any replay.
        usable &= (np.diff(batch.prompt_offsets)[rows] > 0) | (position > 0)
        tokens = np.arange(batch.num_tokens)
        values = logged.astype(np.float64)
        return cls(batch, values, usable, rows, position, groups, batch.response_token_ids, tokens)

    def at(self, tokens: NDArray[np.int64]) -> Compared:
        """Return some of the tokens."""
        return Compared(
            self.batch,
            self.logged[tokens],
            self.usable[tokens],
            self.rows[tokens],
            self.position[tokens],
            self.groups[tokens],
            self.ids[tokens],
            self.tokens[tokens],
        )

    def having(self, logged: Float64, *others: Float64) -> Compared:
        """Return the tokens with other logged values; those at which these or `others` are NaN are not usable."""
        known = np.logical_and.reduce([~np.isnan(each) for each in (logged, *others)])
        return replace(self, logged=logged, usable=self.usable & known)

    def halves(self, log_probs: Float64) -> Float64:
        """Return d²/2 of each token, [T] in nats², 0 for tokens that are not usable or that a variant leaves out (NaN).

        d is the logged log-prob less that of the variant.
        """
        with np.errstate(invalid="ignore"):
            d = np.clip(self.logged - log_probs, -LARGEST, LARGEST)
        return np.where(self.usable & np.isfinite(d), 0.5 * d * d, 0.0)

    def gap(self, log_probs: Float64) -> float:
        """Return E[d²]/2 over the usable tokens, in nats²; it is k3 if d is small."""
        return float(self.halves(log_probs).sum()) / max(int(self.usable.sum()), 1)

    def by_rollout(self, halves: Float64) -> Float64:
        """Return the mean of `halves` over the usable tokens of each rollout, [N]; NaN without one."""
        count = np.bincount(self.rows, self.usable, self.batch.num_rollouts)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.bincount(self.rows, halves, self.batch.num_rollouts) / count)

    def counts(self, vocabulary: int, *, with_prompt: bool) -> Float64:
        """Return how often each id occurred before each token, [T, V]: in the response, and in the prompt if asked."""
        batch = self.batch
        found = np.zeros((self.tokens.size, vocabulary))
        places = np.full(batch.num_tokens, -1)
        places[self.tokens] = np.arange(self.tokens.size)
        for row in np.unique(self.rows).tolist():
            start, stop = (int(each) for each in batch.response_offsets[row : row + 2])
            running = np.zeros(vocabulary)
            if with_prompt:
                prompt = batch.prompt_token_ids[batch.prompt_offsets[row] : batch.prompt_offsets[row + 1]]
                running += np.bincount(prompt, minlength=vocabulary)
            for token in range(start, stop):
                if places[token] >= 0:
                    found[places[token]] = running
                running[batch.response_token_ids[token]] += 1
        return found


def _resampled(values: Float64, compared: Compared) -> Float64:
    """Return the sums of `values` [K, T] over resampled prompts, [K, resamples]."""
    number = int(compared.groups.max(initial=0)) + 1
    sums = np.stack([np.bincount(compared.groups, each, number) for each in values])
    return np.asarray(sums @ _draws(number).T)


@functools.lru_cache(maxsize=8)
def _draws(number: int) -> NDArray[np.int64]:
    """Return how often each of `number` prompts is drawn, [resamples, number]; a search asks hundreds of times."""
    return np.random.default_rng(27).multinomial(number, np.full(number, 1 / number), _RESAMPLES)


def share_range(before: Float64, after: Float64, compared: Compared) -> tuple[float, float, float]:
    """Return 1 − Σ after / Σ before and its 95 % interval over prompts; `before`, `after` are d²/2 by token."""
    resampled = _resampled(np.stack([before, after]), compared)
    shares = 1 - resampled[1] / np.maximum(resampled[0], 1e-300)
    low, high = np.quantile(shares, [0.025, 0.975])
    return 1 - float(after.sum() / max(before.sum(), 1e-300)), float(low), float(high)


def mean_range(halves: Float64, compared: Compared) -> tuple[float, float]:
    """Return the 99 % interval over prompts of the mean of `halves` over the usable tokens."""
    resampled = _resampled(np.stack([halves, compared.usable.astype(np.float64)]), compared)
    low, high = np.quantile(resampled[0] / np.maximum(resampled[1], 1), [0.005, 0.995])
    return float(low), float(high)


def contrast_range(values: Float64, chosen: NDArray[np.bool_], compared: Compared) -> tuple[float, float]:
    """Return the 99 % interval over prompts of the mean of `values` at `chosen` usable tokens, less that at others."""
    sums = [each * factor for each in (compared.usable & chosen, compared.usable & ~chosen) for factor in (values, 1.0)]
    one, ones, other, others = _resampled(np.stack(sums), compared)
    low, high = np.quantile(one / np.maximum(ones, 1) - other / np.maximum(others, 1), [0.005, 0.995])
    return float(low), float(high)


def steadiness(replays: list[Float64], compared: Compared) -> Float64:
    """Return the weight of each token: s₀² / (s₀² + s²), s² its squared rounding difference and s₀² the usual one.

    s² is the square of the largest difference between `replays`, but at least σ² (1 − p)², the effect of logit noise on
    a token of probability p, since a few replays may agree by chance. σ² is the usual one, and p is that of the first
    replay or the logged one, whichever is farther from 1: with a fault, the logged one is the one that was rounded.
    """
    with np.errstate(invalid="ignore"):
        squares = np.ptp(np.stack(replays), axis=0) ** 2
    usable = compared.usable & np.isfinite(squares)
    squares = np.nan_to_num(squares, nan=LARGEST**2, posinf=LARGEST**2)
    if not usable.any():
        return np.ones(usable.size)
    responses = [np.nan_to_num(np.expm1(np.minimum(each, 0.0))) ** 2 for each in (replays[0], compared.logged)]
    noise = float(np.quantile(squares[usable] / np.maximum(responses[0][usable], RESOLUTION), _USUAL))
    squares = np.maximum(squares, noise * np.maximum(*responses))
    usual = float(np.quantile(squares[usable], _USUAL))
    return np.asarray((usual + RESOLUTION) / (usual + RESOLUTION + squares))


def half_widths(slopes: Float64, left: Float64, groups: NDArray[np.int64]) -> Float64:
    """Return the half-widths [K] of the 95 % intervals over prompts of K parameters that were fitted together.

    `slopes` [K, T] are the derivatives of the log-probs, `left` [T] what the fit leaves, 0 at tokens that are not
    usable. With one prompt, tokens count as independent.
    """
    inverse = np.linalg.pinv(slopes @ slopes.T)
    number = int(groups.max(initial=0)) + 1
    scores = np.stack([np.bincount(groups, each * left, number) for each in slopes]) if number > 1 else slopes * left
    spread = inverse @ (scores @ scores.T) @ inverse * scores.shape[1] / max(scores.shape[1] - 1, 1)
    return np.asarray(1.96 * np.sqrt(np.diag(spread)))


def chance_of(improvements: Float64) -> float:
    """Return the probability of such improvements [N] of the rollouts or tokens by chance, by signed ranks."""
    values = improvements[np.isfinite(improvements) & (improvements != 0)]
    if not values.size:
        return 1.0
    ranks = np.abs(values).argsort().argsort() + 1.0
    number = values.size
    mean = number * (number + 1) / 4
    spread = math.sqrt(number * (number + 1) * (2 * number + 1) / 24)
    return 0.5 * math.erfc((float(ranks[values > 0].sum()) - mean) / spread / math.sqrt(2))
