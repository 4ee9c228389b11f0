"""Check whole rollouts: duplicates, rewards without a spread, empty and truncated responses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.lint.counting import EvidenceBuilder, Keys, keys_of_groups
from foreshock.lint.report import (
    FALSE_ALARM,
    Clean,
    Example,
    Finding,
    NotChecked,
    Outcome,
    format_number,
    format_percent,
)
from foreshock.measures.inputs import truncated_rollouts
from foreshock.measures.statistics.clusters import keys_of_texts
from foreshock.rollouts.arrays import row_sums
from foreshock.rollouts.batch import RolloutBatch

if TYPE_CHECKING:
    from foreshock.lint.evidence import LintEvidence
    from foreshock.measures.comparison import StepMeasurement


@dataclass(frozen=True, slots=True, eq=False)
class RolloutHashes:
    """Hashes of N rollouts, and log μ of the whole response, [N] each.

    `prompts` hashes the prompt; `contents` the prompt, the response and the bits of its log μ; `order` the sample id,
    which gives an order independent of the other two.
    """

    prompts: Keys
    contents: Keys
    order: Keys
    log_probs: NDArray[np.float64]

    @classmethod
    def empty(cls) -> RolloutHashes:
        """Return the hashes of no rollout."""
        nothing = np.zeros(0, np.uint64)
        return cls(nothing, nothing, nothing, np.zeros(0))

    def merge(self, other: RolloutHashes) -> RolloutHashes:
        """Return the hashes of both."""
        return RolloutHashes(
            np.concatenate([self.prompts, other.prompts]),
            np.concatenate([self.contents, other.contents]),
            np.concatenate([self.order, other.order]),
            np.concatenate([self.log_probs, other.log_probs]),
        )

    def are_distinct(self) -> bool:
        """Return True if no rollout repeats another one; `repeats` then counts 0 at every level."""
        rising = np.sort(self.contents)
        return not bool((rising[1:] == rising[:-1]).any())

    def repeats(self, *at_most: float) -> list[tuple[int, float]]:
        """Return how many rollouts repeat an earlier one bit for bit, and how many are expected to by chance.

        The chance that a rollout repeats an earlier one is Σ μ(y) over the distinct earlier responses y of its prompt,
        for any policy: the difference of the two numbers is a martingale with mean 0. The same holds if only responses
        y with log μ(y) ≤ a level count; a single repeat among unlikely responses is significant. There is one result
        for each level of `at_most`.
        """
        if self.prompts.size < 2:
            return [(0, 0.0)] * len(at_most)
        by_prompt = np.lexsort((self.order, self.prompts))
        prompts, contents, log_probs = self.prompts[by_prompt], self.contents[by_prompt], self.log_probs[by_prompt]
        # The first occurrence of each content in this order; the prompt is part of the content.
        is_first = np.zeros(contents.size, dtype=np.bool_)
        is_first[np.unique(contents, return_index=True)[1]] = True
        likelihoods = np.where(is_first, np.exp(np.minimum(log_probs, 0.0)), 0.0)
        begins = np.concatenate([[True], prompts[1:] != prompts[:-1]])
        of_prompt = np.maximum.accumulate(np.where(begins, np.arange(prompts.size), 0))
        found = []
        for level in at_most:
            counts = log_probs <= level
            running = np.concatenate([np.zeros(1), np.cumsum(np.where(counts, likelihoods, 0.0))])
            chance = np.clip(running[:-1] - running[of_prompt], 0.0, 1.0)
            found.append((int((~is_first & counts).sum()), float(chance.sum())))
        return found


def hash_rollouts(batch: RolloutBatch, builder: EvidenceBuilder) -> RolloutHashes:
    """Return the hashes of the rollouts with a response whose log μ is finite; of none if log μ was not logged."""
    behaviour = batch.rollout_log_probs
    lengths = batch.response_lengths
    if behaviour is None or behaviour.size == 0:
        return RolloutHashes.empty()
    generated = behaviour if batch.response_mask is None else np.where(batch.response_mask != 0, behaviour, 0)
    log_probs = row_sums(generated, batch.response_offsets)
    prompts, contents = _digests(batch, np.ascontiguousarray(generated, np.float32))
    # Two empty responses are equal for any policy.
    kept = (lengths > 0) & np.isfinite(log_probs)
    hashes = RolloutHashes(prompts[kept], contents[kept], keys_of_texts(batch.sample_ids)[kept], log_probs[kept])
    _add_examples(batch, np.flatnonzero(kept), hashes, builder)
    return hashes


def _add_examples(
    batch: RolloutBatch, rows: NDArray[np.int64], hashes: RolloutHashes, builder: EvidenceBuilder
) -> None:
    """Add the least likely of the repeated rollouts as examples."""
    if hashes.are_distinct():
        return
    _, first, inverse = np.unique(hashes.contents, return_index=True, return_inverse=True)
    repeating = np.flatnonzero(first[inverse] != np.arange(rows.size))
    for index in repeating[np.argsort(hashes.log_probs[repeating], kind="stable")][:3].tolist():
        original = batch.sample_ids[rows[first[inverse[index]]]]
        text = f"equals {original} in every token and log-prob; log μ of the response {hashes.log_probs[index]:.4g}"
        builder.add_example("duplicated_rollouts", Example(batch.sample_ids[rows[index]], -1, text))


def _digests(batch: RolloutBatch, log_probs: NDArray[np.float32]) -> tuple[Keys, Keys]:
    """Return a digest of each prompt, and one of each prompt, response and log-probs, shape [N]."""
    prompt_ids = np.ascontiguousarray(batch.prompt_token_ids, np.int32)
    response_ids = np.ascontiguousarray(batch.response_token_ids, np.int32)
    prompts, contents = [], []
    of_prompts, of_responses = batch.prompt_offsets.tolist(), batch.response_offsets.tolist()
    for begin, end, first, last in zip(of_prompts, of_prompts[1:], of_responses, of_responses[1:], strict=False):
        prompt = sha256(prompt_ids[begin:end].data).digest()[:8]
        content = sha256(prompt)  # CPUs have instructions for it: twice as fast as blake2b
        content.update(response_ids[first:last].data)
        content.update(log_probs[first:last].data)
        prompts.append(prompt)
        contents.append(content.digest()[:8])
    return np.frombuffer(b"".join(prompts), np.uint64), np.frombuffer(b"".join(contents), np.uint64)


# Repeats are counted among all responses, and among those whose log μ is at most this, in nats.
_LEVELS = (0.0, -1.0, -2.0, -4.0, -6.0, -8.0, -12.0, -16.0, -32.0, -64.0)


def check_duplicates(evidence: LintEvidence, *, distribution_known: bool = True) -> Outcome:
    """Check for more equal rollouts than chance explains.

    `distribution_known` is False if log μ may not be the sampling distribution: then the chance is not known.
    """
    check = "duplicated_rollouts"
    hashes = evidence.rollout_hashes
    if not hashes.prompts.size:
        within_step = "checked within a step, not across steps"
        return NotChecked(check, within_step if evidence.count("rollout_logged") else "needs rollout_log_probs")
    if evidence.count("unknown_repeat_chance") or not distribution_known:
        why = "log μ may not be the sampling distribution: the chance of equal responses is not known"
        return NotChecked(check, why)
    # A sample contains few of the copies.
    nothing: Outcome = NotChecked(check, _OF_A_SAMPLE) if evidence.count("rollouts_unseen") else Clean(check)
    if hashes.are_distinct():
        return nothing
    of_levels = hashes.repeats(*_LEVELS)
    in_all = of_levels[0][0]
    log_chance, level, repeated, expected = min(
        (_log_chance(*repeats), level, *repeats) for level, repeats in zip(_LEVELS, of_levels, strict=True)
    )
    if log_chance > math.log(FALSE_ALARM / len(_LEVELS)):
        return nothing
    # A batch logged twice and sampling at temperature 0 look the same.
    one = np.unique(hashes.contents).size == np.unique(hashes.prompts).size < hashes.prompts.size
    greedy = "; no prompt has two different responses: if sampling was greedy, declare temperature 0" if one else ""
    probability = format_number(math.exp(level))
    counted = f"; {repeated:,} of these responses have a probability of at most {probability}, where" if level else ";"
    seen = (
        f"{in_all:,} of {hashes.prompts.size:,} rollouts equal another one of their prompt in every token and in "
        f"every bit of log μ{counted} {format_number(expected)} are expected by chance{greedy}."
    )
    numbers = {"repeated": repeated, "expected": expected, "repeated_in_all": in_all}
    return Finding(check, "warning", seen, {**numbers, "rollouts": hashes.prompts.size})


def _log_chance(repeated: int, expected: float) -> float:
    """Return Chernoff's bound of the log-probability of this many repeats.

    This bound of a Poisson tail also holds for events whose probabilities depend on the past (Freedman 1975).
    """
    expected = max(expected, 1e-300)
    return repeated - expected - repeated * math.log(repeated / expected) if repeated > expected else 0.0


_LEAST_GROUPS, _LEAST_ROLLOUTS = 4, 8
_EMPTY_SHARE, _LEAST_EMPTY = 0.03, 3
_TRUNCATED_SHARE = 0.99


def count_learning_signal(batch: RolloutBatch, builder: EvidenceBuilder) -> None:
    """Count empty and truncated responses, rollouts with a group, and advantages other than 0."""
    truncated, known = truncated_rollouts(batch)
    groups = batch.group_ids or ()
    builder.count(
        empty_rollouts=int((batch.response_lengths == 0).sum()),
        finish_known=int(known.sum()),
        truncated_rollouts=int(truncated.sum()),
        grouped_rollouts=sum(group is not None for group in groups),
    )
    if batch.advantage is not None:
        finite = batch.advantage[np.isfinite(batch.advantage)]
        builder.count(advantages=finite.size, advantages_not_zero=int(np.count_nonzero(finite)))


# By prompt group: rollouts, those with a reward, the least reward negated and the largest.
REWARD_COLUMNS = ("rollouts", "rewards", "minus_min_reward", "max_reward")


@dataclass(frozen=True, slots=True, eq=False)
class GroupRewards:
    """The rewards of G prompt groups: REWARD_COLUMNS [G, 4] by ascending keys [G]."""

    keys: Keys
    values: NDArray[np.float64]

    @classmethod
    def empty(cls) -> GroupRewards:
        """Return the rewards of no group."""
        return cls.of(np.zeros(0, np.uint64), None)

    @classmethod
    def of(cls, keys: Keys, reward: NDArray[np.floating[Any]] | None) -> GroupRewards:
        """Return the rewards by group of N rollouts with these group keys [N] and rewards [N], NaN for none."""
        unique, inverse = np.unique(keys, return_inverse=True)
        values = _no_rewards(unique.size)
        np.add.at(values[:, 0], inverse, 1.0)
        if reward is not None:
            known = np.isfinite(reward)
            np.add.at(values[:, 1], inverse[known], 1.0)
            np.maximum.at(values[:, 2], inverse[known], -reward[known])
            np.maximum.at(values[:, 3], inverse[known], reward[known])
        return cls(unique, values)

    def merge(self, other: GroupRewards) -> GroupRewards:
        """Return the groups of both; a common group has the rewards of both."""
        union = np.union1d(self.keys, other.keys)
        values = _no_rewards(union.size)
        for part in (self, other):
            slots = np.searchsorted(union, part.keys)
            values[slots, :2] += part.values[:, :2]
            values[slots, 2:] = np.maximum(values[slots, 2:], part.values[:, 2:])
        return GroupRewards(union, values)


def _no_rewards(groups: int) -> NDArray[np.float64]:
    return np.tile([0.0, 0.0, -np.inf, -np.inf], (groups, 1))


def learning_signal_of(measured: StepMeasurement) -> tuple[dict[str, int], GroupRewards | None]:
    """Return the counts by name, and the rewards or None, that a shard of statistics knows of all its rollouts."""
    counts = measured.step.truncated_and_known()
    known = {"truncated_rollouts": counts[0], "finish_known": counts[1]}
    pair = measured.comparisons.get(TRAINER_ROLLOUT)
    if pair is None:
        return known, None
    table = pair.summaries.table
    groups = table.column("group_id").to_pylist()
    advantage = pair.summaries.column("advantage")
    known["grouped_rollouts"] = sum(group is not None for group in groups)
    known["advantages"] = int(np.isfinite(advantage).sum())
    known["advantages_not_zero"] = int((np.isfinite(advantage) & (advantage != 0)).sum())
    keys = keys_of_groups(groups, table.column("sample_id").to_pylist())
    return known, GroupRewards.of(keys, pair.summaries.column("reward"))


_OF_A_SAMPLE = "only a sample of the rollouts was sent in full"


def check_reward_spread(evidence: LintEvidence) -> Outcome:
    """Check for groups in which all rewards are equal, and for groups of one rollout each."""
    check = "no_reward_spread"
    rollouts, rewards, minus_min, largest = evidence.rewards.values.T
    if not rewards.any() or not evidence.count("grouped_rollouts"):
        return NotChecked(check, "needs reward and group_id")
    if evidence.count("advantages_not_zero"):
        return Clean(check, "some advantages are not 0")
    several = rewards >= 2
    groups, total = int(several.sum()), int(rewards.sum())
    with_spread = int((largest[several] > -minus_min[several]).sum())
    if not with_spread and rollouts.sum() < evidence.count("rollouts") + evidence.count("rollouts_unseen"):
        return NotChecked(check, _OF_A_SAMPLE)
    zero = f"; all {evidence.count('advantages'):,} advantages are 0" if evidence.count("advantages") else ""
    if not groups and evidence.count("grouped_rollouts") >= _LEAST_ROLLOUTS and (rollouts <= 1).all():
        if not zero:
            # PPO and REINFORCE++ learn from one rollout of each prompt.
            why = "each rollout is a group of its own: log advantages, which need not be relative to the group"
            return NotChecked(check, why)
        seen = f"Each of {total:,} rollouts is a group of its own{zero}: there is no gradient."
        return Finding(check, "info", seen, {"rollouts": total, "groups": rollouts.size})
    if groups < _LEAST_GROUPS:
        return NotChecked(check, f"needs {_LEAST_GROUPS} groups with two rewards, and there are {groups}")
    if with_spread:
        return Clean(check)
    least, most = float(-minus_min.max()), float(largest.max())
    all_equal = f"all {total:,} rewards are {most:g}" if least == most else "within each group all rewards are equal"
    seen = (
        f"None of {groups:,} groups has a spread of rewards ({all_equal}){zero}: the gradient of an advantage relative "
        "to the group is 0."
    )
    return Finding(check, "info", seen, {"groups": groups, "rewards": total, "least": least, "largest": most})


def check_responses(evidence: LintEvidence) -> tuple[Outcome, Outcome]:
    """Check for many empty responses, and for a batch in which every response was cut off."""
    empty, truncated = "empty_responses", "all_truncated"
    rollouts, count = evidence.count("rollouts"), evidence.count("empty_rollouts")
    found: list[Outcome] = [Clean(empty), Clean(truncated)]
    if count >= max(_LEAST_EMPTY, _EMPTY_SHARE * rollouts):
        seen = f"{count:,} of {rollouts:,} responses ({format_percent(count, rollouts)}) have no token."
        found[0] = Finding(empty, "critical" if count == rollouts else "warning", seen, {"empty": count})
    known, cut = evidence.count("finish_known"), evidence.count("truncated_rollouts")
    if not known:
        found[1] = NotChecked(truncated, "needs finish_reason or length_cap")
    elif known >= _LEAST_ROLLOUTS and cut >= _TRUNCATED_SHARE * known:
        seen = f"{cut:,} of {known:,} responses ({format_percent(cut, known)}) were cut off at a length limit."
        found[1] = Finding(truncated, "warning", seen, {"truncated": cut, "rollouts": known})
    return found[0], found[1]
