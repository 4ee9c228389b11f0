"""Attribution of a mismatch to the links of a chain of scores, from the logged `rollout` to the logged `trainer`.

For each token, d of the chain is the sum of d of its links. A link's share is E[d_link·d]/E[d²]: shares add to 1, and a
negative share means that the link cancels part of the others. k3 values of links do not add; except for the first link
they are not KLs under the policy that sampled.

A scorer that was replayed in two environments gives one more link: `environment_link` measures what the environment
alone changes, and `excess_over_environments` what environments do not explain.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.api.attribution import LinkRecord as Link
from foreshock.api.attribution import SideBranchRecord as SideBranch
from foreshock.comparisons import comparison_name
from foreshock.errors import ConfigurationError
from foreshock.measures.estimators import token
from foreshock.measures.estimators.bootstrap import MORE_RESAMPLES, bootstrap_interval, bootstrap_intervals
from foreshock.measures.estimators.intervals import Interval
from foreshock.measures.inputs import check_size, cuts_of, group_names, numbers_of
from foreshock.rollouts.arrays import offsets_of_lengths, row_counts
from foreshock.scorers import REFERENCE, cause_of_link, chain_of, middle_of_chain

Float64 = NDArray[np.float64]

METHOD = "bootstrap-t over prompt groups"
"""The method of the intervals of shares and of the paired difference."""


@dataclass(frozen=True, slots=True)
class Attribution:
    """The chain of one step.

    `chain` lists the available scores, `missing` the other scores of the full chain: their links are merged into one
    that names both causes. All moments are over the `tokens` of the `rollouts` that every score of the chain has.
    `cancellation` is Σ E[d_link²]/E[d²]: 1 for independent links, above 1 if they cancel. `telescoping_error` is the
    largest |Σ d_link − d| of a token, in nats. Noise floors are unknown here: the links have no `excess_k3_kl`.
    """

    chain: tuple[str, ...]
    missing: tuple[str, ...]
    links: tuple[Link, ...]
    whole: Link
    cancellation: float
    telescoping_error: float
    tokens: int
    rollouts: int
    groups: int
    side_branch: SideBranch | None


@dataclass(frozen=True, slots=True)
class _Shared:
    """The tokens that a set of scores shares, flat; `offsets` cut them into rollouts with at least one token."""

    scores: dict[str, Float64]
    offsets: NDArray[np.int64]
    groups: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def rollouts(self) -> int:
        return self.offsets.size - 1


def attribute(
    scores: Mapping[str, ArrayLike],
    offsets: ArrayLike,
    mask: ArrayLike | None = None,
    group_ids: Iterable[object] | None = None,
    chain: Sequence[str] | None = None,
) -> Attribution:
    """Attribute the difference between the ends of the chain to its links.

    `scores` maps a scorer's name to its log-probs, [T] over the tokens of N rollouts cut at `offsets` [N + 1]; NaN if
    it has none (a rollout without any finite value in a score is excluded). `mask` [T] is 0 for tokens that the model
    did not sample. `group_ids` [N] name the prompts, for the intervals. `chain` is the order of the scores; None takes
    `foreshock.scorers.chain_of(scores)`. Scores outside the chain are compared with `torch.float32` only.

    Raises ConfigurationError if fewer than two scores of the chain are given, InvalidRolloutsError if sizes or types do
    not fit.
    """
    chain = chain_of(scores) if chain is None else chain
    present = tuple(name for name in chain if name in scores)
    if len(present) < 2:
        raise ConfigurationError(
            f"attribution needs at least two of the scores {', '.join(chain)}, got {', '.join(present) or 'none'}"
        )
    arrays, cuts, generated = _checked(scores, offsets, mask)
    shared = _share({name: arrays[name] for name in present}, cuts, generated, group_ids)
    ends = present[-1], present[0]
    d = shared.scores[ends[0]] - shared.scores[ends[1]]
    pairs = [(later, earlier) for earlier, later in itertools.pairwise(present)]
    of_links = [shared.scores[later] - shared.scores[earlier] for later, earlier in pairs]
    shares, lows, highs = _shares(of_links, d, shared)
    links = tuple(
        _link(later, earlier, cause_of_link(earlier, later), shared, values, (share, low, high))
        for (later, earlier), values, share, low, high in zip(pairs, of_links, shares, lows, highs, strict=True)
    )
    square = float(np.square(d).sum())
    squares = sum(float(np.square(values).sum()) for values in of_links)
    error = np.abs(np.sum(of_links, axis=0) - d)
    groups = int(np.unique(shared.groups).size)
    certain = (1.0, 1.0, 1.0) if square > 0.0 else (math.nan, math.nan, math.nan)
    return Attribution(
        chain=present,
        missing=tuple(name for name in chain if name not in scores),
        links=links,
        whole=_link(*ends, "the whole difference between the ends of the chain", shared, d, certain),
        cancellation=squares / square if square > 0.0 else math.nan,
        telescoping_error=float(error.max(initial=0.0)),
        tokens=shared.tokens,
        rollouts=shared.rollouts,
        groups=groups,
        side_branch=_side_branch(arrays, cuts, generated, group_ids, chain),
    )


def _checked(
    scores: Mapping[str, ArrayLike], offsets: ArrayLike, mask: ArrayLike | None
) -> tuple[dict[str, Float64], NDArray[np.int64], NDArray[np.bool_]]:
    cuts = cuts_of(offsets)
    tokens = int(cuts[-1])
    arrays = {name: numbers_of(name, value).astype(np.float64) for name, value in scores.items()}
    generated = np.ones(tokens, np.bool_) if mask is None else numbers_of("response_mask", mask) != 0
    for name, array in (*arrays.items(), ("response_mask", generated)):
        check_size(name, array, tokens)
    return arrays, cuts, generated


def _share(
    scores: dict[str, Float64],
    offsets: NDArray[np.int64],
    generated: NDArray[np.bool_],
    group_ids: Iterable[object] | None,
) -> _Shared:
    """Keep the tokens that every score has, and number the prompt groups of the remaining rollouts."""
    keep = generated.copy()
    for values in scores.values():
        keep &= np.isfinite(values)
    lengths = row_counts(keep, offsets)
    rows = np.flatnonzero(lengths)
    names = group_names(group_ids, offsets.size - 1)
    keys = [f"r{row}" if names[row] is None else f"g{names[row]}" for row in rows.tolist()]
    numbers: dict[str, int] = {}
    groups = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    return _Shared({name: values[keep] for name, values in scores.items()}, offsets_of_lengths(lengths[rows]), groups)


def _shares(of_links: list[Float64], d: Float64, shared: _Shared) -> tuple[list[float], list[float], list[float]]:
    """Return each link's share of the whole, and the ends of its bootstrap-t interval over prompt groups."""
    if not shared.tokens or not np.any(d):
        nothing = [math.nan] * len(of_links)
        return nothing, nothing, nothing
    starts = shared.offsets[:-1]
    products = np.stack([np.add.reduceat(values * d, starts) for values in (*of_links, d)], axis=1)
    total = products.sum(axis=0)
    found = bootstrap_intervals(products[:, :-1], products[:, -1], shared.groups, resamples=MORE_RESAMPLES)
    return (total[:-1] / total[-1]).tolist(), [each.low for each in found], [each.high for each in found]


def _link(
    target: str, behaviour: str, cause: str, shared: _Shared, d: Float64, share: tuple[float, float, float]
) -> Link:
    """Return the moments of one link over the shared tokens."""
    k3 = mean = square = largest = math.nan
    if shared.tokens:
        terms = (token.k3_kl(d), d, np.square(d))
        of_rollouts = np.stack([np.add.reduceat(term, shared.offsets[:-1]) for term in terms], axis=1)
        k3, mean, square = (of_rollouts.sum(axis=0) / shared.tokens).tolist()
        largest = float(np.abs(d).max())
    return Link(
        name=comparison_name(target, behaviour),
        cause=cause,
        k3_kl=k3,
        excess_k3_kl=math.nan,
        mean_d=mean,
        rms_d=math.sqrt(square),
        max_abs_d=largest,
        share=share[0],
        share_low=share[1],
        share_high=share[2],
    )


def _side_branch(
    arrays: dict[str, Float64],
    offsets: NDArray[np.int64],
    generated: NDArray[np.bool_],
    group_ids: Iterable[object] | None,
    chain: Sequence[str],
) -> SideBranch | None:
    """Compare every score with the float32 forward pass over the tokens that all of them share.

    The score that is nearer to it has the smaller numerical error.
    """
    if REFERENCE not in arrays:
        return None
    shared = _share(arrays, offsets, generated, group_ids)
    others = sorted(
        (name for name in arrays if name != REFERENCE),
        key=lambda name: (chain.index(name) if name in chain else len(chain), name),
    )
    reference = shared.scores[REFERENCE]
    nothing = (math.nan, math.nan, math.nan)
    links = tuple(
        _link(REFERENCE, name, f"{name} against float32", shared, reference - shared.scores[name], nothing)
        for name in others
    )
    engine, trainer = middle_of_chain([name for name in chain if name in arrays])
    found = Interval(math.nan, math.nan, math.nan, 0)
    if engine and trainer and shared.tokens:
        # E[d²] of the engine minus that of the trainer.
        squares = np.square(reference - shared.scores[engine]) - np.square(reference - shared.scores[trainer])
        sums = np.add.reduceat(squares, shared.offsets[:-1])
        found = bootstrap_interval(sums, np.diff(shared.offsets), shared.groups, resamples=MORE_RESAMPLES)
    return SideBranch(
        reference=REFERENCE,
        links=links,
        engine=engine,
        trainer=trainer,
        nearer=_nearer(engine, trainer, found),
        difference=found.mean,
        difference_low=found.low,
        difference_high=found.high,
        tokens=shared.tokens,
        rollouts=shared.rollouts,
    )


def _nearer(engine: str | None, trainer: str | None, difference: Interval) -> str | None:
    """Return the score nearer to the reference, "equal", or None if the interval includes 0 or is unknown."""
    if difference.low == difference.high == 0.0:
        return "equal"
    if difference.low > 0.0:
        return trainer
    return engine if difference.high < 0.0 else None


@dataclass(frozen=True, slots=True)
class EnvironmentLink:
    """The link `scorer@second / scorer@first`, d = log second − log first, in nats per token.

    `share` is E[d_link·d]/E[d²] with d of the whole chain, `share_low` to `share_high` its bootstrap-t interval by
    prompt group; NaN if the whole is not given. `tokens` counts the tokens that all of these scores have.
    """

    k3_kl: float
    rms_d: float
    max_abs_d: float
    share: float
    share_low: float
    share_high: float
    tokens: int


def environment_link(
    first: ArrayLike,
    second: ArrayLike,
    whole: tuple[ArrayLike, ArrayLike] | None,
    offsets: ArrayLike,
    mask: ArrayLike | None = None,
    group_ids: Iterable[object] | None = None,
) -> EnvironmentLink:
    """Return the link between two replays of a scorer, [T] over the tokens of N rollouts cut at `offsets` [N + 1].

    `whole` has the last and the first score of the chain, [T] each. A token with a value that is not finite is
    excluded. Raises InvalidRolloutsError if sizes or types do not fit.
    """
    given = {"first": first, "second": second}
    if whole is not None:
        given |= {"target": whole[0], "behaviour": whole[1]}
    shared = _share(*_checked(given, offsets, mask), group_ids)
    d = shared.scores["second"] - shared.scores["first"]
    if not d.size:
        nan = math.nan
        return EnvironmentLink(nan, nan, nan, nan, nan, nan, tokens=0)
    share, low, high = math.nan, math.nan, math.nan
    if whole is not None:
        of_whole = shared.scores["target"] - shared.scores["behaviour"]
        products = [np.add.reduceat(values * of_whole, shared.offsets[:-1]) for values in (d, of_whole)]
        if products[1].sum() > 0.0:
            found = bootstrap_intervals(products[0][:, None], products[1], shared.groups)[0]
            share, low, high = found.mean, found.low, found.high
    k3, rms, largest = float(token.k3_kl(d).mean()), float(np.sqrt(np.square(d).mean())), float(np.abs(d).max())
    return EnvironmentLink(k3, rms, largest, share, low, high, d.size)


def excess_over_environments(
    logged: ArrayLike,
    first: ArrayLike,
    second: ArrayLike,
    offsets: ArrayLike,
    mask: ArrayLike | None = None,
    group_ids: Iterable[object] | None = None,
) -> tuple[float, float, float]:
    """Return ½{E[(r₁ − a)(r₂ − a)] − ½E[(r₁ − r₂)²]} with its bootstrap-t interval by prompt group.

    `logged` is a, a score of the run; `first` and `second` are r₁ and r₂, its replays in two environments other than
    the run's; all [T] log-probs in nats. The result is in nats per token, comparable with k3 of small differences.

    Let a = t + e₀ and rᵢ = t + s + eᵢ: t is common, s is the difference that no environment causes, and e₀, e₁ and e₂
    are what each environment adds. If s and the e are uncorrelated, E[(r₁ − a)(r₂ − a)] = E[s²] + E[e₀²] and
    ½E[(r₁ − r₂)²] = ½(E[e₁²] + E[e₂²]). **If the three environments are exchangeable** (E[e₀²] = E[e₁²] = E[e₂²]) the
    result is ½E[s²], and 0 in expectation if the environments explain everything. It may be negative and is never
    clamped. Two replays cannot test the assumption. The bounds are NaN with too few prompt groups.
    """
    given = {"logged": logged, "first": first, "second": second}
    shared = _share(*_checked(given, offsets, mask), group_ids)
    a, r1, r2 = (shared.scores[name] for name in given)
    if not a.size:
        return math.nan, math.nan, math.nan
    terms = 0.5 * ((r1 - a) * (r2 - a) - 0.5 * np.square(r1 - r2))
    found = bootstrap_interval(np.add.reduceat(terms, shared.offsets[:-1]), np.diff(shared.offsets), shared.groups)
    return found.mean, found.low, found.high
