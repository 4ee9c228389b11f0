"""A shift by one token: log π fits log μ of the neighbouring token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from foreshock.lint.checks.pairs import if_copied
from foreshock.lint.counting import Counting, Counts, Floats, Ints, Table
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_number
from foreshock.rollouts.arrays import offsets_of_lengths, row_sums
from foreshock.rollouts.batch import RolloutBatch

# A sample is enough: a shift affects every rollout of a rank or a data source. From a larger batch, one stretch of each
# of up to this many rollouts is taken. The stretches spread over the responses: a later turn may be shifted alone.
_MOST_TOKENS, _MOST_ROLLOUTS = 1 << 16, 1024
_SPREAD = 0.5 * (math.sqrt(5.0) - 1.0)
# Each difference counts at most this much, in nats, so that one outlier does not decide.
_CAP = 5.0
# A rollout is clearly shifted if it has this many tokens, a mean difference of 0.1 nats or more, and at most a quarter
# of that difference against the neighbouring token.
_CLEAR_TOKENS, _CLEAR_GAP, _CLEAR_FACTOR = 6, 0.1, 0.25
_LEAST_TOKENS = 50
_LEAST_ROLLOUTS = 4
_FACTOR = 0.5
_SHARE = 0.6
_LEAST_GAP = 0.01
# Hardly any rollout of six tokens or more fits the neighbouring token four times as well by chance.
_LEAST_CLEAR, _CLEAR_SHARE = 2, 0.02
_NEIGHBOURS = {0: "t − 1", 2: "t + 1"}


class Sample(NamedTuple):
    """log μ [T] and log π [T] of one stretch of each of N rollouts, cut at `offsets` [N + 1].

    `rows` [N] are the rollouts' rows in the batch, `first_tokens` [N] the token of the response at which each begins.
    """

    behaviour: Floats
    target: Floats
    offsets: Ints
    rows: Ints
    first_tokens: Ints


def sample_of_rollouts(batch: RolloutBatch) -> Sample | None:
    """Return a sample of the tokens, tool tokens included; None if either log-prob was not logged."""
    if batch.rollout_log_probs is None or batch.trainer_log_probs is None:
        return None
    if batch.num_tokens <= _MOST_TOKENS:
        rows = np.arange(batch.num_rollouts)
        whole = batch.rollout_log_probs, batch.trainer_log_probs, batch.response_offsets
        return Sample(*whole, rows, np.zeros(rows.size, np.int64))
    rows = np.arange(0, batch.num_rollouts, -(-batch.num_rollouts // _MOST_ROLLOUTS))
    lengths = batch.response_lengths[rows]
    taken = np.minimum(lengths, _MOST_TOKENS // rows.size)
    first = ((lengths - taken + 1) * (np.arange(rows.size) * _SPREAD % 1.0)).astype(np.int64)
    offsets = offsets_of_lengths(taken)
    begins = batch.response_offsets[:-1][rows] + first - offsets[:-1]
    positions = np.arange(offsets[-1]) + np.repeat(begins, taken)
    return Sample(batch.rollout_log_probs[positions], batch.trainer_log_probs[positions], offsets, rows, first)


class Neighbours(Table):
    """|log π_t − log μ_{t+s}|, each at most 5, over the sampled tokens with two neighbours, by s + 1.

    `prefer` counts the rollouts that this neighbour fits twice as well as the token itself, `clear` those that it fits
    at least four times as well.
    """

    COLUMNS = ("gaps", "prefer", "clear")


@dataclass
class Shifts(Counts):
    """The fit of log π to log μ of the same token and of its two neighbours."""

    tokens: int = 0
    rollouts: int = 0
    neighbours: Neighbours = field(default_factory=Neighbours)

    def add_batch(self, counting: Counting) -> None:
        sample = sample_of_rollouts(counting.batch)
        if sample is None or sample.behaviour.size < 3:
            return
        behaviour, target, offsets = sample.behaviour, sample.target, sample.offsets
        inner = np.ones(behaviour.size, np.bool_)
        filled = np.flatnonzero(np.diff(offsets))
        inner[offsets[:-1][filled]] = False
        inner[offsets[1:][filled] - 1] = False
        inner[0] = inner[-1] = False
        chosen = np.flatnonzero(inner)
        of_tokens = [np.abs(target[chosen] - behaviour[chosen + shift]) for shift in (-1, 0, 1)]
        known = np.isfinite(of_tokens[0]) & np.isfinite(of_tokens[1]) & np.isfinite(of_tokens[2])
        if not known.all():
            of_tokens = [np.where(known, gap, np.float32(0.0)) for gap in of_tokens]
        rows = np.r_[0, np.cumsum(inner)][offsets]
        gaps = np.stack([row_sums(np.minimum(gap, np.float32(_CAP)), rows) for gap in of_tokens])
        tokens, own = row_sums(known, rows), gaps[1]
        prefer = (tokens > 0) & (gaps < 0.5 * own)
        far = (tokens >= _CLEAR_TOKENS) & (own >= _CLEAR_GAP * tokens)
        self.add(tokens=int(tokens.sum()), rollouts=tokens > 0)
        columns = (each.sum(axis=1) for each in (gaps, prefer, far & (gaps <= _CLEAR_FACTOR * own)))
        self.neighbours += Neighbours.of(np.arange(3), *columns)
        preferring = prefer[int(self.neighbours.column("prefer").argmax())]
        worst = np.argsort(np.where(preferring, -own, 0.0), kind="stable")[: min(2, int(preferring.sum()))]
        _add_examples(sample, worst, counting)


def _add_examples(sample: Sample, rows: Ints, counting: Counting) -> None:
    for row in rows.tolist():
        four = slice(sample.offsets[row], min(sample.offsets[row] + 4, sample.offsets[row + 1]))
        text = f"log μ {_join(sample.behaviour[four])}, log π {_join(sample.target[four])}"
        sample_id = counting.batch.sample_ids[int(sample.rows[row])]
        counting.add_example("shifted_log_probs", sample_id, int(sample.first_tokens[row]), text)


def _join(values: Floats) -> str:
    return " ".join(f"{value:.3g}" for value in values.tolist())


def _check(judging: Judging) -> Outcome:
    shifts, tokens, rollouts = judging[Shifts], judging[Shifts].tokens, judging[Shifts].rollouts
    if tokens < _LEAST_TOKENS or rollouts < _LEAST_ROLLOUTS:
        return NotChecked(f"only {tokens} tokens in {rollouts} rollouts have a neighbour on both sides")
    earlier, own, later = (float(each) for each in shifts.neighbours.column("gaps") / tokens)
    side, gap = (0, earlier) if earlier <= later else (2, later)
    preferring = int(shifts.neighbours.column("prefer")[side])
    if own < _LEAST_GAP or gap > _FACTOR * own or preferring < _SHARE * rollouts:
        return _check_part(shifts)
    seen = (
        f"|log π − log μ| averages {format_number(own)} nats, and {format_number(gap)} between log π of token t "
        f"and log μ of token {_NEIGHBOURS[side]}; the shift fits at least twice as well in {preferring:,} of "
        f"{rollouts:,} rollouts."
    )
    numbers = {"mean_gap": own, "mean_gap_earlier": earlier, "mean_gap_later": later}
    return Finding("critical", seen, {**numbers, "rollouts_preferring": preferring, "rollouts": rollouts})


def _check_part(shifts: Shifts) -> Outcome:
    """Check if only some rollouts are clearly shifted, for example those of one rank or one data source."""
    clear = shifts.neighbours.column("clear")
    side = 0 if clear[0] >= clear[2] else 2
    found = int(clear[side])
    if found < max(_LEAST_CLEAR, _CLEAR_SHARE * shifts.rollouts):
        return Clean()
    seen = (
        f"In {found:,} of {shifts.rollouts:,} rollouts log π of token t fits log μ of token {_NEIGHBOURS[side]} "
        "at least four times as well as log μ of token t; in the others it does not."
    )
    counts = {"rollouts_preferring": found, "rollouts": shifts.rollouts}
    return Finding("critical", seen, counts, title=SHIFTED.title_of_part)


SHIFTED = Check(
    "shifted_log_probs",
    "the two log-probs are shifted by one token",
    "Every measure compares different tokens: k3 is orders of magnitude too large.",
    "Log-probs of logits[:, :-1] belong to tokens[:, 1:]: check the code that splits prompt and response.",
    _check,
    unless=if_copied,
)
