"""Sampled tokens without a log π: one id, which the trainer drops, or many.

A model may sample its padding id like any other token. A trainer that makes its mask from `id != pad` drops that token.
Such an id shows in the data: every occurrence of it is affected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from foreshock.lint.checks.masked import carries, masked_places, outside_overlong
from foreshock.lint.checks.pairs import if_shifted
from foreshock.lint.checks.responses import Rollouts
from foreshock.lint.checks.values import RolloutValues, TrainerValues
from foreshock.lint.constants import constant_of_masked
from foreshock.lint.counting import Bools, Counting, Counts, Example, Floats, Ints, Table
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_number
from foreshock.rollouts.schema import are_log_probs

# A log μ below this belongs to an uncertain token, whose log π cannot be 0, even if the trainer sharpens.
_REAL = -0.5
_IDS_KEPT = 256
# The examples of this name are the constants found in place of log π, such as −3.
_VALUES = "values of no log π"
# This share counts as all: of the tokens of an id, and of all tokens without the log-prob.
NEARLY_ALL = 0.9
# NaN and −inf have other causes too: fewer at one id are no evidence against the id.
_LEAST_NON_FINITE = 3
# If more than this share of all tokens are the first (or last) of their response, the position proves nothing.
_MOST_AT_A_PLACE = 0.6


class MissingById(Table):
    """Missing log-probs by token id, of at most 256 ids.

    `without_target` counts generated tokens with a real log μ and no log π (0, NaN, −inf or a constant); `masked`
    counts masked tokens with a log μ; `sampled` counts all tokens of the id that have a real log μ, or are masked with
    a log μ.
    """

    COLUMNS = ("without_target", "masked", "sampled")

    def __add__(self, other: Self) -> Self:
        """Return the sum of both tables."""
        return super().__add__(other).cut()

    def cut(self) -> Self:
        """Return the table of the 256 ids with the most missing log-probs."""
        order = np.lexsort((self.keys, -(self.values[:, 0] + self.values[:, 1])))
        return self if self.keys.size <= _IDS_KEPT else self.rows(np.sort(order[:_IDS_KEPT]))


@dataclass
class Missing(Counts):
    """Sampled tokens without a log π, and masked tokens with a log μ."""

    missing_first: int = 0  # no log π beside a real log μ, at the first or the last token of a response
    missing_last: int = 0
    dropped_first: int = 0  # masked with a log μ, at the first or the last token of a response
    dropped_last: int = 0
    by_id: MissingById = field(default_factory=MissingById)

    def add_batch(self, counting: Counting) -> None:
        """Count the tokens of a batch by token id, judging by log μ."""
        batch, behaviour = counting.batch, counting.batch.rollout_log_probs
        if behaviour is None:
            return
        without_target = _without_target(counting, behaviour)
        masked = masked_places(batch)
        # At a masked token any log μ other than 0 and the constant counts.
        constant = np.isin(behaviour[masked], constant_of_masked(behaviour[masked]))
        masked = outside_overlong(batch, masked[carries(behaviour[masked]) & ~constant])
        if without_target.size == 0 and masked.size == 0:
            return
        token_ids, starts, ends = batch.response_token_ids, batch.response_offsets[:-1], batch.response_offsets[1:] - 1
        self.missing_first += int(np.isin(without_target, starts).sum())
        self.missing_last += int(np.isin(without_target, ends).sum())
        self.dropped_first += int(np.isin(masked, starts).sum())
        self.dropped_last += int(np.isin(masked, ends).sum())
        ids = np.union1d(token_ids[without_target], token_ids[masked])
        of_these_ids = np.flatnonzero(np.isin(token_ids, ids))
        sampled = of_these_ids[_is_real(behaviour[of_these_ids]) | np.isin(of_these_ids, masked, assume_unique=True)]
        columns = []
        for places, what in ((without_target, "no log π"), (masked, "mask 0"), (sampled, "")):
            slots = np.searchsorted(ids, token_ids[places])
            columns.append(np.bincount(slots, minlength=ids.size))
            # Keep examples of the id with the most missing log-probs.
            for place in places[slots == columns[-1].argmax()][:3].tolist() if what else ():
                counting.add_token("pad_id_sampled", place, _text(token_ids[place], behaviour[place], what))
        for place in without_target[:3].tolist():
            counting.add_token("tokens_without_trainer", place, _text(token_ids[place], behaviour[place], "no log π"))
        self.by_id += MissingById.of(ids, *columns)


def _without_target(counting: Counting, behaviour: Floats) -> Ints:
    """Return the generated tokens with a real log μ whose log π is 0, NaN, −inf or a constant."""
    target, constants = counting.batch.trainer_log_probs, counting.constants["trainer"]
    if target is None:
        return np.zeros(0, np.int64)
    missing = ~((target > -np.inf) & (target != 0)) & counting.batch.generated
    if constants.size:
        missing |= np.isin(target, constants) & counting.batch.generated
    for value in constants.tolist():
        counting.add_example(_VALUES, Example(format_number(value)))
    places = np.flatnonzero(missing)
    return places[_is_real(behaviour[places])]


def _is_real(behaviour: Floats) -> Bools:
    return np.asarray(are_log_probs(behaviour) & (behaviour < np.float32(_REAL)))


def _text(token_id: int, behaviour: float, what: str) -> str:
    return f"id {token_id}, log μ {behaviour:.4g}, {what}"


def _check_one(judging: Judging) -> Outcome:
    """Check for a sampled token id that the trainer drops."""
    if not judging[RolloutValues].logged:
        return NotChecked("needs rollout_log_probs")
    missing, ids = judging[Missing], judging[Missing].by_id
    constants = [each.sample_id for each in judging.evidence.where(_VALUES)]
    no_log_pi = f"no log π ({', '.join(['0', *constants, 'NaN'])} or −inf)"
    ends = (missing.missing_first, missing.missing_last), (missing.dropped_first, missing.dropped_last)
    for column, what in enumerate((no_log_pi, "mask 0")):
        total = int(ids.values[:, column].sum())
        if not total:
            continue
        slot = int(ids.values[:, column].argmax())
        affected, masked, sampled = int(ids.values[slot, column]), int(ids.values[slot, 1]), int(ids.values[slot, 2])
        if column == 0:
            sampled -= masked
            non_finite = total <= judging[TrainerValues].nan + judging[TrainerValues].minus_inf
            if non_finite and affected < _LEAST_NON_FINITE:
                continue
        if affected >= NEARLY_ALL * total and affected >= NEARLY_ALL * sampled:
            token_id, others = int(ids.keys[slot]), total - affected
            place = place_in_response(judging, *ends[column], total)
            place += " (or the mask is shifted by one token)" if column == 1 and place else ""
            seen = (
                f"{affected:,} of {sampled:,} tokens of id {token_id} with a real log μ have {what}{place}; {others:,} "
                "tokens of other ids do."
            )
            numbers = {"token_id": token_id, "sampled": sampled, "dropped": affected, "dropped_of_others": others}
            examples = judging.evidence.where("pad_id_sampled")
            where = tuple(each for each in examples if each.text.startswith(f"id {token_id},"))
            return Finding("critical", seen, numbers, where)
    return Clean()


def _check_many(judging: Judging) -> Outcome:
    """Check for sampled tokens of many ids without a log π."""
    missing, target = judging[Missing], judging[TrainerValues]
    if not judging[RolloutValues].logged:
        return NotChecked("needs rollout_log_probs")
    total = int(missing.by_id.column("without_target").sum())
    # NaN and −inf have a check of their own.
    zeros = total - target.nan - target.minus_inf
    if zeros <= 0 or judging.found("pad_id_sampled"):
        return Clean() if target.logged else NotChecked("needs trainer_log_probs")
    values = " or ".join([each.sample_id for each in judging.evidence.where(_VALUES)] or ["0"])
    place = place_in_response(judging, missing.missing_first, missing.missing_last, total)
    ids = missing.by_id.keys.size
    seen = f"{zeros:,} tokens of {ids:,} ids have log π = {values} while log μ is below −0.5{place}."
    return Finding("critical", seen, {"tokens": zeros, "token_ids": ids})


def place_in_response(judging: Judging, first: int, last: int, total: int) -> str:
    """Return a clause if nearly all the tokens are the last, or the first, of their responses; else an empty string."""
    if judging[Rollouts].rollouts > _MOST_AT_A_PLACE * judging[Rollouts].tokens:
        return ""
    if last >= NEARLY_ALL * total:
        return ", each the last token of its response: the end of sequence"
    if first >= NEARLY_ALL * total:
        return ", each the first token of its response"
    return ""


PAD_ID = Check(
    "pad_id_sampled",
    "one token id that the model sampled has no log π, or mask 0",
    "Few tokens have a large effect: each has a very large |d|, and the tokens after it are scored in another context.",
    "Make masks from lengths and not from `id != pad`, with the end of sequence inside; remove padding ids from "
    "the sampled vocabulary.",
    _check_one,
    unless=if_shifted,
)
WITHOUT_TRAINER = Check(
    "tokens_without_trainer",
    "the trainer has no log-prob for tokens that were sampled",
    "d = −log μ at these tokens, of any size: ρ and χ² become very large.",
    "Check for responses cut at a length and for padded rows: log NaN for a missing value, or mask the tokens.",
    _check_many,
    unless=if_shifted,
    yields_to=("rows_exchanged",),
)
