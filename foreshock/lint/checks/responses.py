"""Rollouts and their responses: empty and aborted ones, and a batch in which every response was cut off."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from foreshock.lint.counting import Counting, Counts, Table, largest
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_percent
from foreshock.measures.inputs import truncated_rollouts
from foreshock.rollouts.arrays import row_sums

if TYPE_CHECKING:
    from foreshock.measures.comparison import StepMeasurement

OF_A_SAMPLE = "only a sample of the rollouts was sent in full"
_EMPTY_SHARE, _LEAST_EMPTY = 0.03, 3
_ABORTED_SHARE, _LEAST_ABORTED = 0.05, 3
_TRUNCATED_SHARE, _LEAST_ROLLOUTS = 0.99, 8
_AT_LIMIT_SHARE = 0.05
_ABORTS = frozenset({"abort", "aborted", "cancelled", "error"})
"""Finish reasons of a response that the engine gave up, as vLLM, SGLang and slime name them."""
# An id that ends this share of the finished responses and stands inside nearly none of them is an end of sequence.
_END_SHARE, _LEAST_OF_END, _INSIDE_SHARE = 0.01, 3, 0.02
# An ordinary id would stand inside so many times. Rollouts of one prompt are alike, so that fewer can be chance.
_LEAST_EXPECTED_INSIDE = 40.0
_ENDED_SHARE, _UNFINISHED_SHARE, _LEAST_UNFINISHED = 0.5, 0.05, 10
# A stop string ends many responses with one id; cut ones end with any.
_LARGEST_OF_UNFINISHED = 0.25


@dataclass
class Rollouts(Counts):
    """Rollouts, their tokens and how their responses ended."""

    rollouts: int = 0
    unseen: int = 0  # outside the sample, of shards that were sent as statistics with a sample
    tokens: int = 0  # generated
    masked: int = 0
    empty: int = 0  # without a response token
    finish_known: int = 0
    truncated: int = 0
    aborted: int = 0  # of those in `rollouts`
    reasons: int = 0  # rollouts with a finish reason

    def add_batch(self, counting: Counting) -> None:
        batch = counting.batch
        truncated, known = truncated_rollouts(batch)
        generated = int(batch.generated_lengths.sum())
        reasons = [reason for reason in batch.finish_reasons or () if reason is not None]
        self.add(rollouts=batch.num_rollouts, tokens=generated, masked=batch.num_tokens - generated)
        self.add(empty=batch.response_lengths == 0, finish_known=known, truncated=truncated)
        self.add(reasons=len(reasons), aborted=sum(reason in _ABORTS for reason in reasons))

    def of_sample(self, measured: StepMeasurement) -> Self:
        """Return the counts with the truncated responses of all rollouts."""
        truncated, known = measured.step.truncated_and_known()
        unseen = measured.step.rollouts - self.rollouts
        return replace(self, unseen=unseen, truncated=truncated, finish_known=known)


class Ends(Table):
    """Responses that are not declared cut, and those with the id inside too, by last token id."""

    COLUMNS = ("responses", "inside")


class Longest(Table):
    """Responses of the largest length that are not declared cut. If there are many, an undeclared limit cut them."""

    COLUMNS = ("responses",)

    def __add__(self, other: Self) -> Self:
        """Return the row of the larger length, or of both if they are equal."""
        both = super().__add__(other)
        return both.rows(both.keys == both.keys.max(initial=0))


class CutAtTotal(Table):
    """Cut responses with the largest total of prompt and response tokens, the key; their least length negated, and the
    largest. A cap on responses gives them one length, the context limit many."""

    COLUMNS = ("responses", "minus_shortest", "longest")
    LARGEST = 2

    def __add__(self, other: Self) -> Self:
        """Return the row of the larger total, or of both if they are equal."""
        both = super().__add__(other)
        return both.rows(both.keys == both.keys.max(initial=0))


@dataclass
class Totals(Counts):
    """Responses by how they ended, and the totals of prompt and response tokens."""

    known: int = 0
    cut: int = 0  # of those in `known`
    largest_total: float = largest()
    at_limit: CutAtTotal = field(default_factory=CutAtTotal)

    def add_batch(self, counting: Counting) -> None:
        batch, (cut, known) = counting.batch, truncated_rollouts(counting.batch)
        totals, lengths = np.diff(batch.prompt_offsets) + batch.response_lengths, batch.response_lengths[cut]
        self.add(known=known, cut=cut, largest_total=float(totals.max(initial=0)))
        self.at_limit += CutAtTotal.of(totals[cut], 1.0, -lengths, lengths)


@dataclass
class LastIds(Counts):
    """The last token ids of the responses that are not declared cut."""

    ends: Ends = field(default_factory=Ends)
    longest: Longest = field(default_factory=Longest)

    def add_batch(self, counting: Counting) -> None:
        batch = counting.batch
        reasons = batch.finish_reasons or [None] * batch.num_rollouts
        cut, _ = truncated_rollouts(batch)
        gave_up = np.array([each in _ABORTS for each in reasons], np.bool_)
        rows = np.flatnonzero(~cut & ~gave_up & (batch.response_lengths > 0))
        ids, places = batch.response_token_ids, batch.response_offsets[rows + 1] - 1
        rows, places = rows[batch.generated[places]], places[batch.generated[places]]
        of_rows = np.zeros(batch.num_rollouts, ids.dtype)
        of_rows[rows] = ids[places]
        times = row_sums(ids == np.repeat(of_rows, batch.response_lengths), batch.response_offsets)[rows]
        keep = of_rows[rows] >= 0
        self.ends += Ends.of(of_rows[rows][keep], 1.0, (times > 1)[keep])
        self.longest += Longest.of(batch.response_lengths[rows][keep], 1.0)


def _check_unfinished(judging: Judging) -> Outcome:
    """Check for responses that stop on an ordinary token, where most others stop on an end of sequence."""
    ends = judging[LastIds].ends
    responses, inside = ends.column("responses"), ends.column("inside")
    total = float(responses.sum())
    is_end = (responses >= max(_LEAST_OF_END, _END_SHARE * total)) & (inside <= _INSIDE_SHARE * responses)
    inside_each = judging[Rollouts].tokens / max(total, 1.0) - 1.0
    is_end &= responses * inside_each >= _LEAST_EXPECTED_INSIDE
    others = responses[~is_end]
    at_longest = float(judging[LastIds].longest.values.sum())
    unfinished = int(others.sum()) - (int(at_longest) if at_longest >= _LEAST_OF_END else 0)
    if (
        unfinished < max(_LEAST_UNFINISHED, _UNFINISHED_SHARE * total)
        or responses[is_end].sum() < _ENDED_SHARE * total
        or others.max() > _LARGEST_OF_UNFINISHED * unfinished
    ):
        return Clean()
    share = f"about {100.0 * unfinished / total:.0f} %"
    seen = (
        f"{unfinished:,} of {int(total):,} responses ({share}) end with one of {others.size:,} ordinary tokens, the "
        f"others with one of {int(is_end.sum())} that stand nowhere else."
    )
    title = f"{share} of the responses are cut or aborted, and not logged so"
    return Finding("warning", seen, {"unfinished": unfinished, "responses": total}, title=title)


def _check_empty(judging: Judging) -> Outcome:
    rollouts, empty = judging[Rollouts].rollouts, judging[Rollouts].empty
    if empty < max(_LEAST_EMPTY, _EMPTY_SHARE * rollouts):
        return Clean()
    seen = f"{empty:,} of {rollouts:,} responses ({format_percent(empty, rollouts)}) have no token."
    return Finding("critical" if empty == rollouts else "warning", seen, {"empty": empty})


def _check_aborted(judging: Judging) -> Outcome:
    known, aborted = judging[Rollouts].reasons, judging[Rollouts].aborted
    if not known:
        return NotChecked("needs finish_reason")
    if aborted < max(_LEAST_ABORTED, _ABORTED_SHARE * known):
        return Clean()
    share = format_percent(aborted, known)
    seen = f"{aborted:,} of {known:,} responses ({share}) were ended by an abort."
    return Finding("warning", seen, {"aborted": aborted}, title=f"{share} of the responses were ended by an abort")


def _check_truncated(judging: Judging) -> Outcome:
    known, cut = judging[Rollouts].finish_known, judging[Rollouts].truncated
    if not known:
        return NotChecked("needs finish_reason or length_cap")
    if known < _LEAST_ROLLOUTS or cut < _TRUNCATED_SHARE * known:
        return Clean()
    seen = f"{cut:,} of {known:,} responses ({format_percent(cut, known)}) were cut off at a length limit."
    return Finding("warning", seen, {"truncated": cut, "rollouts": known})


def _check_context(judging: Judging) -> Outcome:
    """Check for cut responses of several lengths that all end at the largest total of prompt and response."""
    totals = judging[Totals]
    if not totals.known:
        return NotChecked("needs finish_reason or length_cap")
    count, minus_shortest, longest = totals.at_limit.values.sum(axis=0)
    total = int(totals.at_limit.keys.sum())
    too_few = count < max(_LEAST_ROLLOUTS, _AT_LIMIT_SHARE * totals.known)
    if too_few or longest == -minus_shortest or total < totals.largest_total:
        return Clean()
    which = "cut responses all" if count == totals.cut else f"{int(count):,} of {totals.cut:,} cut responses"
    seen = (
        f"{int(count):,} of {totals.known:,} responses ({format_percent(count, totals.known)}) are cut at lengths of "
        f"{int(-minus_shortest):,} to {int(longest):,}, all where prompt and response have {total:,} tokens together, "
        "which no rollout exceeds: the context limit of the engine, not a cap on responses. Long prompts leave no room."
    )
    numbers = {"cut": count, "total": total, "shortest": -minus_shortest, "longest": longest}
    return Finding("warning", seen, numbers, title=f"{which} end at prompt + response = {total:,}")


EMPTY = Check(
    "empty_responses",
    "responses are empty",
    "They have no token to measure, and lower the mean length.",
    "Look at what the engine returned for these prompts: an end of sequence at once, or a failed request.",
    _check_empty,
    explains=False,
)
ABORTED = Check(
    "aborted_responses",
    "responses were ended by an abort",
    "Their last token is no end that the policy chose, and their rewards are those of unfinished answers.",
    "Leave them out of the update, or resume them: a pause for new weights aborts what is in flight.",
    _check_aborted,
    explains=False,
)
UNFINISHED = Check(
    "unfinished_responses",
    "responses are cut or aborted, and not logged so",
    "Their last token is no end that the policy chose, and their rewards are those of unfinished answers.",
    "Log finish_reason or length_cap. Leave aborted responses out of the update, or resume them.",
    _check_unfinished,
    explains=False,
    # Unmasked tool output at the end of a response is no end either.
    yields_to=("all_truncated", "tokens_without_engine", "placeholder_log_probs"),
)
ALL_TRUNCATED = Check(
    "all_truncated",
    "every response was cut off at a length limit",
    "Lengths are those of the limit, and rewards those of unfinished answers.",
    "Raise the limit, or check that the end of sequence is among the stop ids.",
    _check_truncated,
    explains=False,
)
CONTEXT_LIMIT = Check(
    "context_limit",
    "responses are cut at the context limit, before their own cap",
    "Rewards are those of unfinished answers, and the more so the longer the prompt.",
    "Raise the engine's limit of prompt and response together (max_model_len), or leave out prompts that are too long.",
    _check_context,
    explains=False,
)
