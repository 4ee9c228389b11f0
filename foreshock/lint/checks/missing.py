"""Tokens without a log-prob: log μ or log π is 0, a constant or not finite, and the other one is real.

A model may sample its padding id like any other token. A trainer that makes its mask from `id != pad` drops that token.
Such an id shows in the data: every occurrence of it is affected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from foreshock.lint.checks.declared import Declared
from foreshock.lint.checks.masked import carries, masked_places, outside_overlong
from foreshock.lint.checks.pairs import Pairs, if_copied, if_shifted
from foreshock.lint.checks.ratio import CLEARLY
from foreshock.lint.checks.responses import Rollouts
from foreshock.lint.checks.values import RolloutValues, TrainerValues
from foreshock.lint.constants import constant_of_masked
from foreshock.lint.counting import (
    LARGEST_D,
    Bools,
    Counting,
    Counts,
    Floats,
    Ints,
    Table,
    TokenPairs,
    largest,
)
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_number, format_percent
from foreshock.rollouts.arrays import rows_of_positions
from foreshock.rollouts.schema import are_log_probs

# The examples of these names are the values found in place of log μ, 0 and constants such as −3, and of log π.
_OF_ENGINE, _OF_TRAINER = "values of no_mu", "values of no log π"
# A log μ below this belongs to an uncertain token, whose log π cannot be 0, even if the trainer sharpens.
_REAL = -0.5
_IDS_KEPT = 256
# This share counts as all: of the tokens of an id, and of all tokens without the log-prob.
_NEARLY_ALL = 0.9
# NaN and −inf have other causes too: fewer at one id are no evidence against the id.
_LEAST_NON_FINITE = 3
# If more than this share of all tokens are the first (or last) of their response, the position proves nothing.
_MOST_AT_A_PLACE = 0.6
_LEAST_TOKENS = 4
# Where forced tokens are looked for; the responses, and their share, with one id at such a place that are no chance.
_FIRST_TOKENS, _LEAST_AT_A_PLACE, _AT_A_PLACE = 64, 8, 0.25
# So many tokens with one log μ are no chance.
_LEAST_EQUAL = 100
# Mean log π is above this at tokens that μ is certain of, and below it at tokens that the engine did not score.
_CERTAIN_LOG_PI = -0.2
# Tokens that truncation or a low temperature makes certain have a mean log π above this.
_UNSAMPLED_LOG_PI = -1.6


class ZerosByPlace(Table):
    """Tokens with log μ = 0 and log π clearly below, by their place in the response, with the range of their ids."""

    COLUMNS = ("tokens", "minus_least_id", "largest_id")
    LARGEST = 2


@dataclass
class NoMu(Counts):
    """Tokens with log μ exactly 0 and log π clearly below, or with log μ a constant and log π clearly different."""

    tokens: int = 0
    first: int = 0  # at the first token of a response, at the last, in a run of them up to the end
    last: int = 0
    trailing: int = 0
    beside: int = 0  # next to another one
    log_pi: float = 0.0  # Σ log π
    k3: float = 0.0
    minus_least: float = largest()  # of all log μ
    most: float = largest()
    by_place: ZerosByPlace = field(default_factory=ZerosByPlace)  # of the first tokens of responses

    def add_pairs(self, pairs: TokenPairs, counting: Counting) -> None:
        """Count the tokens, also by position in the response."""
        constants, below = counting.constants["rollout"], pairs.d < np.float32(-CLEARLY)
        self.add(minus_least=-float(pairs.mu.min()), most=float(pairs.mu.max()))
        if not constants.size and not (below & (pairs.mu == 0)).any():
            return
        differs = below | ((pairs.d > np.float32(CLEARLY)) & (pairs.mu != 0))
        zeros = np.flatnonzero(np.isin(pairs.mu, [0.0, *constants]))
        rows = rows_of_positions(pairs.offsets, zeros)
        ends = pairs.offsets[rows + 1]
        zeros_after = np.searchsorted(zeros, ends) - 1 - np.arange(zeros.size)
        # A response with log μ = 0 everywhere has no such run: greedy sampling logged as processed gives that too.
        lengths = np.diff(pairs.offsets)
        trailing = (zeros_after == ends - 1 - zeros) & (np.bincount(rows, minlength=lengths.size) < lengths)[rows]
        missing = differs[zeros]
        places = zeros[missing]
        log_mu = pairs.mu[places].astype(np.float64)
        log_pi = np.maximum(pairs.pi[places].astype(np.float64), -LARGEST_D)
        self.add(tokens=places.size, first=missing & (zeros == pairs.offsets[rows]), last=missing & (zeros == ends - 1))
        self.add(trailing=missing & trailing, beside=np.isin(places + 1, places) | np.isin(places - 1, places))
        self.add(log_pi=log_pi, k3=np.expm1(log_pi - log_mu) - (log_pi - log_mu))
        at, ids = places - pairs.offsets[rows[missing]], counting.batch.response_token_ids[pairs.places[places]]
        early = (at < _FIRST_TOKENS) & (log_mu == 0)
        self.by_place += ZerosByPlace.of(at[early], 1.0, -ids[early].astype(np.float64), ids[early])
        for value in np.unique(log_mu).tolist():
            counting.add_example(_OF_ENGINE, format_number(value + 0.0))
        for index in places[:3].tolist():
            token_id = counting.batch.response_token_ids[pairs.places[index]]
            of_mu = format_number(float(pairs.mu[index]) + 0.0)
            text = f"id {token_id}, log μ {of_mu}, log π {pairs.pi[index]:.3g}"
            counting.add_token("tokens_without_engine", pairs.places[index], text)


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
        counting.add_example(_OF_TRAINER, format_number(value))
    places = np.flatnonzero(missing)
    return places[_is_real(behaviour[places])]


def _is_real(behaviour: Floats) -> Bools:
    return np.asarray(are_log_probs(behaviour) & (behaviour < np.float32(_REAL)))


def _text(token_id: int, behaviour: float, what: str) -> str:
    return f"id {token_id}, log μ {behaviour:.4g}, {what}"


def forced_ids(judging: Judging) -> dict[int, int]:
    """Return the ids that the engine forced by their place, if nearly all tokens with log μ = 0 are so, not the ends.

    A place has one id in many responses; tokens that the engine did not score have several ids at a place.
    """
    found = judging[NoMu]
    tokens, minus_least, most = found.by_place.values.T
    one = (tokens >= max(_LEAST_AT_A_PLACE, _AT_A_PLACE * judging[Rollouts].rollouts)) & (most == -minus_least)
    if tokens[one].sum() < max(_NEARLY_ALL * found.tokens, 1.0):
        return {}
    if max(found.last, found.trailing) >= _NEARLY_ALL * found.tokens:
        return {}
    return dict(zip(found.by_place.keys[one].tolist(), most[one].astype(np.int64).tolist(), strict=True))


def _check_engine(judging: Judging) -> Outcome:
    found, pairs = judging[NoMu], judging[Pairs]
    k3 = pairs.k3 / pairs.tokens
    if pairs.tokens >= _LEAST_EQUAL and found.most == -found.minus_least != 0.0 and k3 > judging.healthy_k3:
        value = format_number(found.most)
        seen = (
            f"log μ is {value} at each of {pairs.tokens:,} tokens, and log π is not: the engine's logits are all "
            "equal, or the column holds another value."
        )
        title = f"log μ is {value} at every token"
        return Finding("critical", seen, {"log_mu": found.most}, title=title, remedy=_OF_ONE_VALUE)
    if found.tokens < _LEAST_TOKENS or found.log_pi > _CERTAIN_LOG_PI * found.tokens:
        return Clean()
    if forced_ids(judging):
        return Clean("the engine forces the tokens whose log μ is 0")
    place = _place(judging, found.first, found.last, found.tokens)
    if found.trailing >= _NEARLY_ALL * found.tokens and found.last < _NEARLY_ALL * found.tokens:
        place = ", in runs up to the end of their response: padding, or log-probs that the engine did not return"
    all_of = found.tokens >= _NEARLY_ALL * pairs.tokens
    unlikely = found.log_pi <= _UNSAMPLED_LOG_PI * found.tokens
    # A declared temperature excludes that all tokens were certain.
    uncertain = (unlikely or (all_of and judging[Declared].plain > 0)) and not judging[Declared].greedy
    if not place and uncertain and all_of:
        place = f", {format_percent(found.tokens, pairs.tokens)} of all: the engine returned no log-probs"
    elif not place and uncertain and found.beside >= _NEARLY_ALL * found.tokens:
        place = ", in runs: tokens that the model did not sample, such as tool output"
    values = [each.sample_id for each in judging.evidence.where(_OF_ENGINE)] or ["0"]
    if not place and values == ["0"]:
        if not uncertain:
            return Clean()
        place = (
            ", here and there: the engine returned no log-probs for them, as with accepted draft tokens, or allowed "
        )
        place += "no other id (a grammar)"
    rest = pairs.tokens - found.tokens
    without = format_number((pairs.k3 - found.k3) / rest) if rest else "not known"
    seen = (
        f"{found.tokens:,} tokens have log μ = {' or '.join(values)} exactly, and a mean log π of "
        f"{format_number(found.log_pi / found.tokens)}{place}. Without them k3 is {without}."
    )
    numbers = {"no_mu": found.tokens, "no_mu_first": found.first, "no_mu_last": found.last}
    numbers["no_mu_trailing"] = found.trailing
    if values == ["0"] and found.first >= _NEARLY_ALL * found.tokens:
        # A token that the engine may not choose has a log-prob of 0, too.
        return Finding("critical", seen, numbers, title=_OF_FIRST, remedy=f"{_FORCED} {WITHOUT_ENGINE.remedy}")
    return Finding("critical", seen, numbers)


def _check_one(judging: Judging) -> Outcome:
    if not judging[RolloutValues].logged:
        return NotChecked("needs rollout_log_probs")
    missing, ids = judging[Missing], judging[Missing].by_id
    constants = [each.sample_id for each in judging.evidence.where(_OF_TRAINER)]
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
        if affected >= _NEARLY_ALL * total and affected >= _NEARLY_ALL * sampled:
            token_id, others = int(ids.keys[slot]), total - affected
            place = _place(judging, *ends[column], total)
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
    missing, target = judging[Missing], judging[TrainerValues]
    if not judging[RolloutValues].logged:
        return NotChecked("needs rollout_log_probs")
    total = int(missing.by_id.column("without_target").sum())
    # NaN and −inf have a check of their own.
    zeros = total - target.nan - target.minus_inf
    if zeros <= 0 or judging.found("pad_id_sampled"):
        return Clean() if target.logged else NotChecked("needs trainer_log_probs")
    values = " or ".join([each.sample_id for each in judging.evidence.where(_OF_TRAINER)] or ["0"])
    place = _place(judging, missing.missing_first, missing.missing_last, total)
    ids = missing.by_id.keys.size
    seen = f"{zeros:,} tokens of {ids:,} ids have log π = {values} while log μ is below −0.5{place}."
    return Finding("critical", seen, {"tokens": zeros, "token_ids": ids})


def _place(judging: Judging, first: int, last: int, total: int) -> str:
    """Return a clause if nearly all the tokens are the last, or the first, of their responses; else an empty string."""
    if judging[Rollouts].rollouts > _MOST_AT_A_PLACE * judging[Rollouts].tokens:
        return ""
    if last >= _NEARLY_ALL * total:
        return ", each the last token of its response: the end of sequence"
    if first >= _NEARLY_ALL * total:
        return ", each the first token of its response"
    return ""


_OF_ONE_VALUE = (
    "Look whether the engine has loaded any weights (log μ of equal logits is −ln of the number of ids), and what "
    "fills the column."
)
_OF_FIRST = "log μ is 0 at the first token of responses: the engine did not score it, or forced it"
_FORCED = "If the engine forces it (a template's tag, a grammar), set the response mask to 0 there."
WITHOUT_ENGINE = Check(
    "tokens_without_engine",
    "the engine has no log-prob for tokens that the trainer scored",
    "ρ of these tokens is as small as they are unlikely: mean ρ falls below 1 and k3 is large, as if μ had been "
    "truncated.",
    "Let the engine return a log-prob for every token that it samples, the end of sequence too; set the response "
    "mask to 0 for padding, tool output and prompt tokens.",
    _check_engine,
    unless=lambda judging: if_copied(judging) or if_shifted(judging),
)
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
