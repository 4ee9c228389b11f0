"""Values that are not log-probs of tokens: not finite, placeholders, probabilities, of the wrong sign, of responses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from foreshock.lint.checks.masked import Masked
from foreshock.lint.counting import COLUMNS, Bools, Counting, Counts, Floats, Ints, Piece, largest
from foreshock.lint.evidence import LintEvidence
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_number, format_percent
from foreshock.rollouts.schema import LARGEST_LOG_PROB, LOG_PROB_ROUNDING
from foreshock.severity import Severity

_NO_COLUMN = "no log-probs were logged"
# If this share of the placeholders stand next to another one, they stand in runs.
_MOST_BESIDE = 0.9
# Fewest tokens of a response that is looked at as a whole, fewest such responses, and the share of them that is alike.
_LEAST_TOKENS, _LEAST_RESPONSES, _MOST_RESPONSES = 6, 8, 0.95
_NON_FINITE = {"nan": "NaN", "minus_inf": "−inf", "plus_inf": "+inf"}
_ALL_NON_FINITE = (
    "Weights or logits have become NaN: look at the loss, the gradient norm and the loss scale of the update before, "
    "and skip updates that are not finite."
)


@dataclass
class Values(Counts, abstract=True):
    """The generated tokens of a column of log-probs, and their invalid values."""

    column: ClassVar[str]

    logged: int = 0
    nan: int = 0
    minus_inf: int = 0
    plus_inf: int = 0
    non_finite_first: int = 0  # at the first or the last generated token of a response
    non_finite_last: int = 0
    placeholders: int = 0  # finite, but no log-prob of a sampled token: see `are_log_probs`
    placeholders_above: int = 0  # of these: above 0
    placeholders_beside: int = 0  # next to another one
    placeholder_max: float = largest()
    placeholder_minus_min: float = largest()
    positive: int = 0  # finite and above 0 by more than float32 rounds
    negative: int = 0  # finite and below 0 by more than rounding
    above_one: int = 0
    max: float = largest()  # of the finite values
    minus_min: float = largest()
    responses: int = 0  # of at least `_LEAST_TOKENS` tokens
    constant: int = 0  # of these: with one value below 0
    constant_max: float = largest()
    constant_minus_min: float = largest()
    falling: int = 0  # of these: whose values never rise and mostly fall

    def add_piece(self, piece: Piece, counting: Counting) -> None:
        values = piece.columns.get(self.column)
        if values is None:
            return
        self._add_responses(values, piece.offsets)
        finite, valid = values, piece.valid(self.column)
        if valid is not None:
            is_finite = np.isfinite(values)
            finite, places = values[is_finite], np.flatnonzero(~is_finite)
            self._add_placeholders(piece, values, is_finite & ~valid, counting)
            self.add(nan=np.isnan(values), minus_inf=np.isneginf(values), plus_inf=np.isposinf(values))
            self.add(non_finite_first=np.isin(places, piece.offsets[:-1]))
            self.add(non_finite_last=np.isin(places, piece.offsets[1:] - 1))
            self._add_examples("non_finite_log_probs", piece, ~is_finite, counting)
            most, least = float(finite.max(initial=-np.inf)), float(finite.min(initial=np.inf))
        else:
            least, most = piece.bounds[self.column]
        self.add(logged=values.size, max=most, minus_min=-least)
        if most > LOG_PROB_ROUNDING:
            self.add(positive=finite > LOG_PROB_ROUNDING, above_one=finite > 1.0 + LOG_PROB_ROUNDING)
            self._add_examples(
                "positive_log_probs", piece, np.isfinite(values) & (values > LOG_PROB_ROUNDING), counting
            )
        if least < -LOG_PROB_ROUNDING:
            self.add(negative=finite < -LOG_PROB_ROUNDING)

    def _add_responses(self, values: Floats, offsets: Ints) -> None:
        """Count the responses whose values [T] are those of a response: one value, or a running sum."""
        long = np.diff(offsets) >= _LEAST_TOKENS
        first, end = offsets[:-1][long], offsets[1:][long]
        self.responses += first.size
        # The first tokens of log-probs rarely never rise, so that few responses are read whole.
        begins = np.diff(values[first[:, None] + np.arange(_LEAST_TOKENS)], axis=1)
        for row in np.flatnonzero((begins <= 0).all(axis=1)):
            moves, value = np.diff(values[first[row] : end[row]]), float(values[first[row]])
            if not moves.any() and value < -LOG_PROB_ROUNDING:
                self.add(constant=1, constant_max=value, constant_minus_min=-value)
            self.falling += bool((moves <= 0).all() and 2 * np.count_nonzero(moves) >= moves.size + 1)

    def _add_placeholders(self, piece: Piece, values: Floats, found: Bools, counting: Counting) -> None:
        """Count finite values that are not log-probs of sampled tokens, such as −9999 for −inf."""
        chosen, places = values[found], np.flatnonzero(found)
        if chosen.size:
            self.add(placeholders=chosen.size, placeholders_above=chosen > 0)
            self.add(placeholders_beside=np.isin(places + 1, places) | np.isin(places - 1, places))
            self.add(placeholder_max=float(chosen.max()), placeholder_minus_min=-float(chosen.min()))
            self._add_examples("placeholder_log_probs", piece, found, counting)

    def _add_examples(self, check: str, piece: Piece, wrong: Bools, counting: Counting) -> None:
        if counting.has_room(check):
            for index in np.flatnonzero(wrong)[:3].tolist():
                text = f"{self.column} log-prob {piece.columns[self.column][index]:.6g}"
                counting.add_token(check, piece.places[index], text)

    @property
    def non_finite(self) -> int:
        """The number of values that are not finite."""
        return self.nan + self.minus_inf + self.plus_inf

    @property
    def sign_check(self) -> str:
        """The check that the positive values of the column belong to; empty if there are none."""
        if not self.positive:
            return ""
        if self.positive < 0.5 * self.logged or self.negative:
            return "positive_log_probs" if self.positive > self.placeholders_above else ""
        return "negated_log_probs" if self.above_one else "probabilities_as_log_probs"

    @property
    def of_responses(self) -> str:
        """What the values are if they are numbers of whole responses; empty if they are not."""
        least = max(_LEAST_RESPONSES, _MOST_RESPONSES * self.responses)
        if self.constant >= least and -self.constant_minus_min < self.constant_max:
            return (
                f"has one value in {self.constant:,} of {self.responses:,} responses, such as their mean or their sum"
            )
        if self.falling >= least:
            return f"never rises in {self.falling:,} of {self.responses:,} responses, as a running sum"
        return ""

    @property
    def holds_log_probs(self) -> bool:
        """False if the values are probabilities, log-probs of the wrong sign, or numbers of whole responses."""
        return self.sign_check in ("", "positive_log_probs") and not self.of_responses


class RolloutValues(Values):
    """The column of log μ."""

    column = "rollout"


class TrainerValues(Values):
    """The column of log π."""

    column = "trainer"


@dataclass
class Auxiliary(Counts):
    """The generated tokens' entropies and the advantages, and how many of them are not finite."""

    entropies: int = 0
    entropies_not_finite: int = 0
    advantages: int = 0
    advantages_not_finite: int = 0

    def add_batch(self, counting: Counting) -> None:
        batch = counting.batch
        generated = slice(None) if batch.response_mask is None else batch.response_mask != 0
        if batch.entropy is not None:
            found = batch.entropy[generated]
            self.add(entropies=found.size, entropies_not_finite=~np.isfinite(found))
        if batch.advantage is not None:
            of_tokens = batch.advantage.shape == batch.response_token_ids.shape
            found = batch.advantage[generated] if of_tokens else batch.advantage
            self.add(advantages=found.size, advantages_not_finite=~np.isfinite(found))


VALUES: dict[str, type[Values]] = {"rollout": RolloutValues, "trainer": TrainerValues}


def columns_without_log_probs(evidence: LintEvidence) -> list[str]:
    """Return the columns whose values are probabilities, log-probs of the wrong sign, or numbers of responses."""
    return [COLUMNS[name] for name, kind in VALUES.items() if not evidence[kind].holds_log_probs]


def logged_columns(judging: Judging) -> dict[str, Values]:
    """Return the values of each column that was logged, by its name in the schema."""
    return {COLUMNS[name]: values for name, kind in VALUES.items() if (values := judging[kind]).logged}


def _check_sign(check: str, judging: Judging) -> Outcome:
    if not (columns := logged_columns(judging)):
        return NotChecked(_NO_COLUMN)
    parts: list[str] = []
    numbers: dict[str, float] = {}
    for name, values in columns.items():
        if values.sign_check != check:
            continue
        positive, most, least = values.positive, values.max, -values.minus_min
        if check == "positive_log_probs":
            positive -= values.placeholders_above
            most = min(most, LARGEST_LOG_PROB)
            text = f"are above 0, by at most {format_number(most)}, as of rounded logits; they are measured"
        else:
            text = f"are above 0; they range from {format_number(least)} to {format_number(most)}"
        parts.append(
            f"{positive:,} of {values.logged:,} values of {name} ({format_percent(positive, values.logged)}) {text}"
        )
        numbers |= {f"{values.column}_positive": positive}
        numbers |= {f"{values.column}_min": least, f"{values.column}_max": most}
    if not parts:
        return Clean()
    severity: Severity = "warning" if check == "positive_log_probs" else "critical"
    return Finding(severity, "; ".join(parts) + ".", numbers, judging.evidence.where("positive_log_probs"))


def _check_responses(judging: Judging) -> Outcome:
    if not (columns := logged_columns(judging)):
        return NotChecked(_NO_COLUMN)
    parts = [f"{name} {values.of_responses}" for name, values in columns.items() if values.of_responses]
    return Finding("critical", "; ".join(parts) + ".", {}) if parts else Clean()


def _check_placeholders(judging: Judging) -> Outcome:
    """Check for placeholders: values that were set apart because no sampled token has such a log-prob."""
    if not (columns := logged_columns(judging)):
        return NotChecked(_NO_COLUMN)
    parts: list[str] = []
    numbers: dict[str, float] = {}
    for name, values in columns.items():
        count = values.placeholders
        if not count or not values.holds_log_probs:
            continue
        ends = -values.placeholder_minus_min, values.placeholder_max
        of = format_number(ends[0]) if ends[0] == ends[1] else " to ".join(map(format_number, ends))
        runs = values.placeholders_beside >= _MOST_BESIDE * count
        where = (
            " and stand in runs, as of tokens that the model did not sample, or that were not scored" if runs else ""
        )
        parts.append(f"{count:,} of {values.logged:,} values of {name} are {of}{where}")
        numbers |= {f"{values.column}_placeholders": count}
        numbers |= {f"{values.column}_least": ends[0], f"{values.column}_largest": ends[1]}
    hidden = judging[Masked].placeholders
    ignored = f"{hidden:,} placeholders at masked tokens are ignored" if hidden else ""
    if not parts:
        return Clean(ignored)
    examples = judging.evidence.where("placeholder_log_probs")
    where = f", such as token {examples[0].token} of {examples[0].sample_id}" if examples else ""
    seen = (
        f"{'; '.join(parts)}: no sampled token has such a log-prob. They are set apart{where}; all others are measured."
        f"{f' {ignored}.' if ignored else ''}"
    )
    return Finding("warning", seen, numbers)


def _check_finite(judging: Judging) -> Outcome:
    if not (columns := logged_columns(judging)):
        return NotChecked(_NO_COLUMN)
    parts: list[str] = []
    numbers: dict[str, float] = {}
    for name, values in columns.items():
        found = {kind: count for kind in _NON_FINITE if (count := getattr(values, kind))}
        if found:
            counted = ", ".join(f"{count:,} {_NON_FINITE[kind]}" for kind, count in found.items())
            parts.append(f"{name}: {counted} of {values.logged:,}{_place(values)}")
            numbers |= {f"{values.column}_{kind}": count for kind, count in found.items()}
    all_of = [name for name, values in columns.items() if values.non_finite == values.logged]
    title = f"all {' and '.join(all_of)} are NaN or infinite" if all_of else ""
    remedy = _ALL_NON_FINITE if all_of else ""
    return Finding("warning", "; ".join(parts) + ".", numbers, title=title, remedy=remedy) if parts else Clean()


def _place(values: Values) -> str:
    """Return a clause if all non-finite values stand at the same end of the responses; else an empty string."""
    for end, count in (("first", values.non_finite_first), ("last", values.non_finite_last)):
        if values.non_finite > 1 and count == values.non_finite < values.logged / 2:
            return f", each at the {end} token of its response"
    return ""


def _check_auxiliary(judging: Judging) -> Outcome:
    found = judging[Auxiliary]
    columns = {
        "entropy": (found.entropies_not_finite, found.entropies),
        "advantage": (found.advantages_not_finite, found.advantages),
    }
    wrong = {name: counts for name, counts in columns.items() if counts[0]}
    if not wrong:
        return Clean()
    parts = [f"{count:,} of {total:,} values of {name} are NaN or infinite" for name, (count, total) in wrong.items()]
    shares = [f"{format_percent(*counts)} of the values of {name}" for name, counts in wrong.items()]
    title = f"{' and '.join(shares)} are NaN or infinite"
    return Finding("warning", "; ".join(parts) + ".", {name: count for name, (count, _) in wrong.items()}, title=title)


SIGNS = (
    Check(
        "probabilities_as_log_probs",
        "probabilities were logged instead of log-probs",
        "Every measure is meaningless: differences of probabilities are read as differences of their logarithms.",
        "Log the natural logarithm: remove the exp(), or apply np.log to the logged values.",
        partial(_check_sign, "probabilities_as_log_probs"),
    ),
    Check(
        "negated_log_probs",
        "log-probs were logged with the opposite sign",
        "Every measure is meaningless: likely tokens count as unlikely ones, and ρ as 1/ρ if both columns are negated.",
        "Log log-probs and not the loss (negative log-likelihood): multiply by −1.",
        partial(_check_sign, "negated_log_probs"),
    ),
    Check(
        "response_log_probs",
        "numbers of whole responses were logged instead of the log-probs of tokens",
        "Every measure is meaningless: the number of a response is compared with those of its tokens.",
        "Log the log-prob of each sampled token (in vLLM the entries of `logprobs`, not `cumulative_logprob`).",
        _check_responses,
    ),
    Check(
        "positive_log_probs",
        "some log-probs are slightly above 0: rounded logits",
        "ρ of these tokens is off by as much as their log-probs were rounded.",
        "Compute the log-softmax in float32 from float32 logits.",
        partial(_check_sign, "positive_log_probs"),
    ),
    Check(
        "placeholder_log_probs",
        "some values in the place of log-probs are placeholders",
        "These tokens are left out of every mean; they are counted, and all others are measured.",
        "−9999 and the like: the engine or the mask wrote it for −inf or for a missing value; let it log the value, or "
        "NaN. Tokens that the model did not sample (tool output, padding): set the response mask to 0 there.",
        _check_placeholders,
    ),
)
NON_FINITE = Check(
    "non_finite_log_probs",
    "some log-probs are NaN or infinite",
    "These tokens are left out of every mean, so the measures do not show their cause.",
    "−inf of the trainer: it truncates (top-p, top-k) and the engine does not. −inf or NaN of the engine: it "
    "scored tokens that it did not sample, or it overflowed. NaN of padding: set the response mask to 0 there.",
    _check_finite,
)
NON_FINITE_VALUES = Check(
    "non_finite_values",
    "entropies or advantages are NaN or infinite",
    "A loss that reads them is NaN too, and one such update destroys the weights.",
    "Look for rewards that are divided by a spread of 0 or are NaN themselves, and for logits that overflow.",
    _check_auxiliary,
    explains=False,
)
