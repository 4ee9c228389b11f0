"""A token id at which the mismatch begins: an attention mask that drops an id which the model sampled.

A trainer that makes its attention mask from `id != pad` scores what follows a sampled padding id in another context:
every uncertain token after it differs. The id is not declared, so the data name it. A token with |d| of `LARGE_D` or
more hardly occurs in a healthy batch; the ids that stand before the first one of a response, and rarely elsewhere, are
the candidates. At most `CANDIDATES` of them are summed over the whole batch; without large differences there are none,
and nothing is computed.

Faulty masks give a mean k3 after the id of 349 to 4,424 times that of all tokens, measured on recorded runs; any other
id of those runs gives at most 8. Single large differences can follow a rare id by chance, and a policy that is
uncertain only after an id has most of its k3 there. So the id is compared with the responses that do not have it, in k3
per token and in k3 per nat of surprisal, and with the tokens before it; and large differences must follow it in several
responses of several prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.counting import EvidenceBuilder
from foreshock.lint.report import Clean, Example, Finding, NotChecked, Outcome, format_number, format_percent
from foreshock.lint.values import example_at
from foreshock.measures.statistics.compensated_sums import CompensatedSums
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.schema import are_log_probs

if TYPE_CHECKING:
    from foreshock.lint.evidence import LintEvidence


LARGE_D = 0.5
CANDIDATES = 8
AFTER_COUNTS = (
    "rollouts",  # with a compared token after the first occurrence
    "hits",  # of these: with |d| of LARGE_D or more after it
    "near",  # of the hits: within the next tokens
    "groups",  # prompt groups of the hits; a group that shards share counts once for each
    "tokens",  # compared tokens after it, and before it or at it
    "tokens_before",
)
AFTER_SUMS = ("k3", "k3_before", "surprisal", "surprisal_before")

# Rollouts in which candidates are looked for, and how far before the first large difference.
_ROLLOUTS_SEARCHED, _TOKENS_SEARCHED = 256, 64
_LARGEST_D = 20.0
# A dropped id moves the very next tokens.
_NEAR = 8
# Larger ids, which no vocabulary has, are counted by sorting.
_LARGEST_VOCABULARY = 1 << 22

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class MismatchAfterIds:
    """Token ids [K] with AFTER_COUNTS of each, [K, 6], and AFTER_SUMS, [K, 4] in nats (k3, and −log μ).

    An id of one batch may be missing in another, where no large difference follows it.
    """

    ids: Ids
    counts: NDArray[np.int64]
    sums: CompensatedSums

    @classmethod
    def empty(cls) -> MismatchAfterIds:
        """Return a table without an id."""
        counts = np.zeros((0, len(AFTER_COUNTS)), np.int64)
        return cls(np.zeros(0, np.int64), counts, CompensatedSums.zeros(0, len(AFTER_SUMS)))

    def merge(self, other: MismatchAfterIds) -> MismatchAfterIds:
        """Return the ids of both; counts and sums of a common id are added."""
        union = np.union1d(self.ids, other.ids)
        counts = np.zeros((union.size, len(AFTER_COUNTS)), np.int64)
        sums = CompensatedSums.zeros(union.size, len(AFTER_SUMS))
        for part in (self, other):
            slots = np.searchsorted(union, part.ids)
            counts[slots] += part.counts
            total = CompensatedSums(sums.high[slots], sums.low[slots]) + part.sums
            sums.high[slots], sums.low[slots] = total.high, total.low
        return MismatchAfterIds(union, counts, sums)

    def count(self, index: int, name: str) -> int:
        """Return one of AFTER_COUNTS of the id at `index`."""
        return int(self.counts[index, AFTER_COUNTS.index(name)])

    def sum(self, index: int, name: str) -> float:
        """Return one of AFTER_SUMS of the id at `index`, in nats."""
        return float(self.sums.value[index, AFTER_SUMS.index(name)])


def mismatch_after_ids(batch: RolloutBatch, builder: EvidenceBuilder, *, any_large: bool) -> MismatchAfterIds:
    """Return the sums of the candidates of a batch. `any_large`: some |d| of a compared token reaches LARGE_D."""
    if not any_large or batch.rollout_log_probs is None or batch.trainer_log_probs is None:
        return MismatchAfterIds.empty()
    d = batch.trainer_log_probs - batch.rollout_log_probs
    compared = are_log_probs(batch.trainer_log_probs) & are_log_probs(batch.rollout_log_probs)
    if batch.response_mask is not None:
        compared &= batch.response_mask != 0
    d[~compared] = 0.0
    np.clip(d, -_LARGEST_D, _LARGEST_D, out=d)
    large = np.flatnonzero(np.abs(d) >= np.float32(LARGE_D))
    candidates = _candidates(batch, large)
    surprisal = np.where(compared, -batch.rollout_log_probs, np.float32(0.0))
    k3 = np.expm1(d) - d
    found = [_sums_of(batch, int(each), compared, large, k3, surprisal) for each in candidates]
    # Examples of the id with the largest mean k3 after it, which is the one that a finding names.
    worst = max(found, key=lambda each: each[1]["k3"] / max(each[0]["tokens"], 1), default=None)
    for place in worst[2] if worst is not None else ():
        text = f"id {batch.response_token_ids[place]}, log μ {batch.rollout_log_probs[place]:.4g}; large |d| follow"
        builder.add_example("mismatch_after_id", example_at(batch, place, text))
    values = np.array([[sums[name] for name in AFTER_SUMS] for _, sums, _ in found]).reshape(-1, len(AFTER_SUMS))
    counted = [[counts[name] for name in AFTER_COUNTS] for counts, _, _ in found]
    return MismatchAfterIds(
        candidates,
        np.array(counted, np.int64).reshape(-1, len(AFTER_COUNTS)),
        CompensatedSums(values, np.zeros_like(values)),
    )


def _candidates(batch: RolloutBatch, large: Ids) -> Ids:
    """Return at most CANDIDATES ids, ascending: those before the first large difference of responses, rare elsewhere.

    The order is by R² / occurrences, for an id that stands in R of the searched windows; then by how near it stands.
    """
    offsets, ids = batch.response_offsets, batch.response_token_ids
    rows, first = np.unique(np.searchsorted(offsets, large, side="right") - 1, return_index=True)
    ends = large[first]
    if rows.size > _ROLLOUTS_SEARCHED:
        many = np.bincount(np.searchsorted(rows, np.searchsorted(offsets, large, side="right") - 1))
        worst = np.argsort(-many, kind="stable")[:_ROLLOUTS_SEARCHED]
        rows, ends = rows[worst], ends[worst]
    starts = np.maximum(offsets[rows], ends - _TOKENS_SEARCHED)
    lengths = ends - starts
    if not lengths.sum():
        return np.zeros(0, np.int64)
    window = np.repeat(np.arange(rows.size), lengths)
    places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths) + starts[window]
    distance = ends[window] - places
    # One entry for each id of a window, at its nearest occurrence.
    order = np.lexsort((distance, ids[places], window))
    of_window, of_id = window[order], ids[places][order]
    fresh = np.ones(order.size, bool)
    fresh[1:] = (of_window[1:] != of_window[:-1]) | (of_id[1:] != of_id[:-1])
    unique, inverse = np.unique(of_id[fresh], return_inverse=True)
    windows = np.bincount(inverse)
    nearness = np.bincount(inverse, distance[order][fresh]) / windows
    occurrences = _occurrences(ids, unique)
    best = np.lexsort((unique, nearness, -(windows.astype(np.float64) ** 2) / occurrences))[:CANDIDATES]
    return np.sort(unique[best]).astype(np.int64)


def _occurrences(ids: NDArray[np.integer], unique: NDArray[np.integer]) -> Ids:
    """Return how often each of the `unique` ids occurs, shape [U]."""
    if ids.min() >= 0 and ids.max() < _LARGEST_VOCABULARY:
        return np.asarray(np.bincount(ids)[unique], np.int64)
    kept, counts = np.unique(ids, return_counts=True)
    return np.asarray(counts[np.searchsorted(kept, unique)], np.int64)


def _sums_of(
    batch: RolloutBatch,
    token_id: int,
    compared: NDArray[np.bool_],
    large: Ids,
    k3: NDArray[np.float32],
    surprisal: NDArray[np.float32],
) -> tuple[dict[str, int], dict[str, float], list[int]]:
    """Return AFTER_COUNTS, AFTER_SUMS, and the positions of three first occurrences that are hits."""
    offsets = batch.response_offsets
    places = np.flatnonzero(batch.response_token_ids == token_id)
    rows, first = np.unique(np.searchsorted(offsets, places, side="right") - 1, return_index=True)
    at = places[first] + 1
    # Rows in turn: the tokens up to the first occurrence, and those after it.
    bounds = np.stack([offsets[rows], at, offsets[rows + 1]], axis=1)
    of_parts = {
        name: np.stack([_between(values, bounds[:, part], bounds[:, part + 1]) for part in (0, 1)], axis=1)
        for name, values in (("tokens", compared), ("k3", k3), ("surprisal", surprisal))
    }
    kept = of_parts["tokens"][:, 1] > 0
    next_large = np.searchsorted(large, at)
    hit = np.searchsorted(large, bounds[:, 2]) > next_large
    distance = np.append(large, np.iinfo(np.int64).max)[next_large] - at
    totals = {name: values[kept].sum(axis=0) for name, values in of_parts.items()}
    counts = {
        "rollouts": int(kept.sum()),
        "hits": int((hit & kept).sum()),
        "near": int((hit & kept & (distance < _NEAR)).sum()),
        "groups": _number_of_groups(batch, rows[hit & kept]),
        "tokens": int(totals["tokens"][1]),
        "tokens_before": int(totals["tokens"][0]),
    }
    sums = {
        "k3": float(totals["k3"][1]),
        "k3_before": float(totals["k3"][0]),
        "surprisal": float(totals["surprisal"][1]),
        "surprisal_before": float(totals["surprisal"][0]),
    }
    return counts, sums, (at[hit & kept][:3] - 1).tolist()


def _number_of_groups(batch: RolloutBatch, rows: Ids) -> int:
    """Return the number of prompt groups of these rollouts; a rollout without a group is one of its own."""
    groups = batch.group_ids
    return len({row if groups is None or groups[row] is None else groups[row] for row in rows.tolist()})


def _between(values: NDArray[np.float32] | NDArray[np.bool_], starts: Ids, ends: Ids) -> NDArray[np.float64]:
    """Return the sum of `values` from each start up to its end, shape [R]; 0 where they are equal."""
    sums = np.zeros(starts.size)
    filled = np.flatnonzero(ends > starts)
    if filled.size:
        lengths = (ends - starts)[filled]
        heads = np.cumsum(lengths) - lengths
        # Gathered, because most ids stand in few responses: reduceat would also sum what lies between them.
        gathered = values[np.arange(lengths.sum()) + np.repeat(starts[filled] - heads, lengths)]
        sums[filled] = np.add.reduceat(gathered, heads, dtype=np.float64)
    return sums


_CHECK = "mismatch_after_id"
_TIMES_THE_OTHERS = 30.0
_TIMES_THEIR_RATE = 20.0
_NEAR_SHARE, _TIMES_BEFORE, _SHARE_OF_K3 = 0.5, 10.0, 0.8
# With two prompts, 3 of 2,222 healthy batches have an id that large differences follow by chance (benchmarks/lint.py).
_LEAST_HITS, _LEAST_GROUPS, _HIT_SHARE = 3, 3, 0.2
# An id that nearly every response has leaves no others to compare with.
_LEAST_OTHERS = 0.1
# float32 log-probs give no smaller k3.
_LEAST_K3 = 1e-9


@dataclass(frozen=True, slots=True)
class PairTotals:
    """Tokens with two log-probs, and their Σ k3 and Σ −log μ in nats."""

    tokens: int
    k3: float
    surprisal: float


def check_after_id(evidence: LintEvidence) -> Outcome:
    """Check a batch or a step."""
    if not evidence.count("paired"):
        return NotChecked(_CHECK, "needs rollout_log_probs and trainer_log_probs")
    totals = PairTotals(evidence.count("paired"), evidence.sum("paired_k3"), evidence.sum("paired_surprisal"))
    return check_mismatch_after_ids(evidence.after_ids, totals, evidence.where(_CHECK))


def check_mismatch_after_ids(table: MismatchAfterIds, totals: PairTotals, where: tuple[Example, ...] = ()) -> Outcome:
    """Return the finding on the id with the largest mean k3 after it, of those that satisfy every condition."""
    found = [each for index in range(table.ids.size) if (each := _finding(table, index, totals, where)) is not None]
    return max(found, key=lambda each: each.evidence["k3_after"], default=Clean(_CHECK))


def _finding(table: MismatchAfterIds, index: int, totals: PairTotals, where: tuple[Example, ...]) -> Finding | None:
    token_id, after = int(table.ids[index]), table.count(index, "tokens")
    before, rollouts, hits = (table.count(index, name) for name in ("tokens_before", "rollouts", "hits"))
    near = table.count(index, "near") >= _NEAR_SHARE * hits
    enough = near and hits >= max(_LEAST_HITS, _HIT_SHARE * rollouts) and table.count(index, "groups") >= _LEAST_GROUPS
    others = totals.tokens - after - before
    if not enough or not before or others < _LEAST_OTHERS * totals.tokens:
        return None
    k3, k3_before = table.sum(index, "k3"), table.sum(index, "k3_before")
    surprisal, surprisal_before = table.sum(index, "surprisal"), table.sum(index, "surprisal_before")
    of_others = max((totals.k3 - k3 - k3_before) / others, _LEAST_K3)
    surprisal_of_others = max((totals.surprisal - surprisal - surprisal_before) / others, _LEAST_K3)
    mean, mean_before = k3 / after, max(k3_before / before, _LEAST_K3)
    # k3 / mean surprisal, so that tokens are compared with equally uncertain ones.
    times_rate = (k3 / max(surprisal, _LEAST_K3)) / (of_others / surprisal_of_others)
    begins_here = mean >= _TIMES_THE_OTHERS * max(of_others, mean_before)
    if not begins_here or times_rate < _TIMES_THEIR_RATE:
        return None
    # Without the tokens after the id, all others must be at one level.
    if of_others > _TIMES_BEFORE * mean_before or k3 < _SHARE_OF_K3 * totals.k3:
        return None
    over_mean = mean / (totals.k3 / totals.tokens)
    seen = (
        f"Your mask drops token {token_id}, which the model sampled: after its first occurrence in a response k3 "
        f"averages {format_number(mean)} ({after:,} tokens of {rollouts:,} responses), before it "
        f"{format_number(mean_before)}, in responses without it {format_number(of_others)}. "
        f"{format_percent(after, totals.tokens)} of the tokens have {format_percent(k3, totals.k3)} of all k3."
    )
    numbers = {
        "token_id": float(token_id),
        "rollouts": rollouts,
        "tokens_after": after,
        "k3_after": mean,
        "k3_before": mean_before,
        "k3_of_other_responses": of_others,
        "k3_after_over_mean": over_mean,
    }
    return Finding(
        _CHECK, "critical", seen, numbers, tuple(each for each in where if each.text.startswith(f"id {token_id},"))
    )
