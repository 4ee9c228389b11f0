"""Tokens that the model did not sample, such as an appended end or a forced `</think>`, and that are not masked.

If log μ is that of the sampler, a token is some id i with μ(i) ≤ ε with a chance of at most ε, whatever came before. Of
T tokens at most T·ε are expected, and Chernoff's bound limits the chance of more. That any id has so many is 1/ε times
as likely at most: the chances of all ids add up to 1 at each token. At first tokens T is the number of rollouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.checks.declared import Declared
from foreshock.lint.checks.duplicates import Repeats, has_copies
from foreshock.lint.checks.pairs import OF_BEHAVIOUR
from foreshock.lint.checks.responses import Rollouts
from foreshock.lint.checks.sampling import SurprisalSums, check_surprisal
from foreshock.lint.checks.values import RolloutValues
from foreshock.lint.counting import Counting, Counts, Table
from foreshock.lint.judging import FALSE_ALARM, Check, Clean, Finding, Judging, NotChecked, Outcome, format_number
from foreshock.rollouts.arrays import rows_of_positions
from foreshock.rollouts.schema import LEAST_LOG_PROB

_LEVELS = np.array([-4.0, -6.0, -8.0, -10.0, -14.0])  # log ε
_LOG_CHANCE = math.log(FALSE_ALARM / (2 * _LEVELS.size))  # of all tokens, and of first ones
_LEAST_TOKENS, _ROLLOUTS_SHARE, _TOKENS_SHARE = 8, 0.05, 0.01
_MOST_ROWS, _IDS_NAMED = 32, 4
# Without the tokens that were not sampled, −log μ is at most so many times the entropy.
_EXPLAINED = 1.05
_OTHER = "log μ may not be the sampling distribution"
# The key of the row of all tokens and rollouts; that of another is its id times the number of levels, plus the level.
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


class Unlikely(Table):
    """Generated tokens of an id with log μ at or below a level: the rows that are least likely if μ sampled them."""

    COLUMNS = (
        "tokens",
        "rollouts",
        "log_probs",
        "first",
        "last",
        "before_masked",
        "largest",
        "position",
        "minus_position",
    )
    LARGEST = 3

    def __add__(self, other: Self) -> Self:
        """Return the rows of both that are least likely, and the one of all tokens."""
        return super().__add__(other).least_likely()

    def least_likely(self) -> Self:
        """Return the rows that are least likely, and the one of all tokens."""
        if self.keys.size <= _MOST_ROWS:
            return self
        chances = np.where(self.keys == _ALL, -np.inf, self.log_chances)
        ranked = np.lexsort((self.keys, self.expected / self.column("tokens"), chances))
        return self.rows(np.sort(ranked[: _MOST_ROWS + 1]))

    @property
    def levels(self) -> NDArray[np.float64]:
        """log ε of each row."""
        found: NDArray[np.float64] = _LEVELS[(self.keys % np.uint64(_LEVELS.size)).astype(np.int64)]
        return found

    @property
    def expected(self) -> NDArray[np.float64]:
        """T·ε of each row, the largest expected number of tokens."""
        of_all = self.keys == _ALL
        tokens, rollouts = (self.column(name)[of_all].sum() for name in ("tokens", "rollouts"))
        of_row = np.where(self.column("first") == self.column("tokens"), rollouts, tokens)
        return np.asarray(np.maximum(of_row * np.exp(self.levels), 1e-300))

    @property
    def log_chances(self) -> NDArray[np.float64]:
        """The bound of the log-probability that any id has so many tokens; 0 for no more than expected."""
        tokens, expected = self.column("tokens"), self.expected
        excess = tokens - expected - tokens * np.log(np.maximum(tokens, 1.0) / expected) - self.levels
        return np.where(tokens > expected, np.minimum(excess, 0.0), 0.0)

    def not_sampled(self, rollouts: int) -> NDArray[np.int64]:
        """Return the significant rows, the least likely one of each id, the least likely id first."""
        tokens, of_all = self.column("tokens"), self.keys == _ALL
        many = (self.column("rollouts") >= _ROLLOUTS_SHARE * rollouts) | (
            tokens >= _TOKENS_SHARE * tokens[of_all].sum()
        )
        found = np.flatnonzero(~of_all & many & (tokens >= _LEAST_TOKENS) & (self.log_chances <= _LOG_CHANCE))
        found = found[np.argsort(self.log_chances[found], kind="stable")]
        first = np.unique(self.keys[found] // np.uint64(_LEVELS.size), return_index=True)[1]
        return np.asarray(found[np.sort(first)])


@dataclass
class UnlikelyTokens(Counts):
    """Unlikely generated tokens by id and level."""

    table: Unlikely = field(default_factory=Unlikely)

    def add_batch(self, counting: Counting) -> None:
        batch, mu, mask = counting.batch, counting.batch.rollout_log_probs, counting.batch.response_mask
        if mu is None or not mu.size:
            return
        places = np.flatnonzero(mu <= np.float32(_LEVELS[0]))
        keep = (mu[places] >= LEAST_LOG_PROB) & (batch.response_token_ids[places] >= 0)
        if mask is not None:
            keep &= mask[places] != 0
        places = places[keep]
        ids = batch.response_token_ids[places].astype(np.int64)
        of_place, level = np.nonzero(mu[places, None] <= _LEVELS)
        keys, places = ids[of_place] * _LEVELS.size + level, places[of_place]
        rows = rows_of_positions(batch.response_offsets, places)
        begins, ends = batch.response_offsets[rows], batch.response_offsets[rows + 1]
        next_masked = False if mask is None else mask[np.minimum(places + 1, mu.size - 1)] == 0
        before_masked = (places + 1 < ends) & next_masked
        fresh = np.zeros(keys.size)  # 1 at the first token of a key in a rollout
        fresh[np.unique(keys * batch.num_rollouts + rows, return_index=True)[1]] = 1.0
        log_probs, at = mu[places].astype(np.float64), places - begins
        columns = (np.ones(keys.size), fresh, log_probs, at == 0, places + 1 == ends, before_masked, log_probs, at, -at)
        counts = [batch.generated_lengths.sum(), batch.num_rollouts, *[0.0] * (len(Unlikely.COLUMNS) - 2)]
        everything = Unlikely(np.array([_ALL]), np.array([counts]))
        self.table = everything + Unlikely.of(keys, *columns)
        for row in self.table.not_sampled(batch.num_rollouts)[:1].tolist():
            for place in places[keys == self.table.keys[row]][:3].tolist():
                text = f"id {batch.response_token_ids[place]}, log μ {mu[place]:.4g}"
                counting.add_token(f"tokens_not_sampled {batch.response_token_ids[place]}", place, text)


def _if_of_another(judging: Judging, log_probs: float) -> str:
    """Return why log μ may not be that of the sampler; `log_probs` is Σ log μ of the tokens that it did not sample."""
    declared = judging[Declared]
    if declared.unknown_repeat_chance or declared.raw_and_shaped:
        return _OTHER
    if judging[RolloutValues].placeholders:
        return "some values of log μ are placeholders"
    if has_copies(judging[Repeats].hashes):
        return "rollouts are copies of others"
    others = {**OF_BEHAVIOUR, "rows_exchanged": "the two log-probs belong to different rollouts"}
    if why := next((why for name, why in others.items() if judging.found(name)), ""):
        return why
    sums = SurprisalSums.of(judging.evidence)
    surprising = sums.surprisal + log_probs
    explained = sums.surprisal > sums.entropy and surprising < _EXPLAINED * sums.entropy
    return _OTHER if isinstance(check_surprisal(sums), Finding) and not explained else ""


def _check(judging: Judging) -> Outcome:
    table, rollouts = judging[UnlikelyTokens].table, judging[Rollouts].rollouts
    if not judging[RolloutValues].logged:
        return NotChecked("needs rollout_log_probs")
    found = table.not_sampled(rollouts)
    lowest = np.isin(table.keys, table.keys[found] // np.uint64(_LEVELS.size) * np.uint64(_LEVELS.size))
    if why := _if_of_another(judging, float(table.column("log_probs")[lowest].sum())):
        return NotChecked(why)
    if not found.size:
        return Clean()
    ids, levels = np.divmod(table.keys[found].astype(np.int64), _LEVELS.size)
    of_id = dict(zip(table.COLUMNS, table.values[found[0]].tolist(), strict=True))
    tokens, token_id, at_most = int(of_id["tokens"]), int(ids[0]), format_number(float(_LEVELS[levels[0]]))
    expected = float(table.expected[found[0]])
    where = {
        ", each time at the first token": of_id["first"] == tokens,
        ", each time before masked tokens": of_id["before_masked"] == tokens,
        ", each time at the end of the response": of_id["last"] == tokens,
        f", each time at token {of_id['position']:.0f} of the response": of_id["position"] == -of_id["minus_position"],
    }
    named = ", ".join(map(str, ids[1 : _IDS_NAMED + 1].tolist()))
    others = f" The same holds for {ids.size - 1:,} other ids: {named}{', …' * (ids.size > _IDS_NAMED + 1)}."
    seen = (
        f"Id {token_id} stands {tokens:,} times with log μ ≤ {at_most} in {of_id['rollouts']:,.0f} of {rollouts:,} "
        f"rollouts (mean {format_number(of_id['log_probs'] / tokens)}, largest {format_number(of_id['largest'])})"
        f"{next((words for words, holds in where.items() if holds), '')}; at most {format_number(expected)} are "
        f"expected if the model sampled it.{others if ids.size > 1 else ''}"
    )
    numbers = {"token_id": token_id, "tokens": tokens, "rollouts": of_id["rollouts"], "expected": expected}
    more = f" and of {ids.size - 1:,} other{'s' * (ids.size > 2)}" if ids.size > 1 else ""
    title = f"tokens of id {token_id}{more} were not sampled by the model (log μ ≤ {at_most} each time)"
    examples = judging.evidence.where(f"{NOT_SAMPLED.name} {token_id}")
    return Finding("warning", seen, {**numbers, "ids": ids.size}, examples, title=title)


NOT_SAMPLED = Check(
    "tokens_not_sampled",
    "some tokens were not sampled by the model",
    "They are trained on as if the policy had chosen them, each with the gradient of a token that it finds unlikely.",
    "Set response_mask to 0 at tokens that the model did not sample: those of a harness or a template, forced ends, "
    "ids that a grammar leaves no choice of. If it is many ids, check that log μ is that of the sampler.",
    _check,
    explains=False,
)
