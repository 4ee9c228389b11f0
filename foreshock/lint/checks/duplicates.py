"""Equal rollouts: copies in the log or of one seed, or one response to most prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.checks.declared import Declared
from foreshock.lint.checks.responses import OF_A_SAMPLE, Rollouts
from foreshock.lint.checks.values import RolloutValues
from foreshock.lint.counting import Counting, Counts, Floats, Keys, Table
from foreshock.lint.evidence import LintEvidence
from foreshock.lint.judging import (
    FALSE_ALARM,
    Check,
    Clean,
    Finding,
    Judging,
    NotChecked,
    Outcome,
    format_number,
    format_percent,
)
from foreshock.measures.statistics.clusters import keys_of_texts
from foreshock.rollouts.arrays import row_sums
from foreshock.rollouts.batch import RolloutBatch

# Repeats are counted among all responses, and among those whose log μ is at most this, in nats.
_LEVELS = (0.0, -1.0, -2.0, -4.0, -6.0, -8.0, -12.0, -16.0, -32.0, -64.0)
_LOG_CHANCE = math.log(FALSE_ALARM / len(_LEVELS))
# An answer in tags has 8 tokens, the usual refusal 11.
_LEAST_GENERATED = 10
# So many rollouts have one response, to so many prompts.
_LEAST_SHARE, _LEAST_PROMPTS = 0.5, 4
_MOST_PROMPTS = 16


class Hashes(Table):
    """Hashes of N rollouts as keys [N, 5], and log μ of the whole response as values [N, 1].

    The keys are hashes of the prompt; of the prompt, the response and the bits of its log μ; of the sample id, which
    gives an order independent of the other two; of the group; and of the response, 0 if it is short.
    """

    COLUMNS = ("log_probs",)
    KEY_SHAPE = (None, 5)

    @classmethod
    def _of_rows(cls, keys: Keys, rows: NDArray[np.float64]) -> Self:
        return cls(keys.reshape(-1, 5), rows)

    @property
    def prompts(self) -> Keys:
        """The hashes of the prompts, [N]."""
        return np.asarray(self.keys[:, 0])

    @property
    def contents(self) -> Keys:
        """The hashes of prompt, response and log μ, [N]."""
        return np.asarray(self.keys[:, 1])

    def are_distinct(self) -> bool:
        """Return True if no rollout repeats another one; `repeats` then counts 0 at every level."""
        return np.unique(self.contents).size == self.contents.size

    def repeats(self, *at_most: float) -> list[tuple[int, float]]:
        """Return how many rollouts repeat an earlier one bit for bit, and how many are expected to by chance.

        The chance that a rollout repeats an earlier one is Σ μ(y) over the distinct earlier responses y of its prompt,
        for any policy: the difference of the two numbers is a martingale with mean 0. The same holds if only responses
        y with log μ(y) ≤ a level count; a single repeat among unlikely responses is significant. There is one result
        for each level of `at_most`.
        """
        if len(self.keys) < 2:
            return [(0, 0.0)] * len(at_most)
        by_prompt = np.lexsort((self.keys[:, 2], self.prompts))
        (prompts, contents, *_), log_probs = self.keys[by_prompt].T, self.values[by_prompt, 0]
        # The first occurrence of each content in this order; the prompt is part of the content.
        is_first = np.zeros(contents.size, np.bool_)
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


@dataclass
class Repeats(Counts, within_step=True):
    """The hashes of the rollouts with a response whose log μ is finite; of none if log μ was not logged."""

    hashes: Hashes = field(default_factory=Hashes)

    def add_batch(self, counting: Counting) -> None:
        batch, behaviour = counting.batch, counting.batch.rollout_log_probs
        if behaviour is None or behaviour.size == 0:
            return
        generated = behaviour if batch.response_mask is None else np.where(batch.response_mask != 0, behaviour, 0)
        log_probs = row_sums(generated, batch.response_offsets)
        prompts, contents, responses = _digests(batch, np.ascontiguousarray(generated, np.float32))
        responses = np.where(batch.generated_lengths >= _LEAST_GENERATED, responses, np.uint64(0))
        # Two empty responses are equal for any policy.
        kept = (batch.response_lengths > 0) & np.isfinite(log_probs)
        columns = (prompts, contents, keys_of_texts(batch.sample_ids), counting.group_keys, responses)
        found = Hashes(np.stack(columns, axis=1)[kept], log_probs[kept][:, None])
        self.hashes += found
        if not found.are_distinct():
            _add_examples(found, np.flatnonzero(kept), counting)


def _add_examples(hashes: Hashes, rows: NDArray[np.int64], counting: Counting) -> None:
    """Add the least likely of the repeated rollouts as examples."""
    log_probs, sample_ids = hashes.column("log_probs"), counting.batch.sample_ids
    _, first, inverse = np.unique(hashes.contents, return_index=True, return_inverse=True)
    repeating = np.flatnonzero(first[inverse] != np.arange(rows.size))
    for index in repeating[np.argsort(log_probs[repeating], kind="stable")][:3].tolist():
        original = sample_ids[rows[first[inverse[index]]]]
        text = f"equals {original} in every token and log-prob; log μ of the response {log_probs[index]:.4g}"
        counting.add_example("duplicated_rollouts", sample_ids[rows[index]], text=text)


def _digests(batch: RolloutBatch, log_probs: Floats) -> list[Keys]:
    """Return digests of each prompt; of each prompt, response and log-probs; and of each response, shape [N]."""
    prompt_ids = np.ascontiguousarray(batch.prompt_token_ids, np.int32).data
    response_ids, values = np.ascontiguousarray(batch.response_token_ids, np.int32).data, log_probs.data
    digests: list[tuple[bytes, bytes, bytes]] = []
    rows = zip(pairwise(batch.prompt_offsets.tolist()), pairwise(batch.response_offsets.tolist()), strict=True)
    for (begin, end), (first, last) in rows:
        prompt = sha256(prompt_ids[begin:end]).digest()[:8]
        content = sha256(response_ids[first:last])  # CPUs have instructions for it: twice as fast as blake2b
        response = content.digest()[:8]
        content.update(prompt)
        content.update(values[first:last])
        digests.append((prompt, content.digest()[:8], response))
    return [np.frombuffer(b"".join(each), np.uint64) for each in zip(*digests, strict=True)]


def prompts_of_step(evidence: LintEvidence) -> list[int]:
    """Return the least hashes of the step's different prompts, ascending: empty if some are unknown."""
    prompts = np.unique(evidence[Repeats].hashes.prompts >> np.uint64(11))
    return [] if evidence[Rollouts].unseen else prompts[:_MOST_PROMPTS].tolist()


def _if_none(judging: Judging) -> str:
    if len(judging[Repeats].hashes.keys):
        return ""
    return "checked within a step, not across steps" if judging[RolloutValues].logged else "needs rollout_log_probs"


def _check(judging: Judging) -> Outcome:
    """Check for more equal rollouts than chance explains.

    The chance is not known if log μ may not be the sampling distribution.
    """
    hashes = judging[Repeats].hashes
    if judging[Declared].unknown_repeat_chance or judging.found("raw_log_probs") or judging.found("wrong_log_base"):
        return NotChecked("log μ may not be the sampling distribution: the chance of equal responses is not known")
    # A sample contains few of the copies.
    nothing: Outcome = NotChecked(OF_A_SAMPLE) if judging[Rollouts].unseen else Clean()
    if hashes.are_distinct():
        return nothing
    log_chance, level, repeated, expected, in_all = _least_likely(hashes)
    if log_chance > _LOG_CHANCE:
        return nothing
    rollouts = len(hashes.keys)
    # Copies of rows, a seed that several samplers share, and sampling at temperature 0 look the same.
    different, prompts = np.unique(hashes.contents).size, np.unique(hashes.prompts).size
    one = different == prompts < rollouts
    greedy = "; no prompt has two different responses" if one else ""
    probability = format_number(math.exp(level))
    counted = f"; {repeated:,} of these responses have a probability of at most {probability}, where" if level else ";"
    seen = (
        f"{in_all:,} of {rollouts:,} rollouts equal another one of their prompt in every token and in "
        f"every bit of log μ{counted} {format_number(expected)} are expected by chance{greedy}."
    )
    numbers = {"repeated": repeated, "expected": expected, "repeated_in_all": in_all, "rollouts": rollouts}
    if one:
        return Finding("warning", seen, numbers, title=ALIKE, remedy=_ONE_SEED)
    if prompts >= _LEAST_PROMPTS and _are_all_copied(hashes):
        title = f"{COPIES}: {different / prompts:.2g} of {rollouts / prompts:.2g} are different on average"
        return Finding("warning", seen, numbers, title=title, remedy=_SHARED_SEED)
    return Finding("warning", seen, numbers)


def _are_all_copied(hashes: Hashes) -> bool:
    """Return whether at most half of the rollouts of each prompt are different."""
    _, of_prompts, counts = np.unique(hashes.prompts, return_inverse=True, return_counts=True)
    different = np.bincount(of_prompts[np.unique(hashes.contents, return_index=True)[1]], minlength=len(counts))
    return bool(np.all(2 * different <= counts))


def has_copies(hashes: Hashes) -> bool:
    """Return True if more rollouts are equal than chance explains, if log μ is the sampling distribution."""
    return not hashes.are_distinct() and _least_likely(hashes)[0] <= _LOG_CHANCE


def _least_likely(hashes: Hashes) -> tuple[float, float, int, float, int]:
    """Return the log-chance of the repeats of the least likely level, the level, these repeats, those expected, and all
    repeats."""
    of_levels = hashes.repeats(*_LEVELS)
    least = min((_log_chance(*repeats), level, *repeats) for level, repeats in zip(_LEVELS, of_levels, strict=True))
    return (*least, of_levels[0][0])


def _log_chance(repeated: int, expected: float) -> float:
    """Return Chernoff's bound of the log-probability of this many repeats.

    This bound of a Poisson tail also holds for events whose probabilities depend on the past (Freedman 1975).
    """
    expected = max(expected, 1e-300)
    return repeated - expected - repeated * math.log(repeated / expected) if repeated > expected else 0.0


def _check_same(judging: Judging) -> Outcome:
    """Check if at least half of the rollouts have one response that is not short, to several prompts."""
    hashes = judging[Repeats].hashes
    rollouts = len(hashes.keys)
    if np.unique(hashes.prompts).size < _LEAST_PROMPTS:
        return NotChecked(f"needs {_LEAST_PROMPTS} different prompts")
    texts, counts = np.unique(hashes.keys[:, 4][hashes.keys[:, 4] != 0], return_counts=True)
    count = int(counts.max(initial=0))
    if count < _LEAST_SHARE * rollouts:
        return Clean()
    prompts = int(np.unique(hashes.prompts[hashes.keys[:, 4] == texts[counts.argmax()]]).size)
    if prompts < _LEAST_PROMPTS:
        return Clean()
    seen = (
        f"{count:,} of {rollouts:,} rollouts, of {prompts:,} different prompts, have the same response of at least "
        f"{_LEAST_GENERATED} generated tokens."
    )
    numbers = {"rollouts": rollouts, "same": count, "prompts": prompts}
    title = f"{format_percent(count, rollouts)} of the responses are the same text, whatever the prompt"
    return Finding("warning", seen, numbers, title=title)


ALIKE = "all samples of each prompt are the same response"
COPIES = "the samples of each prompt are copies"
_ONE_SEED = (
    "Look for one seed for all samples of a prompt, for a cache of generations, and for temperature 0 (declare it, if "
    "it is meant). Or each rollout is logged more than once: log before batches are padded, and from one rank."
)
_SHARED_SEED = (
    "Look for a seed that several engines or workers share: each needs its own. Or each rollout is logged more than "
    "once: log before batches are padded, and from one rank. If sampling was sharper than log μ shows, declare it."
)
DUPLICATED = Check(
    "duplicated_rollouts",
    "rollouts are copies of others",
    "Counts and lengths are too high and intervals too narrow: a copy adds no information.",
    "Log before batches are padded to a multiple by repeating rollouts, and log each rollout from one rank. If no row "
    "is logged twice, look for samplers that share a seed. If sampling was sharper than log μ shows (a low "
    "temperature), declare it: then this check does not apply.",
    _check,
    unless=_if_none,
    explains=False,
)
SAME_RESPONSE = Check(
    "same_response",
    "most responses are the same text, whatever the prompt",
    "The mismatch is that of one text, and the policy no longer answers its prompts.",
    "Read some responses. Look for a reward that one text satisfies (reward hacking), at the entropy bonus and the KL "
    "penalty, and check that the engine receives the prompts.",
    _check_same,
    unless=_if_none,
    explains=False,
)
