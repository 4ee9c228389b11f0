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

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.checks.pairs import Pairs, if_invalid
from foreshock.lint.counting import LARGEST_D, Counting, Counts, Ints, Table, TokenPairs
from foreshock.lint.judging import Check, Clean, Finding, Judging, Outcome, format_number, format_percent
from foreshock.rollouts.arrays import rows_of_positions
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.schema import are_log_probs

LARGE_D = 0.5
CANDIDATES = 8
# Candidates are searched in at most this many rollouts and tokens before the first large difference.
_ROLLOUTS_SEARCHED, _TOKENS_SEARCHED = 256, 64
# A large difference within this many tokens is near the id: a dropped id changes the very next tokens.
_NEAR = 8
_TIMES_THE_OTHERS = 30.0
_TIMES_THEIR_RATE = 20.0
_NEAR_SHARE, _TIMES_BEFORE, _SHARE_OF_K3 = 0.5, 10.0, 0.8
# The other tokens have at most so many times a healthy k3: an engine with FP8 weights counts as clean.
_CLEAN = 10.0
# With two prompts, 3 of 2,222 healthy batches have an id that large differences follow by chance.
_LEAST_HITS, _LEAST_GROUPS, _HIT_SHARE = 3, 3, 0.2
# If nearly every response has the id, too few other tokens are left to compare with.
_LEAST_OTHERS = 0.1
# float32 log-probs do not resolve a smaller k3.
_LEAST_K3 = 1e-9


class SumsAfterId(Table):
    """Sums after the first sampled occurrence of an id in a response, by token id, in nats (k3, and −log μ).

    A batch may lack an id of another batch, if no large difference follows the id there.
    """

    COLUMNS = (
        "rollouts",  # with a compared token after the first occurrence
        "hits",  # of these: with |d| of LARGE_D or more after it
        "near",  # of the hits: first large |d| within _NEAR tokens, no masked token from the one before the id up to it
        "groups",  # prompt groups of the hits; a group in several shards counts once per shard
        "tokens",  # compared tokens after the first occurrence
        "tokens_before",  # compared tokens before it or at it
        "k3",
        "k3_before",
        "surprisal",
        "surprisal_before",
    )


@dataclass
class AfterIds(Counts):
    """Sums after the ids that may start a mismatch."""

    large: int = 0  # tokens with |d| of LARGE_D or more
    by_id: SumsAfterId = field(default_factory=SumsAfterId)

    def add_pairs(self, pairs: TokenPairs, counting: Counting) -> None:
        large = np.count_nonzero(pairs.d >= np.float32(LARGE_D)) + np.count_nonzero(pairs.d <= np.float32(-LARGE_D))
        self.add(large=large)

    def add_batch(self, counting: Counting) -> None:
        batch = counting.batch
        if not self.large or batch.rollout_log_probs is None or batch.trainer_log_probs is None:
            return
        d = batch.trainer_log_probs - batch.rollout_log_probs
        compared = are_log_probs(batch.trainer_log_probs) & are_log_probs(batch.rollout_log_probs) & batch.generated
        d[~compared] = 0.0
        np.clip(d, -LARGEST_D, LARGEST_D, out=d)
        large = np.flatnonzero(np.abs(d) >= np.float32(LARGE_D))
        surprisal = np.where(compared, -batch.rollout_log_probs, np.float32(0.0))
        columns = compared, np.expm1(d, dtype=np.float64) - d, surprisal, ~batch.generated
        # The sums of each column over the tokens before each position, [4, T + 1].
        before = np.zeros((len(columns), d.size + 1))
        np.cumsum(columns, axis=1, out=before[:, 1:])
        found = {each: _sums_of(batch, each, large, before) for each in _candidates(batch, large)}
        if not found:
            return
        self.by_id += SumsAfterId(np.array([*found], np.uint64), np.array([row for row, _ in found.values()]))
        # Keep examples of the id with the largest mean k3 after it; a finding names this id.
        names = SumsAfterId.COLUMNS
        k3, tokens = names.index("k3"), names.index("tokens")
        _, examples = max(found.values(), key=lambda each: each[0][k3] / max(each[0][tokens], 1))
        for place in examples:
            text = f"id {batch.response_token_ids[place]}, log μ {batch.rollout_log_probs[place]:.4g}; large |d| follow"
            counting.add_token("mismatch_after_id", place, text)


def _candidates(batch: RolloutBatch, large: Ints) -> list[int]:
    """Return at most CANDIDATES ids, ascending, that stand before the first large difference and rarely elsewhere.

    Ids rank by R² / occurrences, where R is the number of searched windows with the id; ties rank by distance.
    """
    offsets, ids, generated = batch.response_offsets, batch.response_token_ids, batch.generated
    rows, first, many = np.unique(rows_of_positions(offsets, large), return_index=True, return_counts=True)
    windows, distances = Counter[int](), Counter[int]()
    for each in np.argsort(-many, kind="stable")[:_ROLLOUTS_SEARCHED]:
        end = int(large[first[each]])
        # The nearest occurrence comes first.
        places = np.arange(end - 1, max(offsets[rows[each]], end - _TOKENS_SEARCHED) - 1, -1)
        places = places[generated[places]]
        unique, nearest = np.unique(ids[places], return_index=True)
        windows.update(unique.tolist())
        distances.update(dict(zip(unique.tolist(), (end - places[nearest]).tolist(), strict=True)))
    kept, counts = np.unique(ids[np.isin(ids, [*windows]) & generated], return_counts=True)
    occurrences = dict(zip(kept.tolist(), counts.tolist(), strict=True))
    ranked = sorted(windows, key=lambda of: (-(windows[of] ** 2) / occurrences[of], distances[of] / windows[of], of))
    return sorted(ranked[:CANDIDATES])


def _sums_of(
    batch: RolloutBatch, token_id: int, large: Ints, before: NDArray[np.float64]
) -> tuple[list[float], list[int]]:
    """Return SumsAfterId.COLUMNS of an id, and the positions of three first occurrences that are hits.

    `large` are the positions of large differences; `before` [4, T + 1] are the compared tokens, their k3 and surprisal,
    and the masked tokens before each position.
    """
    offsets, groups = batch.response_offsets, batch.group_ids
    places = np.flatnonzero((batch.response_token_ids == token_id) & batch.generated)
    rows, first = np.unique(rows_of_positions(offsets, places), return_index=True)
    at, masked = places[first] + 1, before[3]
    kept = before[0, offsets[rows + 1]] > before[0, at]
    next_large = np.searchsorted(large, at)
    hit = kept & (np.searchsorted(large, offsets[rows + 1]) > next_large)
    first_large = np.append(large, batch.num_tokens)[next_large]
    unbroken = masked[first_large] == masked[np.maximum(at - 2, offsets[rows])]
    near = hit & (first_large - at < _NEAR) & unbroken
    named = {row if groups is None or groups[row] is None else groups[row] for row in rows[hit].tolist()}
    starts, ends = before[:3, offsets[rows[kept]]], before[:3, offsets[rows[kept] + 1]]
    until = before[:3, at[kept]]
    sums = np.stack([(ends - until).sum(axis=1), (until - starts).sum(axis=1)], axis=1)
    row = [float(each) for each in (kept.sum(), hit.sum(), near.sum(), len(named), *sums.ravel())]
    return row, (at[hit][:3] - 1).tolist()


def _check(judging: Judging) -> Outcome:
    """Return the finding on the id with the largest mean k3 after it, of those that satisfy every condition."""
    found = (_finding(judging, index) for index in range(judging[AfterIds].by_id.keys.size))
    return max(filter(None, found), key=lambda each: each.evidence["k3_after"], default=Clean())


def _finding(judging: Judging, index: int) -> Finding | None:
    by_id, pairs = judging[AfterIds].by_id, judging[Pairs]
    token_id, of_id = int(by_id.keys[index]), dict(zip(by_id.COLUMNS, by_id.values[index].tolist(), strict=True))
    rollouts, hits, after, before = (int(of_id[name]) for name in ("rollouts", "hits", "tokens", "tokens_before"))
    enough = hits >= max(_LEAST_HITS, _HIT_SHARE * rollouts) and of_id["groups"] >= _LEAST_GROUPS
    others = pairs.tokens - after - before
    if not enough or of_id["near"] < _NEAR_SHARE * hits or not before or others < _LEAST_OTHERS * pairs.tokens:
        return None
    k3, k3_before, surprisal = of_id["k3"], of_id["k3_before"], of_id["surprisal"]
    of_others = max((pairs.k3 - k3 - k3_before) / others, _LEAST_K3)
    surprisal_of_others = max((pairs.surprisal - surprisal - of_id["surprisal_before"]) / others, _LEAST_K3)
    mean, mean_before = k3 / after, max(k3_before / before, _LEAST_K3)
    # k3 per nat of surprisal compares tokens with equally uncertain ones.
    times_rate = (k3 / max(surprisal, _LEAST_K3)) / (of_others / surprisal_of_others)
    begins_here = mean >= _TIMES_THE_OTHERS * max(of_others, mean_before)
    # The id explains nothing of what is off without it.
    is_clean = max(of_others, mean_before) <= _CLEAN * judging.healthy_k3
    if not begins_here or not is_clean or times_rate < _TIMES_THEIR_RATE:
        return None
    # All other tokens must be at one level, and most of k3 must be after the id.
    if of_others > _TIMES_BEFORE * mean_before or k3 < _SHARE_OF_K3 * pairs.k3:
        return None
    seen = (
        f"Your mask drops token {token_id}, which the model sampled: after its first occurrence in a response k3 "
        f"averages {format_number(mean)} ({after:,} tokens of {rollouts:,} responses), before it "
        f"{format_number(mean_before)}, in responses without it {format_number(of_others)}. "
        f"{format_percent(after, pairs.tokens)} of the tokens have {format_percent(k3, pairs.k3)} of all k3."
    )
    numbers = {
        "token_id": token_id,
        "rollouts": rollouts,
        "tokens_after": after,
        "k3_after": mean,
        "k3_before": mean_before,
        "k3_of_other_responses": of_others,
        "k3_after_over_mean": mean / pairs.mean_k3,
    }
    examples = judging.evidence.where("mismatch_after_id")
    return Finding(
        "critical", seen, numbers, tuple(each for each in examples if each.text.startswith(f"id {token_id},"))
    )


AFTER_ID = Check(
    "mismatch_after_id",
    "the mismatch begins at one token id, which the model sampled (a padding id that the trainer's mask drops)",
    "k3, χ² and their tails are mostly those of the tokens after this id, which the trainer scores in another context.",
    "Make attention masks and positions from lengths and not from `id != pad`; remove padding ids from the sampled "
    "vocabulary.",
    _check,
    unless=if_invalid,
)
