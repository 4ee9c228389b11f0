"""Measures of routed experts: how often two forward passes of a mixture of experts choose the same experts.

A router picks k experts for each token and layer. Two forward passes whose router logits differ by rounding pick
different experts if two logits are close; the token then runs through other weights. The experts of a response token
are those at the state before it, from which its log-prob is computed. The order of the k experts has no effect on the
model and is ignored.

d of a token also depends on the experts of earlier tokens, through attention: a token whose experts agree may follow
tokens whose experts differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.measures.estimators.bootstrap import nonnegative_intervals
from foreshock.measures.estimators.intervals import Interval
from foreshock.measures.estimators.token import k3_kl, log_ratio
from foreshock.measures.inputs import check_size, cuts_of, generated_tokens, group_names, numbers_of
from foreshock.measures.statistics.clusters import clusters_of
from foreshock.rollouts.arrays import row_sums

Float64 = NDArray[np.float64]
Booleans = NDArray[np.bool_]

UNKNOWN_EXPERT = -1
"""Stands for the experts of a response token without a state before it: the first of a rollout without a prompt."""


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """The routing of the layer `layer` of the model, counted from 0.

    `agreement` is the share of tokens with the same set of experts; `overlap` the mean share of a token's k experts
    that both sides chose; `first_differences` the share of tokens whose first layer with a difference is this one.
    """

    layer: int
    agreement: Interval
    overlap: Interval
    first_differences: Interval


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """The mismatch of some of the tokens: `tokens` of them, in `rollouts` rollouts.

    `k3_kl` estimates KL(μ‖π) over all tokens, in nats per token; over a part of them it is a mean that compares parts.
    `abs_d` is the mean of |log π − log μ| in nats. NaN without tokens.
    """

    tokens: int
    rollouts: int
    k3_kl: Interval
    abs_d: Interval


@dataclass(frozen=True, slots=True)
class RoutingMeasures:
    """Agreement of the routed experts of π and μ over the model-generated tokens of a step.

    `any_difference` is the share of tokens with another set of experts in at least one layer: the `differing` tokens,
    not the `agreeing` ones. `k3_share` is the share of Σ k3 that the differing tokens carry. `top_k` experts are chosen
    in each layer. `excluded` counts tokens with a log-prob that is not finite, or without a state before them. The
    intervals are by prompt group.
    """

    top_k: int
    layers: tuple[LayerRouting, ...]
    any_difference: Interval
    k3_share: Interval
    all_tokens: RoutedTokens
    agreeing: RoutedTokens
    differing: RoutedTokens
    groups: int
    excluded: int


def measure_routing(
    target_experts: ArrayLike,
    behaviour_experts: ArrayLike,
    target_log_probs: ArrayLike,
    behaviour_log_probs: ArrayLike,
    offsets: ArrayLike,
    mask: ArrayLike | None = None,
    group_ids: Iterable[object] | None = None,
    layers: Sequence[int] | None = None,
) -> RoutingMeasures:
    """Return the measures of the experts [T, L, k] and log-probs [T] of π (target) and μ (behaviour).

    `offsets` [N + 1] cut the tokens into rollouts. `mask` [T] is 0 for tokens that the model did not sample.
    `group_ids` [N] name the prompts, by which intervals are clustered; a rollout without one is its own group. `layers`
    [L] are the numbers of the layers, by default 0 … L − 1. Raises InvalidRolloutsError if sizes do not fit or if a
    token has the same expert twice in a layer.
    """
    cuts = cuts_of(offsets)
    tokens = int(cuts[-1])
    target, behaviour = (
        _experts_of(name, value, tokens)
        for name, value in (("target_experts", target_experts), ("behaviour_experts", behaviour_experts))
    )
    if target.shape != behaviour.shape:
        raise InvalidRolloutsError(
            f"must have the shape of the target's experts, {target.shape}, got {behaviour.shape}: the two sides have "
            "other layers or another number of experts per token",
            column="behaviour_experts",
        )
    numbers = list(range(target.shape[1])) if layers is None else list(layers)
    if len(numbers) != target.shape[1]:
        raise InvalidRolloutsError(f"must have one number for each of the {target.shape[1]} layers", column="layers")
    given = {"target_log_probs": target_log_probs, "behaviour_log_probs": behaviour_log_probs}
    log_probs = {name: numbers_of(name, value) for name, value in given.items()}
    for name, values in log_probs.items():
        check_size(name, values, tokens)
    generated = generated_tokens(mask, tokens)
    with np.errstate(invalid="ignore"):
        d = log_ratio(*log_probs.values())
    known = (target != UNKNOWN_EXPERT).all(axis=(1, 2)) & (behaviour != UNKNOWN_EXPERT).all(axis=(1, 2))
    valid = np.isfinite(d) & known
    keep = generated & valid
    means = _Means(cuts, clusters_of(group_names(group_ids, cuts.size - 1)), keep)
    top_k, common = target.shape[2], _common_experts(target, behaviour)
    differs = common < top_k  # [T, L]
    differing = differs.any(axis=1)
    first = np.where(differing, differs.argmax(axis=1), -1)
    k3, size = np.zeros_like(d), np.zeros_like(d)
    k3[keep], size[keep] = k3_kl(d[keep]), np.abs(d[keep])
    agreement = means.of(differs.T)
    overlap = means.of((top_k - column) / top_k for column in common.T)
    first_differences = means.of(first == index for index in range(len(numbers)))
    everything = means.tokens(size, k3, keep)
    return RoutingMeasures(
        top_k=top_k,
        layers=tuple(
            LayerRouting(number, _complement(agreement[index]), _complement(overlap[index]), _share(of_first))
            for index, (number, of_first) in enumerate(zip(numbers, first_differences, strict=True))
        ),
        any_difference=_share(means.of([differing])[0]),
        k3_share=_share(means.ratios([k3 * differing], k3)[0]),
        all_tokens=everything,
        agreeing=means.tokens(size, k3, keep & ~differing),
        differing=means.tokens(size, k3, keep & differing),
        groups=everything.k3_kl.clusters,
        excluded=int(np.count_nonzero(generated & ~valid)),
    )


@dataclass(frozen=True, slots=True)
class _Means:
    """Means over the tokens to `keep` of values that are never negative, with intervals by prompt group."""

    offsets: NDArray[np.int64]
    clusters: NDArray[np.int64]
    keep: Booleans

    def of(self, columns: Iterable[ArrayLike]) -> tuple[Interval, ...]:
        """Return the mean of each column [T]."""
        return self.ratios([np.where(self.keep, column, 0.0) for column in columns], self.keep)

    def ratios(self, parts: Iterable[Float64], whole: NDArray[Any]) -> tuple[Interval, ...]:
        """Return Σ part / Σ whole of each part, all [T]."""
        sums = np.stack([row_sums(part, self.offsets) for part in parts], axis=1)
        return nonnegative_intervals(sums, row_sums(whole, self.offsets), self.clusters)

    def tokens(self, size: Float64, k3: Float64, chosen: Booleans) -> RoutedTokens:
        """Return the mismatch of the chosen tokens; `size` is |d|."""
        of_rollouts = row_sums(chosen, self.offsets)
        means = self.ratios([np.where(chosen, k3, 0.0), np.where(chosen, size, 0.0)], chosen)
        return RoutedTokens(int(of_rollouts.sum()), int(np.count_nonzero(of_rollouts)), *means)


def _experts_of(column: str, value: ArrayLike, tokens: int) -> NDArray[np.integer]:
    """Return experts as an array [T, L, k] with L, k ≥ 1 and distinct experts, or raise InvalidRolloutsError."""
    experts = numbers_of(column, value, whole=True)
    if experts.ndim != 3 or experts.shape[0] != tokens or 0 in experts.shape[1:]:
        raise InvalidRolloutsError(
            f"must have the shape [{tokens} tokens, layers, experts per token], got {experts.shape}", column=column
        )
    for layer in range(experts.shape[1]):
        ranked = np.sort(experts[:, layer], axis=1)
        twice = ((ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] != UNKNOWN_EXPERT)).any(axis=1)
        if twice.any():
            token = int(np.flatnonzero(twice)[0])
            raise InvalidRolloutsError(
                f"must have distinct experts for each token and layer, got {experts[token, layer].tolist()} for token "
                f"{token} in layer {layer}",
                column=column,
            )
    return experts


def _common_experts(target: NDArray[np.integer], behaviour: NDArray[np.integer]) -> NDArray[np.int16]:
    """Return how many experts both sides chose, [T, L]; one layer at a time, to hold only k² values per token."""
    common = np.empty(target.shape[:2], np.int16)
    for layer in range(target.shape[1]):
        same = target[:, layer, :, None] == behaviour[:, layer, None, :]
        common[:, layer] = same.any(axis=2).sum(axis=1)
    return common


def _share(found: Interval) -> Interval:
    """Return the interval of a share, cut at 1, which rounding and the bootstrap may exceed."""
    # min(nan, 1.0) is NaN.
    return replace(found, mean=min(found.mean, 1.0), low=min(found.low, 1.0), high=min(found.high, 1.0))


def _complement(found: Interval) -> Interval:
    """Return the interval of 1 − the share in `found`."""
    share = _share(found)
    return Interval(1.0 - share.mean, 1.0 - share.high, 1.0 - share.low, share.clusters)
