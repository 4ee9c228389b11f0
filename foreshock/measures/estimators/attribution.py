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
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.api.attribution import LinkRecord as Link
from foreshock.api.attribution import SideBranchRecord as SideBranch
from foreshock.comparisons import comparison_name
from foreshock.errors import ConfigurationError
from foreshock.measures.estimators import token
from foreshock.measures.estimators.bootstrap import (
    MORE_RESAMPLES,
    RESAMPLES,
    bootstrap_interval,
    bootstrap_intervals,
)
from foreshock.measures.estimators.intervals import Interval
from foreshock.measures.inputs import check_size, cuts_of, generated_tokens, group_names, numbers_of
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


_UNKNOWN = Interval(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True, slots=True)
class _Shared:
    """The tokens that a set of scores shares, flat; `offsets` cut them into rollouts with at least one token."""

    scores: dict[str, Float64]
    offsets: NDArray[np.int64]
    groups: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        scores: Mapping[str, ArrayLike],
        offsets: ArrayLike,
        mask: ArrayLike | None,
        group_ids: Iterable[object] | None,
    ) -> Self:
        """Keep the tokens that every score has, and number the prompt groups of the remaining rollouts."""
        cuts = cuts_of(offsets)
        tokens = int(cuts[-1])
        arrays = {name: numbers_of(name, value).astype(np.float64) for name, value in scores.items()}
        for name, array in arrays.items():
            check_size(name, array, tokens)
        keep = np.logical_and.reduce(
            [generated_tokens(mask, tokens), *(np.isfinite(values) for values in arrays.values())]
        )
        lengths = row_counts(keep, cuts)
        rows, names = np.flatnonzero(lengths), group_names(group_ids, cuts.size - 1)
        keys = [f"r{row}" if names[row] is None else f"g{names[row]}" for row in rows.tolist()]
        numbers: dict[str, int] = {}
        groups = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
        return cls({name: each[keep] for name, each in arrays.items()}, offsets_of_lengths(lengths[rows]), groups)

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def rollouts(self) -> int:
        return self.offsets.size - 1

    def d(self, target: str, behaviour: str) -> Float64:
        return self.scores[target] - self.scores[behaviour]

    def sums(self, terms: Sequence[Float64]) -> Float64:
        """Return the sums over each rollout, [N, K]."""
        return np.stack([np.add.reduceat(term, self.offsets[:-1]) for term in terms], axis=1)

    def shares(self, parts: Sequence[Float64], whole: Float64, resamples: int) -> Sequence[Interval]:
        """Return the share of each part in the whole, with its bootstrap-t interval over prompt groups."""
        if not self.tokens:
            return [_UNKNOWN] * len(parts)
        products = self.sums([part * whole for part in (*parts, whole)])
        return bootstrap_intervals(products[:, :-1], products[:, -1], self.groups, resamples=resamples)

    def mean(self, values: Float64, resamples: int) -> Interval:
        """Return the mean over tokens, with its bootstrap-t interval over prompt groups."""
        if not self.tokens:
            return _UNKNOWN
        return bootstrap_interval(self.sums([values])[:, 0], np.diff(self.offsets), self.groups, resamples=resamples)

    def link(self, target: str, behaviour: str, cause: str, share: Interval = _UNKNOWN) -> Link:
        """Return the moments of one link."""
        d = self.d(target, behaviour)
        k3 = mean = square = largest = math.nan
        if self.tokens:
            k3, mean, square = (self.sums((token.k3_kl(d), d, np.square(d))).sum(axis=0) / self.tokens).tolist()
            largest = float(np.abs(d).max())
        return Link(
            name=comparison_name(target, behaviour), cause=cause, k3_kl=k3, excess_k3_kl=math.nan, mean_d=mean,
            rms_d=math.sqrt(square), max_abs_d=largest, share=share.mean, share_low=share.low, share_high=share.high,
        )  # fmt: skip


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
    shared = _Shared.of({name: scores[name] for name in present}, offsets, mask, group_ids)
    d, pairs = shared.d(present[-1], present[0]), [(later, earlier) for earlier, later in itertools.pairwise(present)]
    of_links = [shared.d(*pair) for pair in pairs]
    shares = shared.shares(of_links, d, MORE_RESAMPLES)
    square = float(np.square(d).sum())
    squares = sum(float(np.square(values).sum()) for values in of_links)
    certain = Interval(1.0, 1.0, 1.0, 0) if square > 0.0 else _UNKNOWN
    return Attribution(
        chain=present,
        missing=tuple(name for name in chain if name not in scores),
        links=tuple(
            shared.link(later, earlier, cause_of_link(earlier, later), share)
            for (later, earlier), share in zip(pairs, shares, strict=True)
        ),
        whole=shared.link(present[-1], present[0], "the whole difference between the ends of the chain", certain),
        cancellation=squares / square if square > 0.0 else math.nan,
        telescoping_error=float(np.abs(np.sum(of_links, axis=0) - d).max(initial=0.0)),
        tokens=shared.tokens,
        rollouts=shared.rollouts,
        groups=int(np.unique(shared.groups).size),
        side_branch=_side_branch(_Shared.of(scores, offsets, mask, group_ids), chain) if REFERENCE in scores else None,
    )


def _side_branch(shared: _Shared, chain: Sequence[str]) -> SideBranch:
    """Compare every score with the float32 forward pass over the tokens that all of them share.

    The score that is nearer to it has the smaller numerical error.
    """
    place = {name: number for number, name in enumerate(chain)}
    others = sorted(shared.scores.keys() - {REFERENCE}, key=lambda name: (place.get(name, len(chain)), name))
    engine, trainer = middle_of_chain([name for name in chain if name in shared.scores])
    found = _UNKNOWN
    if engine and trainer:
        # E[d²] of the engine minus that of the trainer.
        squares = np.square(shared.d(REFERENCE, engine)) - np.square(shared.d(REFERENCE, trainer))
        found = shared.mean(squares, MORE_RESAMPLES)
    return SideBranch(
        reference=REFERENCE,
        links=tuple(shared.link(REFERENCE, name, f"{name} against float32") for name in others),
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


def environment_link(
    first: ArrayLike,
    second: ArrayLike,
    whole: tuple[ArrayLike, ArrayLike] | None,
    offsets: ArrayLike,
    mask: ArrayLike | None = None,
    group_ids: Iterable[object] | None = None,
) -> Link:
    """Return the link between two replays of a scorer, [T] over the tokens of N rollouts cut at `offsets` [N + 1].

    `whole` has the last and the first score of the chain, [T] each; without it the share is NaN. A token with a value
    that is not finite is excluded. Raises InvalidRolloutsError if sizes or types do not fit.
    """
    given = {"first": first, "second": second}
    if whole is not None:
        given |= {"target": whole[0], "behaviour": whole[1]}
    shared, share = _Shared.of(given, offsets, mask, group_ids), _UNKNOWN
    if whole is not None:
        (share,) = shared.shares([shared.d("second", "first")], shared.d("target", "behaviour"), RESAMPLES)
    return shared.link("second", "first", "the environment", share)


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
    shared = _Shared.of({"logged": logged, "first": first, "second": second}, offsets, mask, group_ids)
    one, other = shared.d("first", "logged"), shared.d("second", "logged")
    found = shared.mean(0.5 * (one * other - 0.5 * np.square(shared.d("first", "second"))), RESAMPLES)
    return found.mean, found.low, found.high
