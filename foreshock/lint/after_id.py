"""Find a token id after which the mismatch begins: the attention mask drops an id that the model sampled.

A trainer that computes its attention mask as `id != pad` also masks a padding id that the model sampled. All uncertain
tokens after it are then scored in another context and differ. The padding id is not declared, so it is inferred from
the data. |d| of `LARGE_D` or more is rare in a healthy batch. The candidates are ids that stand before the first large
difference of a response, and rarely elsewhere. At most `CANDIDATES` of them are summed over the whole batch. Without
large differences there are no candidates, and nothing is computed.

Faulty masks give a mean k3 after the id of 349 to 4,424 times that of all tokens, measured on recorded runs; any other
id of those runs gives at most 8 times. Single large differences can follow a rare id by chance, and a policy that is
uncertain only after an id has most of its k3 there. So the tokens after the id are compared with responses without the
id, in k3 per token and in k3 per nat of surprisal, and with the tokens before the id. Large differences must also
follow the id in several responses of several prompts.

Only tokens that the model sampled count, as candidates and as first occurrences, because template tokens and tool
output stand before every later turn. If masked tokens stand before the id, or between the id and the large differences,
the differences may come from the new turn, and are no evidence against the id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.counting import EvidenceBuilder, Ints, KeyedSums
from foreshock.lint.report import Clean, Finding, NotChecked, Outcome, format_number, format_percent
from foreshock.lint.values import example_at
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.schema import are_log_probs

if TYPE_CHECKING:
    from foreshock.lint.evidence import LintEvidence


LARGE_D = 0.5
CANDIDATES = 8
# Candidates are searched in at most this many rollouts and tokens before the first large difference.
_ROLLOUTS_SEARCHED, _TOKENS_SEARCHED = 256, 64
_LARGEST_D = 20.0
# A large difference within this many tokens is near the id: a dropped id changes the very next tokens.
_NEAR = 8
# Larger ids, which no vocabulary has, are counted by sorting.
_LARGEST_VOCABULARY = 1 << 22


class MismatchAfterIds(KeyedSums):
    """Sums after the first sampled occurrence of an id in a response, by token id, in nats (k3, and −log μ).

    A batch may lack an id of another batch, if no large difference follows the id there.
    """

    __slots__ = ()
    COUNTS = (
        "rollouts",  # with a compared token after the first occurrence
        "hits",  # of these: with |d| of LARGE_D or more after it
        "near",  # of the hits: first large |d| within _NEAR tokens, no masked token from the one before the id up to it
        "groups",  # prompt groups of the hits; a group in several shards counts once per shard
        "tokens",  # compared tokens after the first occurrence
        "tokens_before",  # compared tokens before it or at it
    )
    SUMS = ("k3", "k3_before", "surprisal", "surprisal_before")


def mismatch_after_ids(batch: RolloutBatch, builder: EvidenceBuilder, *, any_large: bool) -> MismatchAfterIds:
    """Return the sums of the candidates of a batch. `any_large`: |d| of some compared token reaches LARGE_D."""
    if not any_large or batch.rollout_log_probs is None or batch.trainer_log_probs is None:
        return MismatchAfterIds.empty()
    d = batch.trainer_log_probs - batch.rollout_log_probs
    generated = batch.generated
    compared = are_log_probs(batch.trainer_log_probs) & are_log_probs(batch.rollout_log_probs) & generated
    d[~compared] = 0.0
    np.clip(d, -_LARGEST_D, _LARGEST_D, out=d)
    large = np.flatnonzero(np.abs(d) >= np.float32(LARGE_D))
    candidates = _candidates(batch, generated, large)
    surprisal = np.where(compared, -batch.rollout_log_probs, np.float32(0.0))
    k3 = np.expm1(d, dtype=np.float64) - d
    masked_before = np.concatenate([[0], np.cumsum(~generated)])
    columns = {"tokens": compared, "k3": k3, "surprisal": surprisal}
    found = [
        _sums_of(batch, np.flatnonzero((batch.response_token_ids == each) & generated), masked_before, large, columns)
        for each in candidates
    ]
    # Keep examples of the id with the largest mean k3 after it; a finding names this id.
    worst = max(found, key=lambda each: each[1][0] / max(each[0][4], 1), default=None)
    for place in worst[2] if worst is not None else ():
        text = f"id {batch.response_token_ids[place]}, log μ {batch.rollout_log_probs[place]:.4g}; large |d| follow"
        builder.add_example("mismatch_after_id", example_at(batch, place, text))
    counts, sums = np.array([each[0] for each in found], np.int64), np.array([each[1] for each in found])
    return MismatchAfterIds.of(candidates, counts, sums)


def _candidates(batch: RolloutBatch, generated: NDArray[np.bool_], large: Ints) -> Ints:
    """Return at most CANDIDATES ids, ascending, that stand before the first large difference and rarely elsewhere.

    Ids rank by R² / occurrences, where R is the number of searched windows with the id; ties rank by distance.
    """
    offsets, ids = batch.response_offsets, batch.response_token_ids
    rows, first = np.unique(np.searchsorted(offsets, large, side="right") - 1, return_index=True)
    ends = large[first]
    if rows.size > _ROLLOUTS_SEARCHED:
        many = np.bincount(np.searchsorted(rows, np.searchsorted(offsets, large, side="right") - 1))
        worst = np.argsort(-many, kind="stable")[:_ROLLOUTS_SEARCHED]
        rows, ends = rows[worst], ends[worst]
    places, window = _ranges(np.maximum(offsets[rows], ends - _TOKENS_SEARCHED), ends)
    places, window = places[generated[places]], window[generated[places]]
    if not places.size:
        return np.zeros(0, np.int64)
    distance = ends[window] - places
    # One entry for each id of a window, at its nearest occurrence.
    order = np.lexsort((distance, ids[places], window))
    of_window, of_id = window[order], ids[places][order]
    fresh = np.ones(order.size, bool)
    fresh[1:] = (of_window[1:] != of_window[:-1]) | (of_id[1:] != of_id[:-1])
    unique, inverse = np.unique(of_id[fresh], return_inverse=True)
    windows = np.bincount(inverse)
    nearness = np.bincount(inverse, distance[order][fresh]) / windows
    sampled = ids if generated.all() else ids[generated]
    if sampled.min() >= 0 and sampled.max() < _LARGEST_VOCABULARY:
        occurrences = np.bincount(sampled)[unique]
    else:
        kept, counts = np.unique(sampled, return_counts=True)
        occurrences = counts[np.searchsorted(kept, unique)]
    best = np.lexsort((unique, nearness, -(windows.astype(np.float64) ** 2) / occurrences))[:CANDIDATES]
    return np.sort(unique[best]).astype(np.int64)


def _sums_of(
    batch: RolloutBatch, places: Ints, masked_before: Ints, large: Ints, columns: Mapping[str, NDArray[Any]]
) -> tuple[list[int], list[float], list[int]]:
    """Return the counts and sums of an id, and the positions of three first occurrences that are hits.

    `places` are the positions of the id, and `large` those of large differences; `masked_before` [T + 1] counts the
    masked tokens before each position; `columns` [T] are summed over the tokens before and after the first occurrence.
    """
    offsets = batch.response_offsets
    rows, first = np.unique(np.searchsorted(offsets, places, side="right") - 1, return_index=True)
    at = places[first] + 1
    # Two parts per row: the tokens up to the first occurrence, and those after it (may be empty).
    starts, ends = np.stack([offsets[rows], at], axis=1).ravel(), np.stack([at, offsets[rows + 1]], axis=1).ravel()
    positions, parts = _ranges(starts, ends)
    before, after = (
        {name: np.bincount(parts, values[positions], starts.size)[side::2] for name, values in columns.items()}
        for side in (0, 1)
    )
    kept = after["tokens"] > 0
    next_large = np.searchsorted(large, at)
    hit = kept & (np.searchsorted(large, offsets[rows + 1]) > next_large)
    first_large = np.append(large, batch.num_tokens)[next_large]
    unbroken = masked_before[first_large] == masked_before[np.maximum(at - 2, offsets[rows])]
    near = hit & (first_large - at < _NEAR) & unbroken
    groups = batch.group_ids
    hits = rows[hit].tolist()
    named = {row if groups is None or groups[row] is None else groups[row] for row in hits}
    sizes = [int(side["tokens"][kept].sum()) for side in (after, before)]
    counts = [int(kept.sum()), int(hit.sum()), int(near.sum()), len(named), *sizes]
    sums = [float(side[name][kept].sum()) for name in ("k3", "surprisal") for side in (after, before)]
    return counts, sums, (at[hit][:3] - 1).tolist()


def _ranges(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return all positions with start ≤ position < end, [P], and the index of the range of each position, [P]."""
    lengths = ends - starts
    parts = np.repeat(np.arange(starts.size), lengths)
    return np.arange(parts.size) + (starts - np.cumsum(lengths) + lengths)[parts], parts


_CHECK = "mismatch_after_id"
_TIMES_THE_OTHERS = 30.0
_TIMES_THEIR_RATE = 20.0
_NEAR_SHARE, _TIMES_BEFORE, _SHARE_OF_K3 = 0.5, 10.0, 0.8
# With two prompts, 3 of 2,222 healthy batches have an id that large differences follow by chance.
_LEAST_HITS, _LEAST_GROUPS, _HIT_SHARE = 3, 3, 0.2
# If nearly every response has the id, too few other tokens are left to compare with.
_LEAST_OTHERS = 0.1
# float32 log-probs do not resolve a smaller k3.
_LEAST_K3 = 1e-9


def check_after_id(evidence: LintEvidence) -> Outcome:
    """Return the finding on the id with the largest mean k3 after it, of those that satisfy every condition."""
    if not evidence.count("paired"):
        return NotChecked(_CHECK, "needs rollout_log_probs and trainer_log_probs")
    found = (_finding(evidence, index) for index in range(evidence.after_ids.keys.size))
    return max(filter(None, found), key=lambda each: each.evidence["k3_after"], default=Clean(_CHECK))


def _finding(evidence: LintEvidence, index: int) -> Finding | None:
    token_id, of_id = int(evidence.after_ids.keys[index]), evidence.after_ids.row(index)
    whole, whole_k3 = evidence.count("paired"), evidence.sum("paired_k3")
    rollouts, hits, after, before = (int(of_id[name]) for name in ("rollouts", "hits", "tokens", "tokens_before"))
    enough = hits >= max(_LEAST_HITS, _HIT_SHARE * rollouts) and of_id["groups"] >= _LEAST_GROUPS
    others = whole - after - before
    if not enough or of_id["near"] < _NEAR_SHARE * hits or not before or others < _LEAST_OTHERS * whole:
        return None
    k3, k3_before = of_id["k3"], of_id["k3_before"]
    surprisal = of_id["surprisal"]
    of_others = max((whole_k3 - k3 - k3_before) / others, _LEAST_K3)
    surprisal_left = evidence.sum("paired_surprisal") - surprisal - of_id["surprisal_before"]
    surprisal_of_others = max(surprisal_left / others, _LEAST_K3)
    mean, mean_before = k3 / after, max(k3_before / before, _LEAST_K3)
    # k3 per nat of surprisal compares tokens with equally uncertain ones.
    times_rate = (k3 / max(surprisal, _LEAST_K3)) / (of_others / surprisal_of_others)
    begins_here = mean >= _TIMES_THE_OTHERS * max(of_others, mean_before)
    if not begins_here or times_rate < _TIMES_THEIR_RATE:
        return None
    # All other tokens must be at one level, and most of k3 must be after the id.
    if of_others > _TIMES_BEFORE * mean_before or k3 < _SHARE_OF_K3 * whole_k3:
        return None
    over_mean = mean / (whole_k3 / whole)
    seen = (
        f"Your mask drops token {token_id}, which the model sampled: after its first occurrence in a response k3 "
        f"averages {format_number(mean)} ({after:,} tokens of {rollouts:,} responses), before it "
        f"{format_number(mean_before)}, in responses without it {format_number(of_others)}. "
        f"{format_percent(after, whole)} of the tokens have {format_percent(k3, whole_k3)} of all k3."
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
    where = tuple(each for each in evidence.where(_CHECK) if each.text.startswith(f"id {token_id},"))
    return Finding(_CHECK, "critical", seen, numbers, where)
